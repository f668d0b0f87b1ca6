"""Failures of a scatter: the shards that did not answer.

There are three kinds of database errors:

- errors of the *shard*: its connection, its server's state, its schema or file. The shard did not
  answer; see :func:`is_failure`.
- errors of the shard *or the query*: a missing table, column or right. If another shard has
  answered, the query is right; see :func:`may_be_the_query`.
- errors of the *query*: all others. They are raised as they are.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from django.db import InterfaceError, OperationalError

from sharded_orm.exceptions import ScatterError, ShardedOrmError

if TYPE_CHECKING:
    from sharded_orm.topology.model import Shard

# MySQL errors of one schema, for any query: it does not exist, is forbidden, or is broken.
_SCHEMA = frozenset({1044, 1049, 1932})
# Errors of a schema that was not migrated, or of a wrong query: no such table or column, or no
# rights on it.
_SCHEMA_OR_QUERY = frozenset({1054, 1142, 1143, 1146})
# Errors of the connection, after which other batches of the node are not tried.
_NODE_GONE = frozenset({1040, 1045, 1053, 1129, 1130, 1203})
# Errors of the server's state: full, locked, killed, read-only.
_STATE = frozenset(
    {1016, 1020, 1021, 1030, 1033, 1034, 1035, 1037, 1038, 1041, 1114, 1135, 1194, 1195, 1205, 1213}
    | {1290, 1317, 1412, 1836, 1927, 1969, 3024, 4031}
    | set(range(1152, 1162))
)
# Errors of the file's state on SQLite. SQLITE_ERROR concerns the statement.
_SQLITE_STATE = frozenset({
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS,
    sqlite3.SQLITE_NOTADB,
})  # fmt: skip
# SQLite has no codes for a missing table or column.
_SQLITE_MISSING = ("no such table: ", "no such column: ")
# After this many failures, a scatter that fails anyway looks for no more of them.
_ENOUGH = 8


class Failures:
    """The shards that did not answer in one scatter.

    Without ``partial``, the first failure ends the scatter with :exc:`ScatterError`. With it,
    ``report`` gets one such error after the scatter.

    :param asked: the number of shards that were asked.
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
        """Raise :exc:`ScatterError` for the failures so far, unless results may be partial."""
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
    """Whether the shard may have failed; False for an error that is certainly the query's."""
    if may_be_the_query(error):
        return True
    if (cause := _sqlite_error(error)) is not None:
        return _primary(cause) in _SQLITE_STATE
    code = _code(error)
    if not isinstance(code, int):
        # An error of the library, such as ShardDatabaseMissing, or of a driver without numbers.
        return isinstance(error, OperationalError | InterfaceError)
    return is_node_gone(error) or code in _SCHEMA or code in _STATE or code == 0


def may_be_the_query(error: BaseException) -> bool:
    """Whether ``error`` is the shard's or the query's; if another shard answers, the shard's."""
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
    """Whether other shards of the same statement may answer."""
    code = _code(error)
    return code in _SCHEMA or code in _SCHEMA_OR_QUERY


def _sqlite_error(error: BaseException) -> sqlite3.Error | None:
    """The driver's error that Django has wrapped."""
    # The cause of a ShardDatabaseMissing does not describe the error.
    if isinstance(error, ShardedOrmError):
        return None
    return error.__cause__ if isinstance(error.__cause__, sqlite3.Error) else None


def _primary(error: sqlite3.Error) -> int | None:
    """SQLite's primary result code; None for an error of the Python module."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
