"""List filters of sharded models.

Some filters work over all shards. Others need the list of one shard, for example because their
choices are rows of a shard. If the query of a filter would join tables of two databases, the filter
is replaced by a subclass that queries one database after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.contrib.admin.filters import (
    AllValuesFieldListFilter,
    FieldListFilter,
    RelatedFieldListFilter,
    RelatedOnlyFieldListFilter,
)
from django.contrib.admin.utils import get_fields_from_path
from django.db.models import Field, Model
from django.db.models.constants import LOOKUP_SEP

from sharded_orm.admin import global_lookups
from sharded_orm.admin.global_lookups import GlobalLookup
from sharded_orm.exceptions import ScatterNotSupported
from sharded_orm.models.sharding.options import shard_options


def split_filters(model: type[Model], filters: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Return the filters that work over all shards, and the names of the filters that need one shard.

    A filter needs one shard if its choices are rows or column values of a shard, or if it is a
    class of the project with ``needs_shard = True``.
    """
    usable, names = [], []
    for item in filters:
        if _needs_shard(model, item):
            names.append(_name(model, item))
        else:
            usable.append(item)
    return usable, names


def routed_filters(model: type[Model], filters: Sequence[Any]) -> list[Any]:
    """Replace each filter whose queries would join two databases by a subclass that does not join.

    :return: a list of all filters, in their order.
    """
    return [_routed(model, item) for item in filters]


def _needs_shard(model: type[Model], item: Any) -> bool:
    if callable(item):
        return bool(getattr(item, "needs_shard", False))
    field, path, cls = _resolved(model, item)
    if getattr(cls, "needs_shard", False):
        return True
    if not isinstance(cls, type):
        return False
    if issubclass(cls, RelatedOnlyFieldListFilter):
        return True
    if issubclass(cls, RelatedFieldListFilter):
        related = field.path_infos[-1].to_opts.model if field.is_relation else None
        return related is not None and shard_options(related) is not None
    # AllValuesFieldListFilter offers every value of a field as a choice. It can read all values
    # from the global database, but not from all shards.
    return (
        issubclass(cls, AllValuesFieldListFilter)
        and global_lookups.global_lookup(model, path) is None
    )


def _resolved(model: type[Model], item: Any) -> tuple[Any, str, Any]:
    """Return the field, the path and the class of ``item``, an entry of ``list_filter``.

    Uses the same rules as ``ChangeList.get_filters()``.
    """
    field, cls = item if isinstance(item, list | tuple) else (item, None)
    path = field.name if isinstance(field, Field) else str(field)
    model_field: Any = field if isinstance(field, Field) else get_fields_from_path(model, path)[-1]
    if cls is None:
        # Find the filter class as FieldListFilter.create() does. Do not call that method, because
        # it would also create a filter.
        registry: Any = FieldListFilter
        cls = next((c for test, c in registry._field_list_filters if test(model_field)), None)
    return model_field, path, cls


def _name(model: type[Model], item: Any) -> str:
    if callable(item):
        return str(getattr(item, "title", None) or getattr(item, "__name__", item))
    field, path, _ = _resolved(model, item)
    return str(getattr(field, "verbose_name", path))


def _routed(model: type[Model], item: Any) -> Any:
    if callable(item):
        return item
    _, path, cls = _resolved(model, item)
    if not isinstance(cls, type):
        return item
    if issubclass(cls, RelatedOnlyFieldListFilter) and not issubclass(cls, _EvaluatedChoices):
        return path, type(cls.__name__, (_EvaluatedChoices, cls), {})
    lookup = global_lookups.global_lookup(model, path)
    if (
        lookup is not None
        and issubclass(cls, FieldListFilter)
        and not issubclass(cls, _GlobalFieldFilter)
    ):
        return path, type(cls.__name__, (_GlobalFieldFilter, cls), {"global_lookup": lookup})
    return item


def count_where_possible(spec: Any) -> None:
    """Make a filter show dashes instead of the numbers next to its choices (facets), if the rows
    cannot be counted.

    The rows of each choice are counted on several shards. Some of these counts cannot be added up,
    and raise ``ScatterNotSupported``.
    """
    count = getattr(spec, "get_facet_queryset", None)
    if count is None:
        return

    def count_or_dash(changelist: Any) -> Any:
        try:
            return count(changelist)
        except ScatterNotSupported:
            return unknown_counts()

    spec.get_facet_queryset = count_or_dash


def unknown_counts() -> defaultdict[str, str]:
    """Return facets (the numbers next to a filter's choices) that show a dash for each choice."""
    return defaultdict(lambda: "-")


if TYPE_CHECKING:
    _Related = RelatedOnlyFieldListFilter
else:
    _Related = object


class _EvaluatedChoices(_Related):
    """Mixin of ``RelatedOnlyFieldListFilter`` for related rows that may be in a different database.

    The filter reads the keys of the related rows in one query, and the related rows with these keys
    in a second query.
    """

    field_path: str
    #: A sentence for the page if the filter does not offer all choices; otherwise an empty string.
    note = ""

    def field_choices(self, field: Any, request: Any, model_admin: Any) -> Any:
        # Overrides RelatedOnlyFieldListFilter.field_choices. Django reads the keys of related rows
        # in a subquery, which works only if all rows are in one database.
        rows = model_admin.get_queryset(request).order_by()
        all_keys = rows.distinct().values_list(f"{self.field_path}__pk", flat=True)
        keys = list(all_keys[: global_lookups.MAX_VALUES + 1])
        if len(keys) > global_lookups.MAX_VALUES:
            keys = keys[: global_lookups.MAX_VALUES]
            self.note = f"The filter by {field.verbose_name} offers {global_lookups.MAX_VALUES} of its choices."
        ordering = self.field_admin_ordering(field, request, model_admin)
        return field.get_choices(
            include_blank=False, limit_choices_to={"pk__in": keys}, ordering=ordering
        )


class _GlobalFieldFilter:
    """Mixin for filters of sharded rows by a field of a global model to which these rows refer.

    The filter first looks up the matching rows in the global database. Then it finds the sharded
    rows whose foreign keys refer to the matching rows.
    """

    global_lookup: GlobalLookup
    used_parameters: dict[str, Any]

    def queryset(self, request: Any, queryset: Any) -> Any:
        # Overrides FieldListFilter.queryset.
        if not self.used_parameters:
            return queryset
        start = f"{self.global_lookup.prefix}{LOOKUP_SEP}"
        lookups = {name.removeprefix(start): value for name, value in self.used_parameters.items()}
        return queryset.filter(
            **{self.global_lookup.name: self.global_lookup.find_by(lookups, request)}
        )

    def get_facet_queryset(self, changelist: Any) -> Any:
        # Overrides FacetsMixin.get_facet_queryset(), which counts the rows of each choice (facets).
        # Its query would join a table of the global database, so show no numbers.
        return unknown_counts()
