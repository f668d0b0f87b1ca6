"""Admin views that delete one row, or selected rows of several shards, with their related rows."""

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

from sharded_orm import compat
from sharded_orm.admin.action_selection import ActionSelection, Part
from sharded_orm.admin.actions import action_arguments
from sharded_orm.admin.base import csrf_protected
from sharded_orm.admin.error_pages import shard_down_page
from sharded_orm.admin.identity import identify
from sharded_orm.admin.object_links import change_url, named_row
from sharded_orm.admin.object_views import ObjectViewsMixin
from sharded_orm.admin.run_by_shard import run_by_shard
from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.routers import standing_on
from sharded_orm.scatter.failures import is_failure
from sharded_orm.topology.model import Shard

#: The confirmation page shows at most this many selected rows of each shard, with their related
#: rows. The totals on the page include all selected rows.
MAX_LISTED = 100


@dataclass(frozen=True)
class Deletion:
    """The rows that would be deleted on one shard: selected rows and their related rows.

    ``counts`` is the number of rows of each model, keyed by the model's plural name.
    """

    part: Part
    counts: dict[str, int]
    #: The first selected rows and their related rows, as nested lists for Django's template filter
    #: ``unordered_list``. ``unlisted`` is the number of selected rows that are not in these lists.
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
    """Delete the selected rows of several shards, after a confirmation.

    Replaces Django's action ``delete_selected``.
    """
    response: HttpResponse | None = model_admin.delete_selection(request, selection)
    return response


# With ``takes_selection``, ActionsMixin calls the action once for the whole selection, not once for
# each shard.
delete_selected.takes_selection = True  # type: ignore[attr-defined]  # a function type has no such attribute; Django's admin.action() sets attributes of functions, too


