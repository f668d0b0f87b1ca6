"""The tables of the topology source in the global database: their columns, and statements on them.

They belong to no models, and no migration creates them: Django needs the topology before it can
load models or migrate. All text in them is ASCII, so the character set of the database does not
matter.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from django.db import Error, IntegrityError, ProgrammingError, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.sql import Query

from sharded_orm.database_clock import DatabaseClock
from sharded_orm.forks import hold_during_forks

VERSIONS = "sharded_orm_topology"
PROCESSES = "sharded_orm_topology_process"
_COLUMNS: Mapping[str, Mapping[str, models.Field[Any, Any]]] = {
    VERSIONS: {
        "id": models.BigIntegerField(),
        "version": models.BigIntegerField(),
        "published_at": models.CharField(max_length=40),
        # The author and the comment of the version, as JSON.
        "note": models.TextField(),
        "document": models.TextField(),
    },
    PROCESSES: {
        "name": models.CharField(max_length=255),
        "host": models.CharField(max_length=255),
        "pid": models.BigIntegerField(),
        "version": models.BigIntegerField(),
        "since": models.CharField(max_length=40),
        # When the process last reported that it is alive, by the clock of the database.
        "seen": models.DateTimeField(),
    },
}
# The lock that is held while a statement runs. A fork of this process waits for the lock, because
# a child that is forked during a statement of SQLite might wait for ever.
_statement = threading.Lock()
hold_during_forks(lambda: [_statement])


def execute(
    connection: BaseDatabaseWrapper, sql: str, parameters: list[Any]
) -> tuple[list[Any], int]:
    """Execute a statement.

    Return its rows, and the number of rows that the statement has found or changed.
    """
    with _statement, connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return (list(cursor.fetchall()) if cursor.description else []), int(cursor.rowcount)


def insert(
    connection: BaseDatabaseWrapper, table: str, values: Mapping[str, Any], **expressions: str
) -> None:
    columns = ", ".join([*values, *expressions])
    row = ", ".join([*("%s" for _ in values), *expressions.values()])
    execute(connection, f"INSERT INTO {table} ({columns}) VALUES ({row})", [*values.values()])


def _missing_tables(connection: BaseDatabaseWrapper) -> list[str]:
    with _statement, connection.cursor() as cursor:
        tables = connection.introspection.table_names(cursor)
    return [table for table in _COLUMNS if table not in tables]


def create_tables(connection: BaseDatabaseWrapper) -> None:
    for table in _missing_tables(connection):
        columns = [
            f"{name} {field.db_type(connection)} NOT NULL"
            for name, field in _COLUMNS[table].items()
        ]
        columns[0] += " PRIMARY KEY"
        try:
            execute(connection, f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(columns)})", [])
        except (IntegrityError, ProgrammingError):
            # If another process creates the same table at the same time, PostgreSQL may raise an
            # error. Ignore it if the table exists now.
            if table in _missing_tables(connection):
                raise


def read_versions(
    connection: BaseDatabaseWrapper, sql: str, parameters: list[Any]
) -> list[tuple[Any, ...]]:
    """Return the rows of a query on the table of versions.

    If the table does not exist yet, return no rows.
    """
    try:
        return execute(connection, sql, parameters)[0]
    except Error:
        if VERSIONS in _missing_tables(connection):
            return []
        raise


def newest_version(connection: BaseDatabaseWrapper) -> tuple[int, str] | None:
    """Return the id and the publication time of the current document's row; None if there is none.

    The id alone does not identify the row, because ids restart if the table is created again or
    restored from a backup.
    """
    sql = f"SELECT id, published_at FROM {VERSIONS} ORDER BY id DESC LIMIT 1"
    rows = read_versions(connection, sql, [])
    return (rows[0][0], rows[0][1]) if rows else None


def current_version(connection: BaseDatabaseWrapper) -> tuple[int, str, str] | None:
    """Return the id, publication time and text of the current document; None if there is none."""
    sql = f"SELECT id, published_at, document FROM {VERSIONS} ORDER BY id DESC LIMIT 1"
    rows = read_versions(connection, sql, [])
    return (rows[0][0], rows[0][1], rows[0][2]) if rows else None


def read_processes(connection: BaseDatabaseWrapper) -> list[tuple[Any, ...]]:
    """Return a tuple for each process that uses the topology source.

    The tuple has the process's name, host, pid, topology version and start time, and the time since
    it last reported that it is alive.
    """
    columns = "name, host, pid, version, since"
    sql = f"SELECT {columns}, seen, {clock_sql(connection)} FROM {PROCESSES} ORDER BY host, pid"
    try:
        rows = execute(connection, sql, [])[0]
    except Error:
        if PROCESSES in _missing_tables(connection):
            return []
        raise
    processes = []
    for *process, seen, now in rows:
        # Skip a row that was written by hand with invalid values.
        with suppress(TypeError, ValueError):
            processes.append((*process, _moment(now) - _moment(seen)))
    return processes


def clock_sql(connection: BaseDatabaseWrapper) -> str:
    """Return SQL for the current time by the clock of the database."""
    compiler = Query(None).get_compiler(connection=connection)
    return str(compiler.compile(DatabaseClock())[0])


def _moment(value: Any) -> datetime:
    # Some drivers return a time as text. The caller subtracts two times that the same driver has
    # returned, so either both have a time zone or none has.
    return value if isinstance(value, datetime) else datetime.fromisoformat(value)
