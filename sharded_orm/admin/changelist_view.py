"""The changelist page: the rows of one shard, of one shard key, or of all shards together."""

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
from sharded_orm.admin.base import NAMES_FAILURES, ShardedBase, csrf_protected
from sharded_orm.admin.changelist import ShardedChangeList
from sharded_orm.admin.error_pages import all_shards_down_page, message_page, shard_down_page
from sharded_orm.admin.exceptions import InvalidFocus
from sharded_orm.admin.forms import OnShardFormSet, with_base, with_fixed_key
from sharded_orm.admin.identity import is_misplaced
from sharded_orm.admin.search import leads_to_global, search
from sharded_orm.admin.shard_scope import ShardScope, stored_value
from sharded_orm.exceptions import (
    CrossShardRelation,
    ScatterError,
    ScatterNotSupported,
    ShardKeyChanged,
)
from sharded_orm.routers import standing_on
from sharded_orm.scatter.failures import is_failure


class ChangeListMixin(ShardedBase):
    """Mixin of :class:`ShardedModelAdmin` with the changelist page."""

    change_list_template = "admin/sharded_orm/change_list.html"

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[Any]:
        return ShardedChangeList

    @csrf_protected
    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Run Django's changelist view for the scope of the request (:class:`ShardScope`).

        If the URL names a shard or key that does not exist, or if the shard of the scope does not
        answer, return a page with the reason and a picker for other shards.
        """
        try:
            scope = self.focus(request)
        except InvalidFocus as exc:
            return message_page(self, request, self.error_text(request, exc))
        request.__dict__[NAMES_FAILURES] = True
        try:
            with self._transaction(request, scope):
                response = super().changelist_view(request, extra_context)
        except ScatterNotSupported as exc:
            return message_page(
                self, request, f"This list cannot be merged over all shards. {exc}", scope
            )
        except (ShardKeyChanged, CrossShardRelation) as exc:
            if request.method != "POST":
                raise
            # The rows cannot be saved. Since the page was shown, an edited row, or a row to which
            # an edited row refers, has moved to another shard.
            self.message_user(
                request, f"Nothing was saved: {self.error_text(request, exc)}", messages.ERROR
            )
            return HttpResponseRedirect(request.get_full_path())
        except ScatterError as exc:
            return all_shards_down_page(self, request, scope, exc)
        except DatabaseError as exc:
            if scope.home is None or not is_failure(exc):
                raise
            return shard_down_page(self, request, scope, exc)
        return self._with_scope(request, response, scope)

    @contextmanager
    def _transaction(self, request: HttpRequest, scope: ShardScope) -> Iterator[None]:
        """Within the ``with`` block, let Django's view open its transaction on the shard that the
        page shows.

        If the request saves rows, first open a transaction for the admin's log. It ends after the
        shard's transaction, so the shard commits first. If the commit of the shard fails, the log
        entries are rolled back.
        """
        with ExitStack() as stack:
            stack.enter_context(standing_on(scope.alias))
            if request.method == "POST" and "_save" in request.POST:
                stack.enter_context(transaction.atomic(using=router.db_for_write(LogEntry)))
            yield

    def _with_scope(
        self, request: HttpRequest, response: HttpResponse, scope: ShardScope
    ) -> HttpResponse:
        """Return the response of Django's changelist view, and keep the shard or key that the URL
        names.

        If a lookup in the URL is invalid, Django redirects to a URL without other parameters. Add
        the shard or key to that URL. If the rows are not counted, also replace the text "Select all
        123 rows" by a text without a number.
        """
        if isinstance(response, HttpResponseRedirect):
            if response.url == f"{request.path}?{ERROR_FLAG}=1":
                return HttpResponseRedirect(self._url(request, scope, {ERROR_FLAG: "1"}))
        elif isinstance(response, TemplateResponse) and response.context_data is not None:
            cl = response.context_data.get("cl")
            if cl is not None and not cl.is_exact:
                response.context_data["selection_note_all"] = "All matching rows selected"
        return response

    def _url(self, request: HttpRequest, scope: ShardScope, parameters: dict[str, str]) -> str:
        query = request.GET.copy()
        query.clear()
        query.update({**scope.query, **parameters})
        if IS_POPUP_VAR in request.GET:
            query[IS_POPUP_VAR] = "1"
        return f"{request.path}?{query.urlencode()}"

    # -- Rows --------------------------------------------------------------------

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        """Search the rows as Django does. In addition, search fields may be fields of global
        models.

        For such a field, a first query finds the matching rows of the global model in the global
        database. A second query finds the sharded rows that refer to them.
        """
        fields: Sequence[str] = list(map(str, self.get_search_fields(request)))
        if not (search_term and leads_to_global(queryset.model, fields)):
            return super().get_search_results(request, queryset, search_term)
        return search(queryset, fields, search_term, request)

    def get_paginator(self, request: HttpRequest, queryset: Any, *args: Any, **kwargs: Any) -> Any:
        # For the autocomplete view over all shards, return a paginator that counts no rows. The
        # changelist of all shards does not use a paginator.
        paginator = super().get_paginator(request, queryset, *args, **kwargs)
        if getattr(queryset, "model", None) is self.model and self.focus(request).everywhere:
            return pagination.Pages(paginator.object_list, paginator.per_page)
        return paginator

    def _get_edited_object_pks(self, request: HttpRequest, prefix: str) -> list[str]:
        # Overrides ModelAdmin._get_edited_object_pks(), which list_editable uses. Leave out primary
        # keys that no column can hold, because pk__in with such a number fails on SQLite. The forms
        # of these keys are then refused in the same way as forms of deleted rows.
        pks = super()._get_edited_object_pks(request, prefix)
        return [pk for pk in pks if stored_value(self.opts.pk, pk) is not None]

    def _save_formset(self, request: HttpRequest, formset: Any) -> None:
        # Overrides ModelAdmin._save_formset() (Django 6.1), which silently skips rows that must not
        # be changed. Raise an error instead if the user has edited a row that has moved to another
        # shard since the page was shown.
        for number, form in enumerate(formset.forms):
            if is_misplaced(form.instance):
                # ``form`` has no fields, because Django removes them if the row must not be
                # changed. To find out whether the user has edited the row, build a form with all
                # fields.
                whole_form = formset.form(
                    request.POST,
                    prefix=form.prefix,
                    instance=form.instance,
                    **formset.get_form_kwargs(number),
                )
                if whole_form.has_changed():
                    form.instance._refuse_other_shard(form.instance._state.db)
        super()._save_formset(request, formset)  # type: ignore[misc]  # the type stubs lack this method

    def get_changelist_form(self, request: HttpRequest, **kwargs: Any) -> Any:
        # Leave the shard key out of the form, because the key never changes. If list_editable has
        # the key, the list shows it as text, without an input.
        key = self.shard_options.key
        if key is not None:
            kwargs.setdefault("exclude", [key.name])
        return super().get_changelist_form(request, **kwargs)

    def get_changelist_formset(self, request: HttpRequest, **kwargs: Any) -> Any:
        kwargs["formset"] = with_base(kwargs.get("formset", BaseModelFormSet), OnShardFormSet)
        formset = super().get_changelist_formset(request, **kwargs)
        # Wrap the form class here and not in get_changelist_form(), because a project may override
        # that method. The wrapper also checks constraints that include the shard key, although the
        # form has no field for the key.
        formset.form = with_fixed_key(formset.form, self.shard_options)
        return formset