class DeleteViewsMixin(ObjectViewsMixin):
    """Mixin of :class:`ShardedModelAdmin` with the views and the action that delete rows."""

    delete_confirmation_template = "admin/sharded_orm/delete_confirmation.html"
    delete_selected_confirmation_template = "admin/sharded_orm/delete_selected_confirmation.html"

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> Any:
        where = action_arguments(action_location)
        available: dict[str, Any] = super().get_actions(request, **where)
        action = available.get("delete_selected")
        if action is not None and compat.action_parts(action)[0] is actions.delete_selected:
            available["delete_selected"] = compat.with_action(action, delete_selected)
        return available

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        # Overrides ModelAdmin.get_deleted_objects(). All rows in ``objs`` are on one shard, so
        # search only that shard for related rows. Link to each row by its object id.
        rows = list(objs)
        if not rows:
            return [], {}, set(), []
        alias = rows[0]._state.db
        with standing_on(alias):
            collector: Any = NestedObjects(using=alias, origin=objs)
            collector.collect(rows)
        for model, related_rows in collector.model_objs.items():
            if shard_options(model) is not None and not model._meta.auto_created:
                identify(related_rows)
        perms_needed: set[Any] = set()

        def describe(row: Any) -> Any:
            opts = row._meta
            name = f"{capfirst(opts.verbose_name)}: {row}"
            if not self.admin_site.is_registered(type(row)):
                return name
            model_admin = self.admin_site.get_model_admin(type(row))
            if not model_admin.has_delete_permission(request, row):
                perms_needed.add(opts.verbose_name)
            url = change_url(row, self.admin_site.name)
            if url is None:
                return name
            return format_html('{}: <a href="{}">{}</a>', capfirst(opts.verbose_name), url, row)

        nested = collector.nested(describe)
        protected = [describe(row) for row in collector.protected]
        counts = {
            model._meta.verbose_name_plural: len(related_rows)
            for model, related_rows in collector.model_objs.items()
        }
        return nested, counts, perms_needed, protected

    # -- One row ---------------------------------------------------------------

    @csrf_protected
    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: Any = None
    ) -> HttpResponse:
        """Run Django's delete view on the row's shard.

        The transaction on the shard commits before the transaction of the admin's log.
        """
        self._scope_to_row(request, object_id)
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
        context["object"], context["shard"] = named_row(row), self.focus(request).home
        return super().render_delete_form(request, context)

    # -- Rows of several shards ------------------------------------------------

    def delete_selection(
        self, request: HttpRequest, selection: ActionSelection
    ) -> HttpResponse | None:
        """Show which rows would be deleted on each shard. If the user has confirmed, delete them.

        The rows of each shard are deleted in one transaction; see :func:`run_by_shard`. If the
        numbers of rows have changed since the page was shown, nothing is deleted, and the page is
        shown again.

        :return: the page that asks for confirmation; None after the deletion.
        """
        deletions, perms_needed, protected = self._deletions(request, selection)
        shown = _digest(deletions)
        if request.POST.get("post") and not protected:
            if perms_needed:
                raise PermissionDenied
            if request.POST.get("confirmed", shown) == shown:
                self._delete(request, selection, deletions)
                return None
            self.message_user(
                request,
                "What would be deleted has changed since it was shown. Nothing has been deleted.",
                messages.WARNING,
            )
        return self._confirm(request, selection, deletions, perms_needed, protected)

    def _deletions(
        self, request: HttpRequest, selection: ActionSelection
    ) -> tuple[list[Deletion], set[Any], list[Any]]:
        deletions: list[Deletion] = []
        perms_needed: set[Any] = set()
        protected: list[Any] = []
        for part in selection.parts:
            if selection.outages.is_lost(part.shard):
                continue
            try:
                nested, counts, part_perms_needed, part_protected = self.get_deleted_objects(
                    part.rows, request
                )
            except (Error, ShardedOrmError) as error:
                selection.outages.add(part.shard, error)
                continue
            deletions.append(Deletion(part, dict(counts), *_first_rows(nested)))
            perms_needed |= part_perms_needed
            protected += part_protected
        return deletions, perms_needed, protected

    def _delete(
        self, request: HttpRequest, selection: ActionSelection, deletions: list[Deletion]
    ) -> None:
        def run(part: Part) -> None:
            self.log_deletions(request, part.rows)
            self.delete_queryset(request, part.rows)

        # A part has the selected rows of one shard; its ``count`` is their number. The report after
        # the deletion must also count the related rows that were deleted with them. So replace
        # ``count`` by the number of all rows that are deleted on the shard.
        parts = (replace(deletion.part, count=deletion.total) for deletion in deletions)
        counted = replace(selection, parts=tuple(parts))
        run_by_shard(self, request, counted, "Deleted, with what belonged to them", run)

    def _confirm(
        self,
        request: Any,
        selection: ActionSelection,
        deletions: list[Deletion],
        perms_needed: set[Any],
        protected: list[Any],
    ) -> HttpResponse:
        name = model_ngettext(self.opts, selection.count)
        title = (
            _("Cannot delete %(name)s") % {"name": name}
            if perms_needed or protected
            else _("Delete")
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
            "object_ids": request.POST.getlist(helpers.ACTION_CHECKBOX_NAME),
            "select_across": request.POST.get("select_across", ""),
            "perms_lacking": perms_needed,
            # Django's template reads this variable. ModelAdmin has the attribute since Django 6.1.
            "delete_confirmation_max_display": getattr(
                self, "delete_confirmation_max_display", None
            ),
            "protected": protected,
            "opts": self.opts,
            "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
            "media": self.media,
        }
        return TemplateResponse(request, self.delete_selected_confirmation_template, context)


def _digest(deletions: list[Deletion]) -> str:
    """Return a digest of the numbers of rows that would be deleted, per shard and model.

    The page that asks for confirmation contains the digest. If the digest is a different one when
    the user confirms, the rows have changed since the page was shown. So nothing is deleted.
    """
    counts = [(deletion.part.alias, sorted(deletion.counts.items())) for deletion in deletions]
    return hashlib.sha256(repr(counts).encode()).hexdigest()


def _first_rows(nested: list[Any]) -> tuple[list[Any], int]:
    """Return the first :data:`MAX_LISTED` rows with their related rows, and the number of the
    remaining rows.

    :param nested: rows, each followed by a list of its related rows if it has any. For example,
        ``["album 1", ["photo 1", "photo 2"], "album 2"]`` has two rows.
    """
    starts = [index for index, entry in enumerate(nested) if not isinstance(entry, list)]
    if len(starts) <= MAX_LISTED:
        return nested, 0
    return nested[: starts[MAX_LISTED]], len(starts) - MAX_LISTED
