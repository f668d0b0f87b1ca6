"""The shards of a scatter that did not answer.

An error of a shard is one of three kinds:

- of the *shard*: its connection, its server's state, its schema or file. It did not answer;
  see :func:`is_failure`.
- of the shard *or the query*: a table, column or right that is missing. The query is right if
  another shard has answered it; see :func:`may_be_the_query`.
- of the *query*: everything else. It is raised as it is.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from django.db import InterfaceError, OperationalError

from sharded_orm.exceptions import ScatterError, ShardedOrmError

if TYPE_CHECKING:
    from sharded_orm.topology.model import Shard

# MySQL errors of one schema, whatever is asked: it does not exist, is not ours, is broken.
_SCHEMA = frozenset({1044, 1049, 1932})
# Of one schema that was not migrated, or of a query that is wrong everywhere: no such table or
# column, no rights on it.
_SCHEMA_OR_QUERY = frozenset({1054, 1142, 1143, 1146})
# Errors of the connection: the other batches of the node are not tried.
_NODE_GONE = frozenset({1040, 1045, 1053, 1129, 1130, 1203})
# Errors of the server's state, not of the statement: full, locked, killed, read-only.
_STATE = frozenset(
    {1016, 1020, 1021, 1030, 1033, 1034, 1035, 1037, 1038, 1041, 1114, 1135, 1194, 1195, 1205, 1213}
    | {1290, 1317, 1412, 1836, 1927, 1969, 3024, 4031}
    | set(range(1152, 1162))
)
# The same of SQLite. SQLITE_ERROR is about the statement.
_SQLITE_STATE = frozenset({
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS,
    sqlite3.SQLITE_NOTADB,
})  # fmt: skip
# SQLite gives what is missing no code of its own.
_SQLITE_MISSING = ("no such table: ", "no such column: ")
# A scatter that will fail anyway stops to look for the shards after so many.
_ENOUGH = 8


class Failures:
    """The shards that did not answer, in one scatter.

    Without ``partial`` the first failure ends the scatter with :exc:`ScatterError`.
    With it, ``report`` gets one such error when the scatter is over.
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
        """Raise what was added, unless partial results are wanted."""
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
    """Whether the shard did not answer; False for an error that is about the query for certain."""
    if may_be_the_query(error):
        return True
    if (cause := _sqlite_error(error)) is not None:
        return _primary(cause) in _SQLITE_STATE
    code = _code(error)
    if not isinstance(code, int):
        # Of ours, such as ShardDatabaseMissing, or of a driver without numbers.
        return isinstance(error, OperationalError | InterfaceError)
    return is_node_gone(error) or code in _SCHEMA or code in _STATE or code == 0


def may_be_the_query(error: BaseException) -> bool:
    """Whether ``error`` is the shard's or the query's; that another shard answers tells which."""
    if (cause := _sqlite_error(error)) is not None:
        missing = str(cause).startswith(_SQLITE_MISSING)
        return missing and _primary(cause) == sqlite3.SQLITE_ERROR
    return _code(error) in _SCHEMA_OR_QUERY


def is_node_gone(error: BaseException) -> bool:
    code = _code(error)
    # The client library's own errors are numbered from 2000.
    return isinstance(code, int) and (code in _NODE_GONE or 2000 <= code < 3000)


def _code(error: BaseException) -> Any:
    return error.args[0] if error.args else None


def concerns_one_shard(error: BaseException) -> bool:
    """Whether other shards of the same statement may well answer."""
    code = _code(error)
    return code in _SCHEMA or code in _SCHEMA_OR_QUERY


def _sqlite_error(error: BaseException) -> sqlite3.Error | None:
    """The driver's error that Django has wrapped."""
    # Of ShardDatabaseMissing it is the occasion only.
    if isinstance(error, ShardedOrmError):
        return None
    return error.__cause__ if isinstance(error.__cause__, sqlite3.Error) else None


def _primary(error: sqlite3.Error) -> int | None:
    """The result code of SQLite without its details; None for an error of the module itself."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
