"""Makes the instances of a query with ``select_related()``, and their related instances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db.models.expressions import Col

from sharded_orm import compat
from sharded_orm.cache.values import Row


class JoinedInstances:
    """Makes instances from the joined rows of a query with ``select_related()``. Immutable.

    Each instance also gets the related instances to which its foreign keys refer.

    :param compiler: a compiler that has compiled the query.
    """

    def __init__(self, compiler: Any) -> None:
        self._select = compiler.select
        self._klass_info = compiler.klass_info
        fields: Any = self._klass_info["select_fields"]
        self._own = slice(fields[0], fields[-1] + 1)
        #: The columns of a row.
        self.columns: list[Any] = [column for column, _, _ in self._select]
        query = compiler.query
        #: The tables that the SQL reads.
        self.tables = tuple(
            join.table_name
            for alias, join in query.alias_map.items()
            if query.alias_refcount[alias]
        )

    def is_plain(self, model: Any) -> bool:
        """Whether the rows have only columns, among them all columns of the table of ``model``.

        False, for example, if the query selects an expression or defers a field.
        """
        own = [getattr(column, "target", None) for column in self.columns[self._own]]
        return set(map(type, self.columns)) == {Col} and own == list(model._meta.concrete_fields)

    def instances(self, values: Sequence[Row], queryset: Any, alias: str) -> list[Any]:
        """Return the instances of ``values``: rows that :class:`InstanceLoader` has converted.

        :param alias: the alias of the database that has returned the rows.
        """
        # Make the instances as Django's ModelIterable does.
        from_db = compat.from_db(queryset.model, queryset)
        names = [column.target.attname for column in self.columns[self._own]]
        populators = compat.related_populators(self._klass_info, self._select, alias, queryset)
        instances = []
        for row in values:
            instance = from_db(alias, list(names), row[self._own])
            for populator in populators:
                populator.populate(row, instance)
            instances.append(instance)
        compat.set_fetch_mode(instances, queryset, is_set=True)
        return instances
