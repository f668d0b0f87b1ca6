"""Deleting one row, or rows of several shards, with what hangs on them."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin import actions, helpers
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import NestedObjects, model_ngettext
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, Error, router, transaction
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from sharded_orm.admin.action_selection import ActionSelection, Part
from sharded_orm.admin.base import csrf_protected
from sharded_orm.admin.display import change_url, named
from sharded_orm.admin.error_pages import shard_down_page
from sharded_orm.admin.identity import identify
from sharded_orm.admin.object_views import ObjectViewsMixin
from sharded_orm.admin.run_by_shard import run_by_shard
from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.routers import standing_on
from sharded_orm.scatter.failures import is_failure
from sharded_orm.topology.model import Shard

#: As many of the chosen rows of a shard are listed with what hangs on them; all are counted.
MAX_LISTED = 100


@dataclass(frozen=True)
class Deletion:
    """What a deletion would take on one shard: plural name of each model -> number of rows."""

    part: Part
    counts: dict[str, int]
    #: As Django's ``unordered_list`` takes them, and how many more there are.
    listed: list[Any]
    unlisted: int

    @property
    def shard(self) -> Shard:
        return self.part.shard

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@admin.action(
    permissions=["delete"],
    description=gettext_lazy("Delete selected %(verbose_name_plural)s"),
)
def delete_selected(
    model_admin: Any, request: HttpRequest, selection: ActionSelection
) -> HttpResponse | None:
    """Django's action of that name, for rows of several shards."""
    found: HttpResponse | None = model_admin.delete_selection(request, selection)
    return found


# Read by ActionsMixin.
delete_selected.takes_selection = True  # type: ignore[attr-defined]  # on a function, as Django marks actions


