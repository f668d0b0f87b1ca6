"""Read the sizes of schemas and tables from the server's statistics."""

from __future__ import annotations

from collections.abc import Sequence

from sharded_orm.backends.postgresql.catalog import CatalogCursor
from sharded_orm.backends.sizes import ShardSize, TableSize

# SQL for the number of rows of a table. The server counts the rows that are written and deleted. It
# loses this count in a crash, and a standby has no count. Without a count, use the estimate of the
# last VACUUM or ANALYZE. Without an estimate, reltuples is -1, which counts as 0.
_ROWS = """\
CASE WHEN pg_stat_get_live_tuples(c.oid) > 0 THEN pg_stat_get_live_tuples(c.oid)
  ELSE greatest(c.reltuples, 0)::bigint END"""

# SQL for the size of a table in bytes. Usually, this is the size at the last ANALYZE. A table that
# has rows but was never analyzed counts as one page. If more than 1,000 rows plus a fifth of the
# table have changed since the last ANALYZE, pg_total_relation_size() is called, which is exact. It
# is not always called, because it opens the table and its indexes, for which the session keeps
# 15 kB of memory until it ends.
_BYTES = """\
CASE WHEN pg_stat_get_mod_since_analyze(c.oid) > 1000 + 0.2 * greatest(c.reltuples, 0)
  THEN pg_total_relation_size(c.oid)
  ELSE current_setting('block_size')::bigint * (
    greatest(c.relpages, sign(pg_stat_get_live_tuples(c.oid)))::bigint
    + coalesce((SELECT x.relpages FROM pg_class x WHERE x.oid = c.reltoastrelid), 0)
    + coalesce((
      SELECT sum(x.relpages) FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
      WHERE i.indrelid IN (c.oid, c.reltoastrelid)
    ), 0)
  ) END"""

# The FROM clause of queries for the tables of a schema. It finds them by their dependency on the
# schema, because there is an index for that.
_FROM = """\
FROM pg_namespace n
JOIN pg_depend d ON d.refclassid = 'pg_namespace'::regclass AND d.refobjid = n.oid AND d.deptype = 'n'
JOIN pg_class c ON d.classid = 'pg_class'::regclass AND c.oid = d.objid AND c.relkind IN ('r', 'm')
WHERE n.nspname"""


def read(cursor: CatalogCursor, schemas: Sequence[str]) -> dict[str, ShardSize]:
    """Return a dict that maps the name of each of ``schemas`` to its size. One query.

    The size of a table that has changed little is that at the server's last ANALYZE. A schema that
    has no tables, or does not exist, has 0 bytes and 0 rows.
    """
    sizes = dict.fromkeys(schemas, ShardSize(0, 0))
    if sizes:
        cursor.execute(
            f"SELECT n.nspname, sum({_BYTES})::bigint, sum({_ROWS})::bigint"
            f" {_FROM} = ANY (%(schemas)s) GROUP BY n.nspname",
            {"schemas": list(sizes)},
        )
        # The size is NULL if the schema's only table is dropped during the query.
        for name, size, rows in cursor.fetchall():
            sizes[name] = ShardSize(int(size or 0), int(rows or 0))
    return sizes


def tables(cursor: CatalogCursor, schema: str) -> list[TableSize]:
    """Return the sizes of the tables of one schema, sorted by name, without views. One query."""
    cursor.execute(
        f"SELECT c.relname::text, {_ROWS}, pg_total_relation_size(c.oid) {_FROM} = %(schema)s"
        " AND c.relkind = 'r'",
        {"schema": schema},
    )
    return sorted(
        (
            TableSize(name, int(rows), "estimated", int(size or 0))
            for name, rows, size in cursor.fetchall()
        ),
        key=lambda table: table.name,
    )
