"""List filters of sharded models: which can be offered where, and how they ask."""

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
    """The filters that work over all shards, and the names of those that need one shard.

    One that lists the rows or the values of a shard needs one; so does a class of the
    project's own with ``needs_shard = True``.
    """
    kept, left_out = [], []
    for item in filters:
        if _needs_shard(model, item):
            left_out.append(_name(model, item))
        else:
            kept.append(item)
    return kept, left_out


def routed_filters(model: type[Model], filters: Sequence[Any]) -> list[Any]:
    """``filters`` with the classes whose own queries would join two databases replaced."""
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
    # It lists every value there is: of the global database that may be, of all shards not.
    return (
        issubclass(cls, AllValuesFieldListFilter) and global_lookups.crossing(model, path) is None
    )


def _resolved(model: type[Model], item: Any) -> tuple[Any, str, Any]:
    """Field, path and class of an entry of ``list_filter``, as ChangeList.get_filters does."""
    field, cls = item if isinstance(item, list | tuple) else (item, None)
    path = field.name if isinstance(field, Field) else str(field)
    found: Any = field if isinstance(field, Field) else get_fields_from_path(model, path)[-1]
    if cls is None:
        # FieldListFilter.create() goes through the same list, and makes the filter at once.
        registry: Any = FieldListFilter
        cls = next((c for test, c in registry._field_list_filters if test(found)), None)
    return found, path, cls


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
    found = global_lookups.crossing(model, path)
    if found is not None and issubclass(cls, FieldListFilter) and not issubclass(cls, _Crossing):
        return path, type(cls.__name__, (_Crossing, cls), {"crossing": found})
    return item


def count_where_possible(spec: Any) -> None:
    """Leave out the counts of a filter (facets) that cannot be merged over several shards."""
    count = getattr(spec, "get_facet_queryset", None)
    if count is None:
        return

    def counted(changelist: Any) -> Any:
        try:
            return count(changelist)
        except ScatterNotSupported:
            return uncounted()

    spec.get_facet_queryset = counted


def uncounted() -> defaultdict[str, str]:
    """Facets that nobody has counted."""
    return defaultdict(lambda: "-")


if TYPE_CHECKING:
    _Related = RelatedOnlyFieldListFilter
else:
    _Related = object


class _EvaluatedChoices(_Related):
    """Reads the related keys first: the rows they lead to may be in another database."""

    field_path: str
    #: What the page says of the choices.
    note = ""

    def field_choices(self, field: Any, request: Any, model_admin: Any) -> Any:
        # Overrides RelatedOnlyFieldListFilter.field_choices, which makes it a subquery.
        rows = model_admin.get_queryset(request).order_by()
        every = rows.distinct().values_list(f"{self.field_path}__pk", flat=True)
        keys = list(every[: global_lookups.MOST_FOUND + 1])
        if len(keys) > global_lookups.MOST_FOUND:
            keys = keys[: global_lookups.MOST_FOUND]
            self.note = f"The filter by {field.verbose_name} offers {global_lookups.MOST_FOUND} of its choices."
        ordering = self.field_admin_ordering(field, request, model_admin)
        return field.get_choices(
            include_blank=False, limit_choices_to={"pk__in": keys}, ordering=ordering
        )


class _Crossing:
    """Filters by a field of a global model: that is asked first, then the shards by key."""

    crossing: GlobalLookup
    used_parameters: dict[str, Any]

    def queryset(self, request: Any, queryset: Any) -> Any:
        # Overrides FieldListFilter.queryset.
        if not self.used_parameters:
            return queryset
        start = f"{self.crossing.prefix}{LOOKUP_SEP}"
        rest = {name.removeprefix(start): value for name, value in self.used_parameters.items()}
        return queryset.filter(**{self.crossing.name: self.crossing.find_by(rest, request)})

    def get_facet_queryset(self, changelist: Any) -> Any:
        # Overrides FacetsMixin.get_facet_queryset: to count would take a join.
        return uncounted()