class DeleteViewsMixin(ObjectViewsMixin):
    """Of :class:`ShardedModelAdmin`: what deletes rows."""

    delete_confirmation_template = "admin/sharded_orm/delete_confirmation.html"
    delete_selected_confirmation_template = "admin/sharded_orm/delete_selected_confirmation.html"

    def get_actions(self, request: HttpRequest) -> Any:
        found: dict[str, Any] = super().get_actions(request)
        theirs = found.get("delete_selected")
        if theirs is not None and theirs[0] is actions.delete_selected:
            found["delete_selected"] = (delete_selected, *theirs[1:])
        return found

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        # Overrides ModelAdmin's: on the shard of the rows, which are all on one, with links that
        # hold their keys.
        rows = list(objs)
        if not rows:
            return [], {}, set(), []
        alias = rows[0]._state.db
        with standing_on(alias):
            collector: Any = NestedObjects(using=alias, origin=objs)
            collector.collect(rows)
        for model, found in collector.model_objs.items():
            if shard_options(model) is not None and not model._meta.auto_created:
                identify(found)
        lacking: set[Any] = set()

        def shown(row: Any) -> Any:
            opts = row._meta
            name = f"{capfirst(opts.verbose_name)}: {row}"
            if not self.admin_site.is_registered(type(row)):
                return name
            model_admin = self.admin_site.get_model_admin(type(row))
            if not model_admin.has_delete_permission(request, row):
                lacking.add(opts.verbose_name)
            url = change_url(row, self.admin_site.name)
            if url is None:
                return name
            return format_html('{}: <a href="{}">{}</a>', capfirst(opts.verbose_name), url, row)

        nested = collector.nested(shown)
        protected = [shown(row) for row in collector.protected]
        counts = {
            model._meta.verbose_name_plural: len(found)
            for model, found in collector.model_objs.items()
        }
        return nested, counts, lacking, protected

    # -- One row ---------------------------------------------------------------

    @csrf_protected
    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: Any = None
    ) -> HttpResponse:
        """Django's, on the row's shard, which commits before the admin's log."""
        self._look_at(request, object_id)
        scope = self.focus(request)
        try:
            if request.method != "POST":
                return super().delete_view(request, object_id, extra_context)
            with transaction.atomic(using=router.db_for_write(LogEntry)):
                with standing_on(scope.alias):
                    return super().delete_view(request, object_id, extra_context)
        except DatabaseError as exc:
            if not is_failure(exc):
                raise
            return shard_down_page(self, request, scope, exc)

    def render_delete_form(self, request: HttpRequest, context: Any) -> HttpResponse:
        row = context["object"]
        context["object"], context["shard"] = named(row), self.focus(request).home
        return super().render_delete_form(request, context)

    # -- Rows of several shards ------------------------------------------------

    def delete_selection(
        self, request: HttpRequest, selection: ActionSelection
    ) -> HttpResponse | None:
        """Shows what would be deleted on which shards; once confirmed, deletes it there.

        Every shard for itself: see :func:`run_by_shard`. What is deleted is what was shown; if it
        has become more or less since, it is shown again.
        """
        deletions, lacking, protected = self._deletions(request, selection)
        shown = _digest(deletions)
        if request.POST.get("post") and not protected:
            if lacking:
                raise PermissionDenied
            if request.POST.get("confirmed", shown) == shown:
                self._delete(request, selection, deletions)
                return None
            self.message_user(
                request,
                "What would be deleted has changed since it was shown. Nothing has been deleted.",
                messages.WARNING,
            )
        return self._confirm(request, selection, deletions, lacking, protected)

    def _deletions(
        self, request: HttpRequest, selection: ActionSelection
    ) -> tuple[list[Deletion], set[Any], list[Any]]:
        found: list[Deletion] = []
        lacking: set[Any] = set()
        protected: list[Any] = []
        for part in selection.parts:
            if selection.outages.is_lost(part.shard):
                continue
            try:
                nested, counts, missing, kept = self.get_deleted_objects(part.rows, request)
            except (Error, ShardedOrmError) as error:
                selection.outages.add(part.shard, error)
                continue
            found.append(Deletion(part, dict(counts), *_cut(nested)))
            lacking |= missing
            protected += kept
        return found, lacking, protected

    def _delete(
        self, request: HttpRequest, selection: ActionSelection, deletions: list[Deletion]
    ) -> None:
        def run(part: Part) -> None:
            self.log_deletions(request, part.rows)
            self.delete_queryset(request, part.rows)

        # The report counts what hangs on the rows as well.
        parts = (replace(deletion.part, count=deletion.total) for deletion in deletions)
        known = replace(selection, parts=tuple(parts))
        run_by_shard(self, request, known, "Deleted, with what belonged to them", run)

    def _confirm(
        self,
        request: Any,
        selection: ActionSelection,
        deletions: list[Deletion],
        lacking: set[Any],
        protected: list[Any],
    ) -> HttpResponse:
        name = model_ngettext(self.opts, selection.count)
        title = (
            _("Cannot delete %(name)s") % {"name": name} if lacking or protected else _("Delete")
        )
        counts: Counter[str] = Counter()
        for deletion in deletions:
            counts.update(deletion.counts)
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": title,
            "subtitle": None,
            "objects_name": str(name),
            "deletions": deletions,
            "total": sum(counts.values()),
            "confirmed": _digest(deletions),
            "model_count": counts.items(),
            "failed": selection.outages.failed,
            "names": request.POST.getlist(helpers.ACTION_CHECKBOX_NAME),
            "select_across": request.POST.get("select_across", ""),
            "perms_lacking": lacking,
            "protected": protected,
            "opts": self.opts,
            "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
            "media": self.media,
        }
        return TemplateResponse(request, self.delete_selected_confirmation_template, context)


def _digest(deletions: list[Deletion]) -> str:
    """Tells whether as many rows of the same models on the same shards are meant."""
    told = [(deletion.part.alias, sorted(deletion.counts.items())) for deletion in deletions]
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _cut(nested: list[Any]) -> tuple[list[Any], int]:
    """The first rows of ``nested`` with what hangs on them, and how many more rows there are."""
    # A row may be followed by the list of what hangs on it.
    starts = [index for index, entry in enumerate(nested) if not isinstance(entry, list)]
    if len(starts) <= MAX_LISTED:
        return nested, 0
    return nested[: starts[MAX_LISTED]], len(starts) - MAX_LISTED
