"""Pages for requests whose rows cannot be read. They show the reason, and offer other shards."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib.admin.options import IS_POPUP_VAR
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from sharded_orm.admin.base import ShardedBase
from sharded_orm.admin.failures import by_node, cause_of, outage_text
from sharded_orm.admin.shard_picker import ShardPicker
from sharded_orm.admin.shard_scope import ShardScope
from sharded_orm.exceptions import NoReachableShard, ScatterError


def message_page(
    model_admin: ShardedBase,
    request: Any,
    sentence: str,
    scope: ShardScope | None = None,
    *,
    status: int = 200,
) -> HttpResponse:
    """Return a page with ``sentence`` and a picker for another shard or key.

    :param scope: the scope of the request: a shard, a key or the whole group. None if the URL names
        a shard or key that does not exist.
    """
    site, opts = model_admin.admin_site, model_admin.opts
    request.current_app = site.name
    permits = partial(model_admin.has_shard_permission, request)
    context = {
        **site.each_context(request),
        "title": f"Select {opts.verbose_name}",
        "opts": opts,
        "sentence": sentence,
        "picker": ShardPicker(model_admin.shard_options, request.GET, scope, permits),
        "is_popup": IS_POPUP_VAR in request.GET,
        "media": model_admin.media,
    }
    return TemplateResponse(request, "admin/sharded_orm/no_changelist.html", context, status=status)


def shard_down_page(
    model_admin: ShardedBase, request: HttpRequest, scope: ShardScope, error: BaseException
) -> HttpResponse:
    """Return the page that says that the shard in ``scope`` does not answer. The status is 503."""
    assert scope.home is not None
    return message_page(model_admin, request, outage_text(scope.home, error), scope, status=503)


def no_reachable_shard_page(
    model_admin: ShardedBase, request: HttpRequest, error: NoReachableShard
) -> HttpResponse:
    """Return the page that says that no node with open shards can be reached. The status is 503."""
    causes = "; ".join(f"{node}: {cause_of(cause)}" for node, cause in error.causes.items())
    sentence = f"No new row can be stored, because no node with open shards answers. {causes}."
    return message_page(model_admin, request, sentence, status=503)


def all_shards_down_page(
    model_admin: ShardedBase, request: HttpRequest, scope: ShardScope, error: ScatterError
) -> HttpResponse:
    """Return the page for a query that failed on all shards. It shows the cause of one failure, and
    has the status 503.
    """
    failure = by_node(error.failures)[0]
    sentence = f"No shard could run the query: tables may not be migrated, or the query may be wrong. {failure}."
    return message_page(model_admin, request, sentence, scope, status=503)
