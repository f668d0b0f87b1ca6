"""Read the definitions of a schema (its tables, views, …), and create a schema from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import psycopg

from sharded_orm.backends.postgresql import catalog
from sharded_orm.backends.postgresql.catalog import CatalogCursor
from sharded_orm.backends.postgresql.creation_order import statements, unknown
from sharded_orm.backends.postgresql.definitions import compose
from sharded_orm.backends.postgresql.sql_quotes import quoted
from sharded_orm.backends.snapshot import (
    MARKER_APP,
    MARKER_PREFIX,
    SchemaSnapshot,
    format_digest,
)
from sharded_orm.backends.sqlstate import UNDEFINED_SCHEMA, UNDEFINED_TABLE, sqlstate_of
from sharded_orm.exceptions import RehearsalFailed

#: The largest number of schemas that one query reads. With more of them, the server would need more
#: time for each schema. Its process would also need more memory to plan the query, and keep it.
BATCH = 100
_RECORDS = "django_migrations"
# SQLSTATEs for a schema or a table that does not exist.
_NOT_THERE = frozenset((UNDEFINED_SCHEMA, UNDEFINED_TABLE))
_BITS = (1 << 64) - 1
_WITHOUT_NAME = re.compile(r"\bINDEX\s+CONCURRENTLY\s+ON\b", re.IGNORECASE)
_CONCURRENTLY = re.compile(r"\bINDEX\s+CONCURRENTLY\b", re.IGNORECASE)


def read(cursor: CatalogCursor, schema: str) -> SchemaSnapshot:
    """Return the definitions of all objects of ``schema``. Sends two queries, or one if the schema
    is empty.

    The definitions do not name the schema, so schemas with equal objects have equal snapshots.

    :param cursor: a cursor whose search path begins with ``schema``.
    :raises django.db.Error: the schema does not exist (SQLSTATE 3F000).
    """
    return compose(catalog.read(cursor, schema))


def build(cursor: CatalogCursor, snapshot: SchemaSnapshot) -> None:
    """Create the objects (tables, views, …) of ``snapshot`` that the current schema of ``cursor``
    lacks.

    Existing objects are not changed. Up to three queries read what exists. Then one packet creates
    all missing objects, in one transaction.

    :raises RehearsalFailed: this library cannot create some of the objects, such as operators.
    """
    cursor.execute("SELECT current_schema()")
    ((schema,),) = cursor.fetchall()
    present = read(cursor, schema).definitions
    missing = [name for name in snapshot.definitions if name not in present]
    if not missing:
        return
    if names := unknown({name: snapshot.definitions[name] for name in missing}):
        raise RehearsalFailed(
            f"Schema {schema!r} cannot be built, because these objects cannot be copied:"
            f" {', '.join(map(repr, names))}. Create them in the schema of the extensions instead, once"
            " for each database."
        )
    # Do not check the bodies of functions, because they may use tables that are created after them.
    setting = "SET LOCAL check_function_bodies = off"
    cursor.execute(";\n".join((setting, *statements(snapshot.definitions, missing, schema))))


def create_schema(cursor: CatalogCursor, schema: str) -> None:
    """Create an empty schema. A schema of this name is dropped first, but only if it has no rows.
    Costs up to four statements.

    :raises RehearsalFailed: a schema of this name exists and has rows.
    """
    if _has_rows(cursor, schema):
        raise RehearsalFailed(
            f"Schema {schema!r} has rows. That is the name of the copy on which migrations are"
            " rehearsed, which never has any: rename that schema, or the group's DATABASE_NAME."
        )
    drop_schema(cursor, schema)
    cursor.execute(f"CREATE SCHEMA {quoted(schema)}")


def _has_rows(cursor: CatalogCursor, schema: str) -> bool:
    cursor.execute(
        "SELECT c.relname FROM pg_namespace n"
        " JOIN pg_depend d ON d.refclassid = 'pg_namespace'::regclass AND d.refobjid = n.oid"
        " JOIN pg_class c ON d.classid = 'pg_class'::regclass AND c.oid = d.objid"
        " WHERE n.nspname = %(schema)s AND c.relkind IN ('r', 'p', 'f')",
        {"schema": schema},
    )
    tables = [name for (name,) in cursor.fetchall()]
    if not tables:
        return False
    tests = (f"EXISTS (SELECT FROM {quoted(schema)}.{quoted(table)})" for table in tables)
    cursor.execute("SELECT " + " OR ".join(tests))
    ((has_rows,),) = cursor.fetchall()
    return bool(has_rows)


def create_missing_schema(cursor: CatalogCursor, schema: str) -> None:
    """Create a schema. Does nothing if the schema exists.

    :raises psycopg.errors.InsufficientPrivilege: the account may not create schemas.
    """
    try:
        cursor.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)}")
    except psycopg.errors.InsufficientPrivilege as exc:
        # The account may not create schemas. The server says so even if the schema exists, because
        # it checks the privilege first. If the schema exists, nothing is wrong.
        if schema in names(cursor):
            return
        raise psycopg.errors.InsufficientPrivilege(
            f"{exc}: the account may not create the schema {schema!r}. Grant it with GRANT CREATE ON"
            " DATABASE …, or let the owner of the database create the schema."
        ) from exc


def drop_schema(cursor: CatalogCursor, schema: str) -> None:
    """Drop a schema with all that it contains. Does nothing if the schema does not exist."""
    cursor.execute(f"DROP SCHEMA IF EXISTS {quoted(schema)} CASCADE")


def drop_unfinished_indexes(cursor: CatalogCursor, sql: str) -> bool:
    """Drop the invalid index that a failed CREATE or DROP INDEX CONCURRENTLY has left.

    Return whether there was one. Does nothing if ``sql`` is no such statement. Otherwise costs one
    query, and one statement for each index. The caller must be sure that no session is still
    working on the index.

    :param sql: the statement that has failed. Only indexes that it names are dropped.
    """
    if not _CONCURRENTLY.search(sql):
        return False
    cursor.execute(
        "SELECT c.relname, t.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid"
        " JOIN pg_class t ON t.oid = i.indrelid WHERE NOT i.indisvalid AND c.relkind = 'i'"
        " AND c.relnamespace = quote_ident(current_schema())::regnamespace"
    )
    # If ``sql`` has no name for the index, the server has made one up. In this case, find the index
    # by its table, whose name is in ``sql``.
    has_name = not _WITHOUT_NAME.search(sql)
    names = [
        index for index, table in cursor.fetchall() if _is_named(index if has_name else table, sql)
    ]
    for name in names:
        cursor.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {quoted(name)}")
    return bool(names)


def _is_named(name: str, sql: str) -> bool:
    return re.search(rf"(?<![\w$]){re.escape(name)}(?![\w$])", sql) is not None


def digests(cursor: CatalogCursor, schemas: Sequence[str]) -> dict[str, str | None]:
    """Return a dict that maps each schema to a digest of its applied migrations.

    The digest is "" if the schema has no table ``django_migrations``, and None if the schema does
    not exist. One query reads 100 schemas. If it fails because a schema or a table is missing, one
    more query finds out which schemas have the table, and the digests of these are read again.

    :param cursor: a cursor in autocommit.
    """
    try:
        # Query the digests without first checking which schemas exist, because usually all do.
        return dict(_digests(cursor, schemas))
    except Exception as exc:
        if sqlstate_of(exc) not in _NOT_THERE:
            raise
    cursor.execute(
        "SELECT n.nspname, c.oid IS NOT NULL FROM pg_namespace n"
        " LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = %(table)s"
        " WHERE n.nspname = ANY (%(schemas)s)",
        {"table": _RECORDS, "schemas": list(schemas)},
    )
    is_recorded = dict(cursor.fetchall())
    with_records = [schema for schema in schemas if is_recorded.get(schema)]
    return {
        **{schema: "" if schema in is_recorded else None for schema in schemas},
        **dict(_digests(cursor, with_records)),
    }


def names(cursor: CatalogCursor) -> set[str]:
    """Return the names of all schemas of the database, except the server's own schemas."""
    cursor.execute(
        "SELECT nspname FROM pg_namespace"
        " WHERE NOT starts_with(nspname, 'pg_') AND nspname <> 'information_schema'"
    )
    return {name for (name,) in cursor.fetchall()}


def _digests(cursor: CatalogCursor, schemas: Sequence[str]) -> Iterator[tuple[str, str]]:
    # This must be the same digest as that of applied_digest() in sharded_orm.backends.snapshot.
    row = "md5(convert_to(app || '/' || name, 'UTF8'))"
    digest = f"bit_xor(('x' || left({row}, 16))::bit(64)::bigint)"
    marker = f"app = '{MARKER_APP}' AND starts_with(name, '{MARKER_PREFIX}')"
    for first in range(0, len(schemas), BATCH):
        batch = schemas[first : first + BATCH]
        selects = (
            f"SELECT {position}, count(*), {digest} FROM {quoted(schema)}.{_RECORDS}"
            f" WHERE NOT ({marker})"
            for position, schema in enumerate(batch)
        )
        cursor.execute(" UNION ALL ".join(selects))
        for position, count, bits in cursor.fetchall():
            yield batch[position], format_digest(count, (bits or 0) & _BITS)
