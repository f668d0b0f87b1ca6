"""The parts of models and fields on which the SQL of a plan depends, and which a program may change
in place.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from sharded_orm.models.plans.conditions import fields_of

if TYPE_CHECKING:
    from sharded_orm.models.plans.shapes import Shape

_column = attrgetter("column")


class Declarations:
    """The declarations of models and fields at the time when a plan is made from them.

    These are the tables, the columns, the order of the rows, whether a column may be NULL, and the
    classes of the lookups. Immutable and thread-safe.

    Make this before the SQL: if another thread changes a declaration meanwhile, the plan is not used.

    :param shape: the queries of the plan.
    """

    __slots__ = ("_lookups", "_meta", "_nulls", "_order", "_tables")

    def __init__(self, shape: Shape) -> None:
        selection = shape.selection
        joined = fields_of(shape.model, selection.names) if selection.joins else None
        models = [shape.model]
        for key in joined or ():
            models += [key.related_model, *key.related_model._meta.get_parent_list()]
        self._meta = shape.model._meta
        self._order = self._meta.ordering[:]
        self._tables = [
            (meta, meta.db_table, fields, list(map(_column, fields)))
            for meta in [model._meta for model in dict.fromkeys(models)]
            for fields in [meta.concrete_fields]
        ]
        # exclude() adds a condition to a column that may be NULL. A foreign key that may be NULL is
        # joined by another kind of join.
        excluded = [part.field for part in shape.conditions if part.is_excluded]
        self._nulls = [(field, field.null) for field in (*excluded, *(joined or ()))]
        compared = dict.fromkeys(part.field for part in shape.conditions)
        self._lookups = [(field, _lookups(field)) for field in compared]

    def are_current(self) -> bool:
        """Whether nothing was changed since. Takes about a microsecond."""
        # Each plan asks this at each use. So compare objects by their identity where Django makes a new
        # object after a change.
        for meta, table, fields, columns in self._tables:
            if (
                meta.concrete_fields is not fields
                or meta.db_table != table
                or list(map(_column, fields)) != columns
            ):
                return False
        for field, null in self._nulls:
            if field.null != null:
                return False
        for field, lookups in self._lookups:
            # As _lookups(), without a call.
            if "instance_lookups" in field.__dict__:
                now = field.get_lookups()
            else:
                now = type(field).get_class_lookups()
            if now is not lookups and now != lookups:
                return False
        ordering: bool = self._meta.ordering == self._order
        return ordering


def _lookups(field: Any) -> Any:
    """Return the lookups of a field, as get_lookups(), but faster: mostly the same object each time."""
    if "instance_lookups" in field.__dict__:
        return field.get_lookups()
    return type(field).get_class_lookups()
