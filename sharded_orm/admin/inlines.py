"""Inlines of sharded models: children of the page's row, on its shard, under its key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.checks import InlineModelAdminChecks
from django.contrib.admin.options import InlineModelAdmin
from django.core import checks
from django.forms.models import _get_foreign_key
from django.http import HttpRequest

from sharded_orm import runtime
from sharded_orm.admin.base import options_of
from sharded_orm.admin.display import site_url
from sharded_orm.admin.focus import Focus, focus_of, narrow
from sharded_orm.admin.forms import InlineFormSetOnShard, keeping_key
from sharded_orm.admin.related import PickersMixin
from sharded_orm.models.access import may_access
from sharded_orm.models.options import ShardOptions, shard_options

if TYPE_CHECKING:
    _Inline = InlineModelAdmin[Any, Any]
    _Tabular = admin.TabularInline[Any, Any]
    _Stacked = admin.StackedInline[Any, Any]
else:
    _Inline, _Tabular, _Stacked = InlineModelAdmin, admin.TabularInline, admin.StackedInline


class ShardedInlineChecks(InlineModelAdminChecks):
    def check(self, inline_obj: Any, **kwargs: Any) -> list[Any]:  # type: ignore[override]  # as Django's own
        found = super().check(inline_obj, **kwargs)
        return found or self._check_shard(inline_obj)

    def _check_shard(self, inline: Any) -> list[Any]:
        options = shard_options(inline.model)
        if options is None:
            problem = f"{inline.model._meta.label} is not a sharded model"
            hint = "Use Django's TabularInline or StackedInline."
        else:
            above = shard_options(inline.parent_model)
            if above is not None and above.group == options.group:
                return []
            if above is None and _foreign_key(inline) is options.key:
                return []
            problem = (
                f"rows of {inline.model._meta.label} are not on the shard of their"
                f" {inline.parent_model._meta.label}"
            )
            hint = (
                "An inline needs a parent of the same group, or one of the global database that"
                " is the shard key."
            )
        return [
            checks.Error(f"{problem}.", hint=hint, obj=type(inline), id="sharded_orm.E070"),
        ]


class ShardedInlineMixin(PickersMixin, _Inline):
    """What makes an inline of Django's one of a sharded model.

    The shard key is no field of its form: new rows get the parent's. The parent is of the same
    group, or it is of the global database and the inline's foreign key to it is the shard key.
    """

    formset: Any = InlineFormSetOnShard
    checks_class = ShardedInlineChecks

    @property
    def shard_options(self) -> ShardOptions:
        return options_of(self.model)

    def get_queryset(self, request: HttpRequest) -> Any:
        rows = super().get_queryset(request)
        alias = focus_of(request, self.shard_options).alias
        return rows if alias is None else rows.using(alias)

    def get_exclude(self, request: HttpRequest, obj: Any = None) -> Any:
        excluded = super().get_exclude(request, obj)
        if excluded is None:
            excluded = getattr(getattr(self.form, "_meta", None), "exclude", None)
        return [*(excluded or ()), *self._given(request)]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        given = self._given(request)
        return [field for field in super().get_fields(request, obj) if field not in given]

    def _given(self, request: HttpRequest) -> list[str]:
        """The fields that are nobody's to fill in: the key, and an id that is made."""
        options, pk = self.shard_options, self.opts.pk
        found = []
        if options.key is not None and options.key is not _foreign_key(self):
            found.append(options.key.name)
        if pk.formfield() is None and pk.name not in found:
            # Named, so that the admin's template has the row's id in a hidden field.
            found.append(pk.name)
        return found

    def get_formset(self, request: HttpRequest, obj: Any = None, **kwargs: Any) -> Any:
        options = self.shard_options
        kwargs.setdefault("form", keeping_key(self.form, options))
        if obj is not None and shard_options(type(obj)) is None:
            # The parent is global, and its key leads to the shard.
            key = None if options.key is None else options.key.target_field.attname  # type: ignore[attr-defined]  # a foreign key, see the check
            home = None if key is None else runtime.locate(options.group, getattr(obj, key))
            if home is not None:
                narrow(request, Focus(options, shard=home, home=home))
        return super().get_formset(request, obj, **kwargs)

    def get_view_on_site_url(self, obj: Any = None) -> str | None:
        return site_url(self, obj)

    # -- Who may ---------------------------------------------------------------

    def _may(self, request: HttpRequest) -> bool:
        return may_access(request.user, self.shard_options.group)

    def has_add_permission(self, request: HttpRequest, obj: Any) -> bool:  # type: ignore[override]  # as Django's own
        return super().has_add_permission(request, obj) and self._may(request)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_view_permission(request, obj) and self._may(request)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_change_permission(request, obj) and self._may(request)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return super().has_delete_permission(request, obj) and self._may(request)


class ShardedTabularInline(ShardedInlineMixin, _Tabular):
    """``TabularInline`` for rows beside the page's row."""


class ShardedStackedInline(ShardedInlineMixin, _Stacked):
    """``StackedInline`` for rows beside the page's row."""


def _foreign_key(inline: Any) -> Any:
    return _get_foreign_key(inline.parent_model, inline.model, fk_name=inline.fk_name)
