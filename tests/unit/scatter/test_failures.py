"""Errors of a database: about a shard, about the query, or either."""

from __future__ import annotations

import sqlite3

import pytest
from django.db import (
    DatabaseError,
    DataError,
    InterfaceError,
    OperationalError,
    ProgrammingError,
)

from sharded_orm.exceptions import PoolTimeout, ShardDatabaseMissing
from sharded_orm.scatter.failures import is_failure, may_be_the_query


def of_sqlite(cls: type[DatabaseError], text: str, code: int | None) -> Exception:
    """Return an error of SQLite as Django wraps it."""
    cause = sqlite3.OperationalError(text)
    if code is not None:
        cause.sqlite_errorcode = code
    error = cls(text)
    error.__cause__ = cause
    return error


def of_postgresql(cls: type[Exception], state: str | None, text: str = "") -> Exception:
    """Return an error of PostgreSQL as Django wraps it."""
    cause = Exception(text)
    cause.sqlstate = state  # type: ignore[attr-defined]  # as an error of psycopg
    error = cls(text or state)
    error.__cause__ = cause
    return error


SHARD = [
    OperationalError(2003, "Can't connect"), OperationalError(2013, "Lost connection"),
    OperationalError(1040, "Too many connections"), OperationalError(1045, "Access denied"),
    OperationalError(1049, "Unknown database"), OperationalError(1205, "Lock wait timeout"),
    OperationalError(1290, "read-only"), OperationalError(1114, "The table is full"),
    OperationalError(1158, "Got an error reading communication packets"),
    InterfaceError(0, "closed"), InterfaceError("closed"),
    PoolTimeout("all in use"), ShardDatabaseMissing("no file"),
    OperationalError("connection refused"),
    of_sqlite(OperationalError, "database is locked", sqlite3.SQLITE_BUSY),
    of_sqlite(OperationalError, "disk I/O error", sqlite3.SQLITE_IOERR_READ),
    of_sqlite(OperationalError, "unable to open database file", sqlite3.SQLITE_CANTOPEN),
    of_sqlite(OperationalError, "attempt to write a readonly database", sqlite3.SQLITE_READONLY),
    of_sqlite(DatabaseError, "file is not a database", sqlite3.SQLITE_NOTADB),
    of_sqlite(DatabaseError, "database disk image is malformed", sqlite3.SQLITE_CORRUPT),
    of_postgresql(OperationalError, None, "connection refused"),
    *(of_postgresql(OperationalError, state) for state in (
        "08006", "28P01", "3D000", "53200", "53300", "57014", "57P01", "55P03", "40001", "40P01",
        "25006", "58030", "XX001",
    )),
    of_postgresql(ProgrammingError, "3F000"),
]  # fmt: skip
EITHER = [
    ProgrammingError(1146, "Table 'a.b' doesn't exist"), OperationalError(1054, "Unknown column"),
    OperationalError(1142, "SELECT command denied"), OperationalError(1143, "command denied"),
    of_sqlite(OperationalError, "no such table: a", sqlite3.SQLITE_ERROR),
    of_sqlite(OperationalError, "no such column: a.b", sqlite3.SQLITE_ERROR),
    *(of_postgresql(ProgrammingError, state) for state in ("42P01", "42703", "42501")),
]  # fmt: skip
QUERY = [
    ProgrammingError(1064, "syntax"), OperationalError(1305, "FUNCTION a.b does not exist"),
    OperationalError(1109, "Unknown table 'x' in field list"), DataError(1264, "Out of range"),
    OperationalError(1690, "BIGINT value is out of range"),
    of_sqlite(OperationalError, 'near "x": syntax error', sqlite3.SQLITE_ERROR),
    of_sqlite(OperationalError, "no such function: X", sqlite3.SQLITE_ERROR),
    of_sqlite(OperationalError, "too many SQL variables", sqlite3.SQLITE_ERROR),
    of_sqlite(OperationalError, "user-defined function raised exception", sqlite3.SQLITE_ERROR),
    of_sqlite(OperationalError, "Could not decode to UTF-8 column", None),
    *(of_postgresql(DataError, state) for state in ("22012", "22003", "42883", "42804", "42601")),
    of_postgresql(InterfaceError, "54000"), of_postgresql(OperationalError, "54001"),
]  # fmt: skip


@pytest.mark.parametrize("error", SHARD, ids=str)
def test_of_the_shard(error: Exception) -> None:
    assert (is_failure(error), may_be_the_query(error)) == (True, False)


@pytest.mark.parametrize("error", EITHER, ids=str)
def test_of_either(error: Exception) -> None:
    assert (is_failure(error), may_be_the_query(error)) == (True, True)


@pytest.mark.parametrize("error", QUERY, ids=str)
def test_of_the_query(error: Exception) -> None:
    assert (is_failure(error), may_be_the_query(error)) == (False, False)
