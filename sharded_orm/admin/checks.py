"""System checks of model admins. The checks of inlines are in :mod:`sharded_orm.admin.inlines`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from django.contrib.admin.checks import ModelAdminChecks
from django.contrib.admin.options import InlineModelAdmin
from django.contrib.admin.sites import all_sites
from django.contrib.admin.utils import flatten, flatten_fieldsets
from django.core import checks

from sharded_orm.admin.base import ShardedBase
from sharded_orm.admin.global_lookups import global_lookup
from sharded_orm.admin.inlines import ShardedInlineMixin
from sharded_orm.models.sharding.options import shard_options


@checks.register(checks.Tags.admin)
def check_sites(sites: Iterable[Any] | None = None, **kwargs: Any) -> list[checks.CheckMessage]:
    """Check that sharded models, and their inlines, use the admin classes of this package.

    :param sites: the admin sites to check; None for all sites of the process.
    """
    errors: list[checks.CheckMessage] = []
    for site in all_sites if sites is None else sites:
        for model_admin in site._registry.values():
            errors += _unsharded_classes(model_admin)
    return errors


def _unsharded_classes(model_admin: Any) -> Iterator[checks.CheckMessage]:
    if shard_options(model_admin.model) is not None and not isinstance(model_admin, ShardedBase):
        yield checks.Error(
            f"{model_admin.model._meta.label} is sharded, and its model admin asks no shard: every"
            " page would be an error.",
            hint="Derive it from sharded_orm.admin.ShardedModelAdmin.",
            obj=type(model_admin),
            id="sharded_orm.E072",
        )
    for inline in model_admin.inlines:
        if not isinstance(inline, type) or not issubclass(inline, InlineModelAdmin):
            # The entry is not a class of inlines. Skip it, because Django's own system checks
            # report the error.
            continue
        model = getattr(inline, "model", None)
        if model is None or issubclass(inline, ShardedInlineMixin) or not shard_options(model):
            continue
        yield checks.Error(
            f"{model._meta.label} is sharded, and its inline {inline.__name__} asks no shard.",
            hint="Derive it from sharded_orm.admin.ShardedTabularInline or ShardedStackedInline, for a"
            " generic relation from ShardedGenericTabularInline or ShardedGenericStackedInline.",
            obj=type(model_admin),
            id="sharded_orm.E071",
        )


if TYPE_CHECKING:

    class _Checks(ModelAdminChecks):
        """Declares methods of ``ModelAdminChecks`` for the type checker, because Django's type
        stubs lack them.
        """

        def _check_ordering_item(self, obj: Any, field_name: Any, label: str) -> list[Any]: ...
        def _check_date_hierarchy(self, obj: Any) -> list[Any]: ...
else:
    _Checks = ModelAdminChecks


class ShardedModelAdminChecks(_Checks):
    """Django's checks of a model admin, plus checks for options that do not work on shards."""

    def check(self, admin_obj: Any, **kwargs: Any) -> list[Any]:
        return [*super().check(admin_obj, **kwargs), *_foreign_groups(admin_obj)]

    def _check_ordering_item(self, obj: Any, field_name: Any, label: str) -> list[Any]:
        errors = super()._check_ordering_item(obj, field_name, label)
        expression = getattr(field_name, "expression", field_name)
        path = getattr(expression, "name", expression)
        if isinstance(path, str):
            errors += _global_columns(obj, path.removeprefix("-"), label)
        return errors

    def _check_date_hierarchy(self, obj: Any) -> list[Any]:
        errors = super()._check_date_hierarchy(obj)
        return [*errors, *_global_columns(obj, obj.date_hierarchy or "", "date_hierarchy")]


def _global_columns(obj: Any, path: str, label: str) -> Iterator[checks.CheckMessage]:
    if global_lookup(obj.model, path, joins_copies=True) is None:
        return
    yield checks.Error(
        f"The value of {label!r} refers to {path!r}, which is in the global database: no shard can"
        " join it.",
        hint="Use a field of the row, or of a related row of its group.",
        obj=type(obj),
        id="sharded_orm.E073",
    )


def _foreign_groups(obj: Any) -> Iterator[checks.CheckMessage]:
    """Warn about foreign keys into another shard group. The admin would have to find the rows to
    which they refer, but does not know on which shards these rows are.
    """
    own = shard_options(obj.model)
    field: Any
    for field in obj.opts.fields:
        related = shard_options(field.related_model) if field.is_relation else None
        if related is None or own is None or related.group == own.group or field is own.key:
            continue
        # Some pages only show the related row, and do not offer other rows to choose from. Such a
        # page still has to find the related row. It can do so if the value of the foreign key
        # determines the shard.
        shows_row = not related.names_shard(field.target_field) and (
            field.name in obj.list_display or field.name in obj.readonly_fields
        )
        if not shows_row and not _in_form(obj, field):
            continue
        yield checks.Warning(
            f"{field.name!r} is a foreign key into group {related.group!r}: this page would look for"
            " its rows and not know on which shard.",
            hint=f"Leave {field.name!r} out of the form by exclude, and show {field.attname!r}.",
            obj=type(obj),
            id="sharded_orm.W074",
        )


def _in_form(obj: Any, field: Any) -> bool:
    """Whether the form has an input for ``field``, judged by the attributes of the model admin.

    The answer may be wrong if the model admin overrides a method such as ``get_fields()``.
    """
    names: Any = obj.fields or (obj.fieldsets and flatten_fieldsets(obj.fieldsets))
    if names:
        included = field.name in flatten(names)
    else:
        included = field.editable and field.name not in (obj.exclude or ())
    return included and field.name not in obj.readonly_fields
