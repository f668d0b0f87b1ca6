"""The page in place of rows that cannot be shown: why, and where else to look."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib.admin.options import IS_POPUP_VAR
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from sharded_orm.admin.base import ShardedBase
from sharded_orm.admin.failures import by_node, silence
from sharded_orm.admin.shard_picker import ShardPicker
from sharded_orm.admin.shard_scope import ShardScope
from sharded_orm.exceptions import ScatterError


def no_rows(
    model_admin: ShardedBase,
    request: Any,
    sentence: str,
    focus: ShardScope | None = None,
    *,
    status: int = 200,
) -> HttpResponse:
    """A page that says ``sentence`` and offers other places."""
    site, opts = model_admin.admin_site, model_admin.opts
    request.current_app = site.name
    permits = partial(model_admin.has_shard_permission, request)
    context = {
        **site.each_context(request),
        "title": f"Select {opts.verbose_name}",
        "opts": opts,
        "sentence": sentence,
        "picker": ShardPicker(model_admin.shard_options, request.GET, focus, permits),
        "is_popup": IS_POPUP_VAR in request.GET,
        "media": model_admin.media,
    }
    return TemplateResponse(request, "admin/sharded_orm/no_changelist.html", context, status=status)


def no_answer(
    model_admin: ShardedBase, request: HttpRequest, focus: ShardScope, error: BaseException
) -> HttpResponse:
    """The same for a shard that does not answer, with the status 503."""
    assert focus.home is not None
    return no_rows(model_admin, request, silence(focus.home, error), focus, status=503)


def no_shard_answers(
    model_admin: ShardedBase, request: HttpRequest, focus: ShardScope, error: ScatterError
) -> HttpResponse:
    """The same for a query that no shard could run: there is no partial result to show."""
    first = by_node(error.failures)[0]
    sentence = f"No shard could run the query: tables may not be migrated, or the query may be wrong. {first}."
    return no_rows(model_admin, request, sentence, focus, status=503)
