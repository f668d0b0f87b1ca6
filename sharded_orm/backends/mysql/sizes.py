"""Read the sizes of schemas and tables, as estimated by InnoDB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sharded_orm.backends.sizes import ShardSize, TableSize

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.node_cursor import NodeCursor


def read(cursor: NodeCursor, schemas: Sequence[str]) -> dict[str, ShardSize]:
    """Return a dict that maps the name of each of ``schemas`` to its size. One query.

    A schema that has no tables, or does not exist, has 0 bytes and 0 rows.
    """
    sizes = dict.fromkeys(schemas, ShardSize(0, 0))
    if sizes:
        cursor.execute(
            "SELECT table_schema, SUM(data_length + index_length), SUM(table_rows)"
            " FROM information_schema.tables"
            f" WHERE table_schema IN ({', '.join(['%s'] * len(sizes))}) GROUP BY table_schema",
            list(sizes),
        )
        # The sums are NULL for a schema that has only views.
        for name, size, rows in cursor.fetchall():
            sizes[name] = ShardSize(int(size or 0), int(rows or 0))
    return sizes


def tables(cursor: NodeCursor, schema: str) -> list[TableSize]:
    """Return the sizes of the tables of one schema, sorted by name, without views. One query."""
    cursor.execute(
        "SELECT table_name, table_rows, data_length + index_length FROM information_schema.tables"
        " WHERE table_schema = %s AND table_type = 'BASE TABLE' ORDER BY table_name",
        [schema],
    )
    # The size and the number of rows are NULL for a damaged table.
    return [
        TableSize(name, int(rows or 0), "estimated", int(size or 0))
        for name, rows, size in cursor.fetchall()
    ]
