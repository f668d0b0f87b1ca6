"""The page in place of rows that cannot be shown: why, and where else to look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib.admin.options import IS_POPUP_VAR
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from sharded_orm.admin.failures import cause_of
from sharded_orm.admin.focus import Focus
from sharded_orm.admin.picker import Picker

if TYPE_CHECKING:
    from sharded_orm.admin.base import ShardedBase


def no_rows(
    model_admin: ShardedBase,
    request: Any,
    sentence: str,
    focus: Focus | None = None,
    *,
    status: int = 200,
) -> HttpResponse:
    """A page that says ``sentence`` and offers other places."""
    site, opts = model_admin.admin_site, model_admin.opts
    request.current_app = site.name
    context = {
        **site.each_context(request),
        "title": f"Select {opts.verbose_name}",
        "opts": opts,
        "sentence": sentence,
        "picker": Picker(model_admin.shard_options, request.GET, focus),
        "is_popup": IS_POPUP_VAR in request.GET,
        "media": model_admin.media,
    }
    return TemplateResponse(request, "admin/sharded_orm/no_changelist.html", context, status=status)


def no_answer(
    model_admin: ShardedBase, request: HttpRequest, focus: Focus, error: BaseException
) -> HttpResponse:
    """The same for a shard that does not answer, with the status 503."""
    home = focus.home
    assert home is not None
    sentence = f"{home.alias} on {home.node} does not answer: {cause_of(error)}."
    return no_rows(model_admin, request, sentence, focus, status=503)
