"""The changelist page: one shard, one key, or all shards together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from django.contrib import messages
from django.contrib.admin.models import LogEntry
from django.contrib.admin.options import IS_POPUP_VAR
from django.contrib.admin.views.main import ERROR_FLAG
from django.db import DatabaseError, router, transaction
from django.forms.models import BaseModelFormSet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse

from sharded_orm.admin import pagination
from sharded_orm.admin.base import ShardedBase, csrf_protected
from sharded_orm.admin.changelist import ShardedChangeList
from sharded_orm.admin.error_pages import no_answer, no_rows, no_shard_answers
from sharded_orm.admin.forms import OnShardFormSet, keeping_key, on_shard
from sharded_orm.admin.search import crosses, search
from sharded_orm.admin.shard_scope import ShardScope, stored_value
from sharded_orm.exceptions import (
    CrossShardRelation,
    InvalidFocus,
    ScatterError,
    ScatterNotSupported,
    ShardKeyChanged,
)
from sharded_orm.routers import standing_on
from sharded_orm.scatter.failures import is_failure


class ChangeListMixin(ShardedBase):
    """The changelist of a :class:`ShardedModelAdmin`."""

    change_list_template = "admin/sharded_orm/change_list.html"

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[Any]:
        return ShardedChangeList

    @csrf_protected
    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Django's, on the shard that the request looks at.

        A place that there is not, and a shard that does not answer, are said so on a page
        with the way to other places.
        """
        try:
            focus = self.focus(request)
        except InvalidFocus as exc:
            return no_rows(self, request, self.reason(request, exc))
        try:
            with self._at(request, focus):
                response = super().changelist_view(request, extra_context)
        except ScatterNotSupported as exc:
            return no_rows(
                self, request, f"This list cannot be merged over all shards. {exc}", focus
            )
        except (ShardKeyChanged, CrossShardRelation) as exc:
            if request.method != "POST":
                raise
            # A row was moved since the page was shown, or relates to one that was.
            self.message_user(
                request, f"Nothing was saved: {self.reason(request, exc)}", messages.ERROR
            )
            return HttpResponseRedirect(request.get_full_path())
        except ScatterError as exc:
            return no_shard_answers(self, request, focus, exc)
        except DatabaseError as exc:
            if focus.home is None or not is_failure(exc):
                raise
            return no_answer(self, request, focus, exc)
        return self._placed(request, response, focus)

    @contextmanager
    def _at(self, request: HttpRequest, focus: ShardScope) -> Iterator[None]:
        """Django's transaction is on the shard, and inside one of the log of rows that it saves.

        The shard commits first: what it refuses then is not logged.
        """
        with ExitStack() as stack:
            stack.enter_context(standing_on(focus.alias))
            if request.method == "POST" and "_save" in request.POST:
                stack.enter_context(transaction.atomic(using=router.db_for_write(LogEntry)))
            yield

    def _placed(
        self, request: HttpRequest, response: HttpResponse, focus: ShardScope
    ) -> HttpResponse:
        """The answer of Django's view, at this place where Django has forgotten it."""
        if isinstance(response, HttpResponseRedirect):
            if response.url == f"{request.path}?{ERROR_FLAG}=1":
                return HttpResponseRedirect(self._here(request, focus, {ERROR_FLAG: "1"}))
        elif isinstance(response, TemplateResponse) and response.context_data is not None:
            cl = response.context_data.get("cl")
            if cl is not None and not cl.exact:
                response.context_data["selection_note_all"] = "All matching rows selected"
        return response

    def _here(self, request: HttpRequest, focus: ShardScope, more: dict[str, str]) -> str:
        query = request.GET.copy()
        query.clear()
        query.update({**focus.query, **more})
        if IS_POPUP_VAR in request.GET:
            query[IS_POPUP_VAR] = "1"
        return f"{request.path}?{query.urlencode()}"

    # -- Rows --------------------------------------------------------------------

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        """Django's; fields that lead to the global database are answered there first."""
        fields: Sequence[str] = list(map(str, self.get_search_fields(request)))
        if not (search_term and crosses(queryset.model, fields)):
            return super().get_search_results(request, queryset, search_term)
        return search(queryset, fields, search_term, request)

    def get_paginator(self, request: HttpRequest, queryset: Any, *args: Any, **kwargs: Any) -> Any:
        # For the autocomplete view; the changelist of all shards turns its own pages.
        found = super().get_paginator(request, queryset, *args, **kwargs)
        if getattr(queryset, "model", None) is self.model and self.focus(request).everywhere:
            return pagination.Pages(found.object_list, found.per_page)
        return found

    def _get_edited_object_pks(self, request: HttpRequest, prefix: str) -> list[str]:
        # Overrides ModelAdmin's, for list_editable: without what no column can hold, which makes
        # SQLite fail in pk__in. The form of such a row is refused like that of one that is gone.
        pks = super()._get_edited_object_pks(request, prefix)
        return [pk for pk in pks if stored_value(self.opts.pk, pk) is not None]

    def get_changelist_form(self, request: HttpRequest, **kwargs: Any) -> Any:
        # The key of a row does not change; in list_editable it is only shown.
        key = self.shard_options.key
        if key is not None:
            kwargs.setdefault("exclude", [key.name])
        return super().get_changelist_form(request, **kwargs)

    def get_changelist_formset(self, request: HttpRequest, **kwargs: Any) -> Any:
        kwargs["formset"] = on_shard(kwargs.get("formset", BaseModelFormSet), OnShardFormSet)
        made = super().get_changelist_formset(request, **kwargs)
        # Here, for the project may have a form of its own. Constraints over the key are checked,
        # too, although it is no field of the form.
        made.form = keeping_key(made.form, self.shard_options)
        return made
