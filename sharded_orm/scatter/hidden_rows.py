"""Hides rows of a shard from statements that read several shards.

While a shard key moves, two shards may have its rows, and a statement must see them only once. So
the rows are hidden on one of the two shards. The statement for this shard does not read the tables
themselves, but derived tables without the hidden rows. Joins, subqueries and groups then work as if
the hidden rows did not exist.
"""

from __future__ import annotations

from typing import Any, Protocol

from django.db.models.sql.compiler import SQLCompiler
from django.db.models.sql.datastructures import BaseTable, Join

from sharded_orm import compat
from sharded_orm.scatter.refusals import refuse


class HiddenRows(Protocol):
    """Determines which rows of a shard a statement on several shards must not see.

    The class ``RowsOfKeys`` implements it. That class is not in this package, because it must know
    the models.
    """

    def condition(self, table: str, alias: str) -> Any:
        """Return a condition that is true for the hidden rows of ``table``.

        Return None if the table has no hidden rows.

        :param table: the name of the table in the database.
        :param alias: the name of the table in the query, which the condition must use.
        :raises RoutingError: no condition can distinguish the hidden rows from other rows.
        """


class VisibleRows(SQLCompiler):
    """A compiler mixin that leaves out the hidden rows of every table that the statement reads.

    While a shard key moves, two shards may have its rows. They are hidden on one of the two shards.
    """

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
        # A subquery in FROM needs a name. If the query has no alias for the table, the subquery
        # gets the table's name.
        alias = f" {quoted}" if node.table_alias == table else ""
        derived = f"(SELECT * FROM {name} WHERE NOT ({hidden})){alias}{sql[len(start) :]}"
        join = f"{node.join_type} " if isinstance(node, Join) else ""
        return f"{join}{derived}", [*hidden_params, *params]
