"""Describes the results of a read: instances, some of their fields, or plain values.

A :class:`Selection` is one call of ``values()``, ``values_list()``, ``only()``, ``defer()`` or
``select_related()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from django.db.models.query import (
    FlatValuesListIterable,
    ModelIterable,
    NamedValuesListIterable,
    ValuesIterable,
    ValuesListIterable,
)
from django.db.models.utils import create_namedtuple_class

from sharded_orm.cache.values import Row
from sharded_orm.models.plans.conditions import fields_of
from sharded_orm.models.sharding.options import group_of

#: The methods that change which fields the instances have.
LOADED, DEFERRED, JOINED = "only", "defer", "select_related"


class Selection(NamedTuple):
    """One call that selects fields. Immutable.

    :param iterable: the class with which Django's queryset makes its results, such as
        ``ValuesListIterable`` for ``values_list()``.
    :param names: the arguments of the call.
    :param method: ``only``, ``defer`` or ``select_related``; "" for ``values()`` and
        ``values_list()``.
    """

    iterable: type[Any]
    names: tuple[str, ...] = ()
    method: str = ""

    @property
    def makes_instances(self) -> bool:
        return self.iterable is ModelIterable

    @property
    def joins(self) -> bool:
        """Whether the rows have columns of other tables."""
        return self.method == JOINED

    @property
    def defers(self) -> bool:
        """Whether the instances lack fields."""
        return self.method in (LOADED, DEFERRED)

    def is_known(self, model: Any) -> bool:
        """Whether a query with this call can have a plan.

        It can if the arguments are names of fields of the model's own table, and no name occurs
        twice. Arguments of ``select_related()`` must be names of foreign keys to models of the same
        group.
        """
        if not all(type(name) is str for name in self.names):
            return False
        if not self.names and (self.makes_instances or self.iterable is FlatValuesListIterable):
            return False
        fields = fields_of(model, self.names)
        if fields is None or len(set(self.names)) < len(self.names):
            return False
        return not self.joins or all(
            # select_related() accepts "owner", but not "owner_id". Related rows of the same group
            # are on the same shard, so they can be joined.
            field.is_relation
            and field.name == name
            and group_of(field.related_model) == group_of(model)
            for field, name in zip(fields, self.names, strict=True)
        )

    def apply(self, query: Any) -> None:
        """Apply the call to ``query``."""
        if not self.makes_instances:
            query.set_values(self.names)
        elif self.joins:
            query.add_select_related(self.names)
        elif self.method == DEFERRED:
            query.add_deferred_loading(self.names)
        else:
            query.add_immediate_loading(self.names)

    def selects(self, model: Any, fields: Sequence[Any]) -> bool:
        """Whether the compiled SELECT has the columns that this call selects, in the right order.

        :param fields: the fields of the columns in the SELECT, in their order.
        """
        every = list(model._meta.concrete_fields)
        if self.makes_instances:
            return [field for field in every if field in fields] == list(fields)
        return list(fields) == (fields_of(model, self.names) if self.names else every)

    def results(self, rows: Sequence[Row], names: Sequence[str]) -> list[Any]:
        """Return the results of ``values()`` or ``values_list()``: dicts, tuples or single values.

        :param rows: the rows, after all converters.
        :param names: the attnames of the columns, for a call without arguments.
        """
        if self.iterable is FlatValuesListIterable:
            return [row[0] for row in rows]
        names = self.names or names
        if self.iterable is ValuesIterable:
            return _dicts(tuple(names))(rows)
        if self.iterable is ValuesListIterable:
            return list(map(tuple, rows))
        kind = create_namedtuple_class(*names)
        return [tuple.__new__(kind, row) for row in rows]


@lru_cache(maxsize=1024)
def _dicts(names: tuple[str, ...]) -> Callable[[Sequence[Row]], list[Any]]:
    """Return a function that makes a dict of each row of values."""
    # Generated code takes a quarter of the time of ``dict(zip(names, row))``.
    values = "".join(f"v{position}, " for position in range(len(names)))
    items = "".join(f"{name!r}: v{position}, " for position, name in enumerate(names))
    make: Callable[[Sequence[Row]], list[Any]] = eval(
        f"lambda rows: [{{{items}}} for ({values}) in rows]"
    )
    return make


#: The selection of a read that returns instances with all their fields.
EVERYTHING = Selection(ModelIterable)

#: Maps the arguments ``(flat, named)`` of ``values_list()`` to the class that makes its results.
VALUES_LISTS: dict[tuple[bool, bool], type[Any]] = {
    (False, False): ValuesListIterable,
    (True, False): FlatValuesListIterable,
    (False, True): NamedValuesListIterable,
}
