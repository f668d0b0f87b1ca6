"""SQL conditions that select the rows of certain shard keys, in any table of a group.

Some tables have no column for the shard key: automatic many-to-many tables, and the tables of child
models. For them, foreign keys lead to the row that has the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import apps
from django.core.exceptions import ValidationError
from django.db.models import BooleanField, Field, Model
from django.db.models.expressions import Col, Expression
from django.db.models.lookups import In

from sharded_orm import runtime
from sharded_orm.exceptions import InvalidShardKey, UnknownKeyOfRows
from sharded_orm.models.sharding.copies import has_copies
from sharded_orm.models.sharding.options import group_of, required_options, target_field
from sharded_orm.routing.directory import DirectoryStrategy
from sharded_orm.routing.placement_lease import KeyInFlight


class RowsOfKeys:
    """Selects the rows of some shard keys, in any table of a group.

    While a key moves, two shards have its rows. A statement for several shards uses this class to
    leave out the rows on one of the two. Immutable. Each call uses the models that are installed at
    that moment.
    """

    def __init__(self, group: str, keys: Sequence[KeyInFlight]) -> None:
        self.group, self.keys = group, tuple(keys)

    def condition(self, table: str, alias: str) -> Expression | None:
        """Return a condition that is true for the rows of ``table`` with one of this object's keys.

        Return None if the table cannot have such rows. For example, its keys are of another type
        than this object's keys, or it contains copies of global rows.

        :param alias: the name of the table in the statement.
        :raises UnknownKeyOfRows: no model of the group has this table.
        """
        for model in apps.get_models(include_auto_created=True):
            if model._meta.db_table == table and group_of(model) == self.group:
                return self.condition_of(model, alias)
            if model._meta.db_table == table and has_copies(model):
                return None
        names = ", ".join(repr(key.value) for key in self.keys)
        raise UnknownKeyOfRows(
            f"The statement for several shards uses the table {table!r} while keys of group"
            f" {self.group!r} move ({names}), and no model of the group has this table. So rows may be"
            " counted twice. Name the shards with using(), or run it again when the move has ended."
        )

    def condition_of(self, model: type[Model], alias: str) -> Expression | None:
        """Return a condition that is true for the rows of ``model`` with one of this object's keys.

        Return None if the model cannot have such rows, because the type of its keys does not fit.

        :param alias: the name of the model's table in the statement.
        """
        links, key = way_to_key(model)
        values = self.values(key)
        return (
            HasKey(Col(alias, links[0] if links else key), links, key, values) if values else None
        )

    def values(self, key: Field[Any, Any]) -> list[Any]:
        """Return the shard keys, converted to values of the field ``key``.

        The models of one group may have shard keys of different types. The directory stores keys as
        text, in which the number 7 and the text "7" are the same key.
        """
        strategy = runtime.strategy(self.group)
        assert isinstance(strategy, DirectoryStrategy)
        field = target_field(key)
        values = []
        for moved in self.keys:
            for text in dict.fromkeys((moved.value, moved.key)):
                try:
                    value = field.get_prep_value(field.to_python(text))
                    if strategy.entry(value) == moved.key:
                        values.append(value)
                except (InvalidShardKey, TypeError, ValueError, ValidationError):
                    continue  # Leave out the key: the field cannot store it, so no row has it.
        return list(dict.fromkeys(values))


def way_to_key(model: type[Model]) -> tuple[list[Any], Any]:
    """Return the foreign keys that lead from a row of ``model`` to the row with its shard key.

    :return: a list of foreign keys, and the field of the shard key. The list is empty if the
        model's own table has the key.
    """
    options = required_options(model)
    key: Any = options.key
    if key is not None and key in model._meta.local_concrete_fields:
        return [], key
    # In an automatic many-to-many table, a row has the key of its two related rows. Use the foreign
    # key to the model that declares the relation. In the table of a child model, use the link to
    # the parent's row, which has the key.
    link: Any = options.relations[0] if key is None else model._meta.get_ancestor_link(key.model)
    links, key = way_to_key(link.target_field.model)
    return [link, *links], key


class HasKey(Expression):
    """A condition that is true if the row of a table has one of the keys ``values``.

    :param column: the column of the first of ``links``; without links, the column of the key.
    :param links: the foreign keys from the table to the row that has the key.
    :param key: the field of the shard key.
    """

    conditional = True

    def __init__(self, column: Col, links: Sequence[Any], key: Any, values: Sequence[Any]) -> None:
        super().__init__(output_field=BooleanField())
        self._column, self._links, self._key, self._values = column, links, key, values

    def get_source_expressions(self) -> list[Any]:
        return [self._column]

    def set_source_expressions(self, exprs: Sequence[Any]) -> None:
        (self._column,) = exprs

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[Any, ...]]:
        if not self._links:
            # If the key is NULL, the comparison gives NULL, and NOT of NULL is NULL again. Make the
            # comparison false in this case, so that NOT of it is true.
            sql, params = compiler.compile(In(self._column, self._values))
            if self._key.null:
                column, more = compiler.compile(self._column)
                return f"({sql} AND {column} IS NOT NULL)", (*params, *more)
            return sql, tuple(params)
        quote, prefix = connection.ops.quote_name, getattr(connection, "table_prefix", "")
        referring, _ = compiler.compile(self._column)
        tables, conditions = [], []
        for number, link in enumerate(self._links):
            target, alias = link.target_field, f"sharded_orm_key{number}"
            table = target.model._meta.db_table
            if (tables_read := getattr(connection, "tables_read", None)) is not None:
                tables_read.add(table)
            tables.append(f"{prefix}{quote(table)} {quote(alias)}")
            conditions.append(f"{quote(alias)}.{quote(target.column)} = {referring}")
            if number + 1 < len(self._links):
                referring = f"{quote(alias)}.{quote(self._links[number + 1].column)}"
        key_sql, params = compiler.compile(In(Col(alias, self._key), self._values))
        where = " AND ".join([*conditions, key_sql])
        return f"EXISTS(SELECT 1 FROM {', '.join(tables)} WHERE {where})", tuple(params)
