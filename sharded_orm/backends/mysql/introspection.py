"""Django's introspection of MySQL, restricted to the current schema for speed.

To find the constraints of one table, Django's query makes the server read the tables of all
schemas. A node has many schemas, one for each shard, so this would be slow.
"""

from __future__ import annotations

from typing import Any

from django.db.backends.mysql import introspection as stock

# The condition in Django's query for constraints that makes the server open the tables of every
# schema. With it, the query takes 199 ms on a server with 1351 schemas; with _THIS_SCHEMA in its
# place, 0.2 ms.
_EVERY_SCHEMA = "c.table_schema = kc.table_schema AND"
_THIS_SCHEMA = "c.table_schema = DATABASE() AND c.table_name = kc.table_name AND"


class _OneSchemaCursor:
    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def execute(self, sql: str, params: Any = None) -> Any:
        return self._cursor.execute(sql.replace(_EVERY_SCHEMA, _THIS_SCHEMA), params)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


class DatabaseIntrospection(stock.DatabaseIntrospection):
    """Django's introspection, with a query for constraints that reads only the current schema. So
    it takes no longer on a node with many shards.
    """

    def get_constraints(self, cursor: Any, table_name: str) -> dict[str, Any]:
        restricted: Any = _OneSchemaCursor(cursor)
        constraints: dict[str, Any] = super().get_constraints(restricted, table_name)
        return constraints
