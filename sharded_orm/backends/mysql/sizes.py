"""Sizes of schemas, from what InnoDB estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sharded_orm.backends.sizes import ShardSize, TableSize

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.node_cursor import NodeCursor


def read(cursor: NodeCursor, schemas: Sequence[str]) -> dict[str, ShardSize]:
    """Schema -> size; 0 for one that has no tables or does not exist. One query."""
    found = dict.fromkeys(schemas, ShardSize(0, 0))
    if found:
        cursor.execute(
            "SELECT table_schema, SUM(data_length + index_length), SUM(table_rows)"
            " FROM information_schema.tables"
            f" WHERE table_schema IN ({', '.join(['%s'] * len(found))}) GROUP BY table_schema",
            list(found),
        )
        # Both are NULL of views.
        for name, size, rows in cursor.fetchall():
            found[name] = ShardSize(int(size or 0), int(rows or 0))
    return found


def tables(cursor: NodeCursor, schema: str) -> list[TableSize]:
    """The tables of one schema, without views. One query."""
    cursor.execute(
        "SELECT table_name, table_rows, data_length + index_length FROM information_schema.tables"
        " WHERE table_schema = %s AND table_type = 'BASE TABLE' ORDER BY table_name",
        [schema],
    )
    # Both are NULL of a table that is damaged.
    return [
        TableSize(name, int(rows or 0), "estimated", int(size or 0))
        for name, rows, size in cursor.fetchall()
    ]
