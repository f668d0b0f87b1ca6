"""Rows that a statement for several shards must not see on one of them.

The statement reads a derived table instead of each table that may have such rows. So the result is
that of a shard without these rows, whatever joins, subqueries or groups the statement has.
"""

from __future__ import annotations

from typing import Any, Protocol

from django.db.models.sql.compiler import SQLCompiler
from django.db.models.sql.datastructures import BaseTable, Join

from sharded_orm import compat
from sharded_orm.scatter.refusals import refuse


class HiddenRows(Protocol):
    """Says which rows of a shard are hidden. Implemented by a layer that knows the models."""

    def condition(self, table: str, alias: str) -> Any:
        """Return a condition for the hidden rows of ``table``; None if there are none.

        :param table: the name of a table.
        :param alias: the name of the table in the statement.
        :raises RoutingError: the rows cannot be told from others.
        """


class VisibleRows(SQLCompiler):
    """A compiler mixin that leaves out hidden rows of every table."""

    def compile(self, node: Any) -> Any:
        if not isinstance(node, BaseTable | Join):
            return super().compile(node)
        connection: Any = self.connection
        table: str = node.table_name
        condition = connection.hidden_rows.condition(table, table)
        sql, params = super().compile(node)  # type: ignore[arg-type]  # no expressions
        if condition is None:
            return sql, params
        quoted = compat.quote_name(self, table)
        name = f"{connection.table_prefix}{quoted}"
        start = f"{node.join_type} {name}" if isinstance(node, Join) else name
        if not sql.startswith(start):
            raise refuse(f"the table {sql!r}", "ask one shard")
        hidden, hidden_params = self.compile(condition)
        # A derived table needs a name, also where the table has no other name than its own.
        alias = f" {quoted}" if node.table_alias == table else ""
        derived = f"(SELECT * FROM {name} WHERE NOT ({hidden})){alias}{sql[len(start) :]}"
        join = f"{node.join_type} " if isinstance(node, Join) else ""
        return f"{join}{derived}", [*hidden_params, *params]
