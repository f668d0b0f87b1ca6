"""The cursor classes of shards: :class:`LeasedCursor`, the default, and a function that makes
such a class from any cursor class of the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from MySQLdb.cursors import Cursor, CursorStoreResultMixIn

from sharded_orm.backends.mysql.connection import VirtualConnection
from sharded_orm.backends.mysql.cursor import LeaseMixin
from sharded_orm.backends.mysql.session import NodeSession


class LeasedCursor(LeaseMixin, Cursor):
    """The default cursor: execute() fetches all rows, and each row is a tuple."""

    def _fetch_result(self, session: NodeSession) -> None:
        result = session.store_result()
        session.stored = True
        try:
            if result is None:
                self.description = self.description_flags = None
                self._rows = ()
            else:
                self.description = result.describe()
                self.description_flags = result.field_flags()
                self._rows = result.fetch_row(0, 0)
            self.rowcount = session.affected_rows()
            self.lastrowid = session.insert_id()
            self.warning_count = session.warning_count()
            self.rownumber = 0
        finally:
            # Free the result now. A traceback, for example, could keep it until another thread uses
            # the session. mysqlclient 2.3 locks the session when it frees a result, so calls of the
            # other thread would fail.
            result = None

    description_flags: Any = None


class _OneStatement(LeasedCursor):
    """A cursor for one statement. It sets only the attributes that its callers read, to save time.

    The callers send the statement by _run_free() or _run_held(). If the statement fails, they store
    the error in ``error`` and call execute(). This does not send the statement again, but raises
    the stored error, with the error handling of a usual cursor.
    """

    #: The error with which the statement has failed. The next execute() raises it.
    error: BaseException | None = None

    def _run_free(self, *args: Any) -> Any:
        self._raise_kept()
        return super()._run_free(*args)

    def _run_held(self, *args: Any) -> Any:
        # execute() may call this method even in autocommit, where it usually calls _run_free(). It
        # does so if the statement seems to leave state in the session, for example because a name
        # in the statement looks like that of a function.
        self._raise_kept()
        return super()._run_held(*args)

    def _raise_kept(self) -> None:
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            # The error's traceback refers to this frame. Drop the frame's reference to the error,
            # so that they do not keep each other alive.
            error = None


class RowReader(_OneStatement):
    """A cursor that only fetches the rows of one query. It does not set other attributes of a
    cursor, such as ``description``.
    """

    def _fetch_result(self, session: NodeSession) -> None:
        result = session.store_result()
        session.stored = True
        try:
            self._rows = () if result is None else result.fetch_row(0, 0)
            self.rownumber = 0
        finally:
            result = None  # As LeasedCursor does.


class RowWriter(_OneStatement):
    """A cursor for one write. It sets ``rowcount`` and ``lastrowid``, but no other attributes."""

    def _fetch_result(self, session: NodeSession) -> None:
        session.store_result()
        session.stored = True
        self.rowcount = session.affected_rows()
        self.lastrowid = session.insert_id()


@cache
def leased(cursorclass: type) -> Callable[[VirtualConnection], LeasedCursor]:
    """Return a subclass of ``cursorclass`` that leases its sessions from a pool.

    :param cursorclass: a cursor class of the driver.
    """
    if cursorclass is Cursor:
        return LeasedCursor
    if issubclass(cursorclass, LeaseMixin):
        return cursorclass
    stores = issubclass(cursorclass, CursorStoreResultMixIn)
    return type(f"Leased{cursorclass.__name__}", (LeaseMixin, cursorclass), {"stores": stores})
