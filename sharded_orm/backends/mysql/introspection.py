"""Django's introspection of MySQL, restricted to the current schema.

A node has many schemas, and Django's query for constraints would read the tables of all of them.
"""

from __future__ import annotations

from typing import Any

from django.db.backends.mysql import introspection as stock

# This condition in Django's query for constraints makes the server open the tables of every schema. On
# a server with 1351 schemas, the query takes 199 ms with this condition, and 0.2 ms if _THIS_SCHEMA
# replaces the condition.
_EVERY_SCHEMA = "c.table_schema = kc.table_schema AND"
_THIS_SCHEMA = "c.table_schema = DATABASE() AND c.table_name = kc.table_name AND"


class _OneSchemaCursor:
    """A cursor that restricts Django's query for constraints to the current schema."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def execute(self, sql: str, params: Any = None) -> Any:
        return self._cursor.execute(sql.replace(_EVERY_SCHEMA, _THIS_SCHEMA), params)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


class DatabaseIntrospection(stock.DatabaseIntrospection):
    """Django's introspection, with a cost that does not grow with the number of shards on the node."""

    def get_constraints(self, cursor: Any, table_name: str) -> dict[str, Any]:
        restricted: Any = _OneSchemaCursor(cursor)
        constraints: dict[str, Any] = super().get_constraints(restricted, table_name)
        return constraints
