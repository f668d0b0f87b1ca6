"""Failures of a scatter (a query of many shards): which shards did not answer, and which errors
mean that a shard did not answer.

A scatter distinguishes three kinds of database errors by their cause:

- The *shard*: its connection, the state of its server, its schema or its file. The shard counts as
  not answering; see :func:`is_failure`.
- The *shard or the query*: a table, a column or a privilege is missing. The shard counts as not
  answering. If another shard answers, the query is right; see :func:`may_be_the_query`.
- The *query*: all other errors. They are raised unchanged.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from django.db import InterfaceError, OperationalError

from sharded_orm.exceptions import ScatterError, ShardedOrmError
from sharded_orm.mysql_flavor import FLAVORS

if TYPE_CHECKING:
    from sharded_orm.topology.model import Shard

# MySQL's error codes for a schema that does not exist, is forbidden or is broken. A wrong query
# cannot cause these errors.
_SCHEMA = frozenset({1044, 1049, 1932})
# MySQL's error codes for a missing table or column, or a missing privilege on it. The cause is a
# schema that was not migrated, or a wrong query.
_SCHEMA_OR_QUERY = frozenset({1054, 1142, 1143, 1146})
# MySQL's error codes for a failed connection. After such an error, no more statements are sent to
# the node (database server).
_NODE_GONE = frozenset({1040, 1045, 1053, 1129, 1130, 1203})
# MySQL's error codes for a bad state of the server, for example: full, locked, killed, read-only.
_STATE = frozenset(
    {1016, 1020, 1021, 1030, 1033, 1034, 1035, 1037, 1038, 1041, 1114, 1135, 1194, 1195, 1205, 1213}
    | {1290, 1317, 1412, 1836}
    | set(range(1152, 1162))
    | {flavor.session_ended for flavor in FLAVORS}
    | {flavor.statement_timeout for flavor in FLAVORS}
)
# SQLite's error codes for a bad state of the file. SQLITE_ERROR is not included, because it means
# an error in the statement.
_SQLITE_STATE = frozenset({
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS,
    sqlite3.SQLITE_NOTADB,
})  # fmt: skip
# PostgreSQL's error codes (SQLSTATE) for a schema that does not exist, and for a missing table or
# column, or a missing privilege. If a statement contains the schema before each table's name, a
# missing schema is reported as a missing table.
_PG_SCHEMA = frozenset({"3F000"})
_PG_SCHEMA_OR_QUERY = frozenset({"42P01", "42703", "42501"})
# Beginnings of PostgreSQL's error codes for a failed connection: the connection is lost, the
# account is wrong, the database does not exist, the server shuts down or starts, or there are too
# many connections.
_PG_NODE_GONE = ("08", "28", "3D", "57P01", "57P02", "57P03", "57P04", "53300")
# Beginnings of PostgreSQL's error codes for a bad state of the server: too few resources, a
# cancelled statement (also by a timeout), file errors, damaged data, a lock or deadlock, or a
# read-only server.
_PG_STATE = ("53", "57", "58", "XX001", "XX002", "55P03", "55006", "40", "25006", "25P03")
# PostgreSQL's error code for too little memory. One cause is a statement with too many locks,
# because it locks each table and each index that it may read.
_PG_OUT_OF_MEMORY = "53200"
# Beginnings of SQLite's messages for a missing table or column. SQLite has no separate error codes
# for these errors.
_SQLITE_MISSING = ("no such table: ", "no such column: ")
# A scatter that must not return partial results stops after this number of failed shards. One
# failed shard is enough to make it fail, but the message should list several.
_ENOUGH = 8


class Failures:
    """Records which shards did not answer in one scatter.

    :param asked: the number of shards that were queried.
    :param partial: whether the caller wants the rows of the other shards if a shard fails. If
        False, :meth:`check` raises :exc:`ScatterError` after a failure.
    :param report: a function that is called once after the scatter, with a :exc:`ScatterError`, if
        ``partial`` is true and shards have failed.
    """

    def __init__(
        self,
        asked: int,
        *,
        partial: bool = False,
        report: Callable[[ScatterError], None] | None = None,
    ) -> None:
        self.asked = asked
        self.partial = partial
        self.causes: dict[str, BaseException] = {}
        self._report = report

    def add(self, shards: Iterable[Shard], cause: BaseException) -> None:
        for shard in shards:
            self.causes[shard.alias] = cause

    def check(self) -> None:
        """Raise :exc:`ScatterError` if a shard has failed and partial results are not allowed."""
        if self.causes and not self.partial:
            raise self.error() from next(iter(self.causes.values()))

    @property
    def hopeless(self) -> bool:
        return not self.partial and len(self.causes) >= _ENOUGH

    def error(self, *, proven: bool = True) -> ScatterError:
        return ScatterError(self.causes, self.asked, proven=proven)

    def finish(self) -> None:
        if self.causes and self.partial and self._report is not None:
            self._report(self.error())


def is_failure(error: Exception) -> bool:
    """Whether the shard may be the cause of ``error``; False if the query is certainly the cause."""
    if may_be_the_query(error):
        return True
    if (cause := _sqlite_error(error)) is not None:
        return _primary(cause) in _SQLITE_STATE
    if (state := _sqlstate(error)) is not None:
        return is_node_gone(error) or state in _PG_SCHEMA or state.startswith(_PG_STATE)
    code = _code(error)
    if not isinstance(code, int):
        # An error without a MySQL code was raised by this package (such as ShardDatabaseMissing) or
        # by a driver without codes. For such an error, the class tells whether the shard may be the
        # cause.
        return isinstance(error, OperationalError | InterfaceError)
    return is_node_gone(error) or code in _SCHEMA or code in _STATE or code == 0


def may_be_the_query(error: BaseException) -> bool:
    """Whether ``error`` has two possible causes: the query is wrong, or the shard has failed.

    For example, if a column is missing, its name in the query may be wrong, or the shard was not
    migrated. If another shard answers the same query, the failing shard is the cause.
    """
    if (cause := _sqlite_error(error)) is not None:
        missing = str(cause).startswith(_SQLITE_MISSING)
        return missing and _primary(cause) == sqlite3.SQLITE_ERROR
    return _sqlstate(error) in _PG_SCHEMA_OR_QUERY or _code(error) in _SCHEMA_OR_QUERY


def is_node_gone(error: BaseException) -> bool:
    state = _sqlstate(error)
    if state is not None:
        # The client library raises an error without a code if it has lost a connection or could not
        # make one.
        lost = state == "" and isinstance(error, OperationalError)
        return lost or state.startswith(_PG_NODE_GONE)
    code = _code(error)
    # Codes from 2000 to 2999 are errors that MySQL's client library detects, such as a lost connection.
    return isinstance(code, int) and (code in _NODE_GONE or 2000 <= code < 3000)


def _code(error: BaseException) -> Any:
    return error.args[0] if error.args else None


def concerns_one_shard(error: BaseException) -> bool:
    """Whether ``error`` concerns only one shard.

    If so, a statement without this shard may still succeed.
    """
    code, state = _code(error), _sqlstate(error)
    return (
        code in _SCHEMA
        or code in _SCHEMA_OR_QUERY
        or state in _PG_SCHEMA
        or state in _PG_SCHEMA_OR_QUERY
    )


def is_too_large(error: BaseException) -> bool:
    """Whether a statement may have failed because it reads too many tables at once.

    If so, several statements that each read fewer shards may succeed.
    """
    return _sqlstate(error) == _PG_OUT_OF_MEMORY


def is_mismatch(error: BaseException) -> bool:
    """Whether a UNION of shards has failed because a column has different types or collations.

    If a type or collation of the same name is defined in each shard's schema, PostgreSQL treats
    these definitions as different.
    """
    # datatype_mismatch, cannot_coerce and indeterminate_collation
    return _sqlstate(error) in ("42804", "42846", "42P22")


def _sqlstate(error: BaseException) -> str | None:
    """Return PostgreSQL's code of ``error``; "" if the client library has detected the error.

    Return None if ``error`` is an error of this package, or not one of PostgreSQL.
    """
    if isinstance(error, ShardedOrmError):
        return None
    for exc in (error, error.__cause__):
        if exc is not None and hasattr(exc, "sqlstate"):
            return exc.sqlstate or ""
    return None


def _sqlite_error(error: BaseException) -> sqlite3.Error | None:
    """Return the error of the SQLite driver that Django has wrapped in ``error``.

    Return None if ``error`` is an error of this package or wraps no error of the SQLite driver.
    """
    # If an error of this package was raised, such as ShardDatabaseMissing, do not return the
    # driver's error that has caused it, because the package's error is more precise.
    if isinstance(error, ShardedOrmError):
        return None
    return error.__cause__ if isinstance(error.__cause__, sqlite3.Error) else None


def _primary(error: sqlite3.Error) -> int | None:
    """Return the primary result code of SQLite for ``error``.

    Return None if ``error`` has no code, because Python's ``sqlite3`` module raised it itself.
    """
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
