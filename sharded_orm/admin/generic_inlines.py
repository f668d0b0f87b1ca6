"""Inlines of sharded models whose rows belong to the row of the page by a generic relation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib.contenttypes.admin import (
    GenericInlineModelAdminChecks,
    GenericStackedInline,
    GenericTabularInline,
)
from django.contrib.contenttypes.forms import BaseGenericInlineFormSet

from sharded_orm.admin.forms import ChildFormSet
from sharded_orm.admin.inlines import ShardedInlineChecks, ShardedInlineMixin
from sharded_orm.models.relations.generic import generic_foreign_key

if TYPE_CHECKING:
    # For the type checker: a base class with the attributes that Django sets, and that the type
    # stubs lack.
    class _FormSet(BaseGenericInlineFormSet[Any, Any]):
        ct_field: Any
        ct_fk_field: Any
else:
    _FormSet = BaseGenericInlineFormSet


class GenericFormSetOnShard(ChildFormSet, _FormSet):
    """A formset of the rows of a generic inline, on the shard of their parent."""

    def save_new(self, form: Any, commit: bool = True) -> Any:
        # Overrides BaseGenericInlineFormSet.save_new(), which sets only the parent's id on the
        # child. Set the parent itself, because a child whose key is generated takes its shard from
        # the parent.
        field = generic_foreign_key(self.model, self.ct_field.name, self.ct_fk_field.name)
        if field is not None:
            setattr(form.instance, field.name, self.instance)
        return super().save_new(form, commit)


class ShardedGenericInlineChecks(ShardedInlineChecks, GenericInlineModelAdminChecks):
    pass


class ShardedGenericInlineMixin(ShardedInlineMixin):
    """Mixin for generic inlines of sharded models. Their parents are in the same shard group."""

    formset: Any = GenericFormSetOnShard
    formset_on_shard = GenericFormSetOnShard
    checks_class = ShardedGenericInlineChecks

    def foreign_key(self) -> Any:
        return None


class ShardedGenericTabularInline(ShardedGenericInlineMixin, GenericTabularInline):
    """``GenericTabularInline`` for a sharded model; its rows are on the shard of the page's row."""


class ShardedGenericStackedInline(ShardedGenericInlineMixin, GenericStackedInline):
    """``GenericStackedInline`` for a sharded model; its rows are on the shard of the page's row."""
