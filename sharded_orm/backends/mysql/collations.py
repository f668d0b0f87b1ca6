"""The query that reads the types and collations of columns, for many schemas at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sharded_orm.backends.collations import is_exact_collation
from sharded_orm.backends.key_guard import ColumnType

_TEXT_TYPES = frozenset({"varchar", "tinytext", "text", "mediumtext", "longtext"})

# The query names schemas and tables as constants. So the server opens only these tables, and not
# all tables of all schemas. Depending on its file system, the server ignores the case of the names.
# It returns them as they are spelled in the query.
_COLUMNS = (
    "SELECT table_schema, table_name, column_name, data_type, collation_name,"
    " character_maximum_length, column_type, is_nullable FROM information_schema.columns"
    " WHERE table_schema IN ({schemas}) AND table_name IN ({tables}) AND column_name IN ({columns})"
)


def statement(
    schemas: Sequence[str], tables: Sequence[str], columns: Sequence[str]
) -> tuple[str, list[str]]:
    """Return the SQL and the parameters of a query for the types of ``columns``, in the given
    tables and schemas.
    """
    sql = _COLUMNS.format(
        **{
            name: ", ".join(["%s"] * len(values))
            for name, values in (("schemas", schemas), ("tables", tables), ("columns", columns))
        }
    )
    return sql, [*schemas, *tables, *columns]


def by_schema(rows: Iterable[Any]) -> dict[str, dict[str, dict[str, ColumnType]]]:
    """Return the types of columns as nested dicts: ``result[schema][table][column]`` is the type.
    All names are in lower case.

    :param rows: the rows that the query of :func:`statement` returned.
    """
    types: dict[str, dict[str, dict[str, ColumnType]]] = {}
    for schema, table, column, data_type, collation, length, definition, nullable in rows:
        null = "NULL" if nullable == "YES" else "NOT NULL"
        types.setdefault(schema.lower(), {}).setdefault(table.lower(), {})[column.lower()] = (
            ColumnType(
                data_type.lower(),
                collation,
                None if length is None else int(length),
                f"{definition} {null}",
                _is_exact(data_type.lower(), collation),
            )
        )
    return types


def _is_exact(data_type: str, collation: str | None) -> bool:
    """Whether the server never treats two different texts in the column as equal.

    For example, most binary collations ignore trailing spaces ('Ada' = 'Ada '), so the result is
    False for them. It is also False for the type ``CHAR``, which drops trailing spaces, and True
    for a column without a collation.
    """
    return collation is None or (data_type in _TEXT_TYPES and is_exact_collation(collation))
