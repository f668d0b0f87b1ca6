"""The query that reads the types and collations of columns, for many schemas at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sharded_orm.backends.key_guard import ColumnType

# The query for the types of columns.
#
# If the type of a column is a domain, the query returns the domain's base type. The last column of
# the result is false if two different texts of the type may be equal. For example, bpchar, the type
# of CHAR(n), ignores trailing spaces, and types of extensions, such as citext, may compare texts in
# ways of their own.
_COLUMNS = """\
SELECT n.nspname, c.relname, a.attname,
  CASE b.typname WHEN 'bpchar' THEN 'char' ELSE b.typname END,
  l.collname,
  CASE WHEN b.typname IN ('varchar', 'bpchar') THEN
    nullif(CASE t.typtype WHEN 'd' THEN t.typtypmod ELSE a.atttypmod END, -1) - 4 END,
  format_type(a.atttypid, a.atttypmod) || CASE WHEN a.attnotnull THEN ' NOT NULL' ELSE ' NULL' END,
  l.collname IS NULL OR (
    l.collisdeterministic AND b.typname IN ('varchar', 'text')
    AND b.typnamespace = 'pg_catalog'::regnamespace
  )
FROM pg_namespace n
JOIN pg_class c ON c.relnamespace = n.oid
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
JOIN pg_type t ON t.oid = a.atttypid
JOIN pg_type b ON b.oid = CASE t.typtype WHEN 'd' THEN t.typbasetype ELSE t.oid END
LEFT JOIN pg_collation l ON l.oid = a.attcollation
WHERE n.nspname = ANY (%s) AND c.relname = ANY (%s) AND a.attname = ANY (%s)
  AND c.relkind IN ('r', 'p', 'v', 'm', 'f')"""


def statement(
    schemas: Sequence[str], tables: Sequence[str], columns: Sequence[str]
) -> tuple[str, list[list[str]]]:
    """Return the SQL and the parameters of a query for the types of ``columns``, in the given
    tables and schemas.
    """
    return _COLUMNS, [list(schemas), list(tables), list(columns)]


def by_schema(rows: Iterable[Any]) -> dict[str, dict[str, dict[str, ColumnType]]]:
    """Return the types of columns as nested dicts: ``result[schema][table][column]`` is the type.

    Names of tables and columns are in lower case. Names of schemas are unchanged, because two
    schemas may have names that differ only by case.

    :param rows: the rows that the query of :func:`statement` returned.
    """
    types: dict[str, dict[str, dict[str, ColumnType]]] = {}
    for schema, table, column, data_type, collation, length, definition, is_exact in rows:
        types.setdefault(schema, {}).setdefault(table.lower(), {})[column.lower()] = ColumnType(
            data_type, collation, length, definition, is_exact
        )
    return types
