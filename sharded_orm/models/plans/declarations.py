"""Detects that a model or a field was changed after a plan was made from it.

A plan is SQL that was compiled once. A program may change attributes of models and fields at run
time, such as ``Meta.ordering`` or ``db_table``. The SQL of the plan is then out of date.
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

    It keeps the tables, the columns, the order of the rows, whether a column may be NULL, and the
    classes of the lookups. Immutable and thread-safe.

    Create this object before the SQL is compiled. If another thread changes a declaration while the
    SQL is compiled, :meth:`are_current` then returns False, and the plan is not used.

    :param shape: the shape of the plan's queries.
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
        # For these fields, the SQL depends on ``null``: exclude() adds a condition for NULL, and
        # select_related() of a foreign key that may be NULL is a LEFT OUTER JOIN.
        excluded = [part.field for part in shape.conditions if part.is_excluded]
        self._nulls = [(field, field.null) for field in (*excluded, *(joined or ()))]
        compared = dict.fromkeys(part.field for part in shape.conditions)
        self._lookups = [(field, _lookups(field)) for field in compared]

    def are_current(self) -> bool:
        """Whether no declaration has changed since the plan was made. Takes about a microsecond."""
        # This is called whenever a plan is used, so it must be fast. Where Django makes a new
        # object after a change, compare only the identity of the objects.
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
            # Do the same as _lookups(), but save the time of a call.
            if "instance_lookups" in field.__dict__:
                now = field.get_lookups()
            else:
                now = type(field).get_class_lookups()
            if now is not lookups and now != lookups:
                return False
        ordering: bool = self._meta.ordering == self._order
        return ordering


def _lookups(field: Any) -> Any:
    """Return the lookups of a field, as ``get_lookups()`` does.

    Unlike ``get_lookups()``, this function usually returns the same dict at each call. So the
    caller can compare the identity of the dicts first.
    """
    if "instance_lookups" in field.__dict__:
        return field.get_lookups()
    return type(field).get_class_lookups()
