"""Send statements of a shard without a cursor object, to save time.

For a small statement, the objects and calls of a cursor take a tenth of the processor time. So they
are left out if a cursor would do nothing but send the statement. See decision 0052.
"""

from __future__ import annotations

from asyncio import _get_running_loop
from contextlib import suppress
from threading import get_ident
from typing import Any

from django.apps import apps
from django.conf import settings
from django.db import Error

from sharded_orm.backends.group import relocation
from sharded_orm.backends.group.contract import GroupAlias
from sharded_orm.backends.group.cursor_methods import are_djangos
from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.backends.group.moved_shards import ShardCursor, cursors_only_send
from sharded_orm.backends.mysql.connection import VirtualConnection
from sharded_orm.backends.mysql.leased_cursor import LeasedCursor, RowReader, RowWriter
from sharded_orm.backends.mysql.statement_kind import StatementKind, classify
from sharded_orm.backends.session_mode import SessionMode

_FREE, _HELD = SessionMode.FREE, SessionMode.HELD
_READ, _WRITE = StatementKind.READ, StatementKind.WRITE


class CursorlessStatementMixin(ShardConnectionMixin):
    """Mixin for a shard's connection object, with methods that read and write rows without a cursor
    object.
    """

    Database: Any
    connection: VirtualConnection | None
    force_debug_cursor: bool
    health_check_enabled: bool
    health_check_done: bool

    def read_rows(self, sql: str, params: tuple[Any, ...]) -> Any:
        """Return all rows of a query, the same as a new cursor of this connection object would.

        Return None, and send nothing, if the caller has to use a cursor: in a transaction, for
        example, or if ``execute_wrappers`` or the query log must see the statement.

        :param sql: one SELECT that locks no rows and leaves no state in its session.
        """
        connection, group = self.connection, self.group_wrapper
        if (
            connection is None
            or connection.mode is not _FREE
            or connection.default_cursor is not LeasedCursor
            or group is None
            or group.levels
            or self._needs_rollback
            or self.awaits_snapshot
            or not self._needs_no_cursor(group)
        ):
            return None
        # As ShardConnectionMixin._prepare_statement().
        group.connect()
        self._report_use(group)
        reader: Any = RowReader(connection)
        try:
            LeasedCursor._run_free(reader, connection, _READ, sql, params)
            return reader._rows
        except (self.Database.Error, Error) as exc:
            error: BaseException | None = exc
        # Let a cursor handle the error. The cursor raises Django's error or, if the shard has
        # moved, reads again on the new node. Do this outside of "except", so that the error has the
        # same context as if a cursor had sent the statement.
        reader.error = error
        try:
            with ShardCursor(reader, self) as cursor:
                cursor._execute(sql, params)
                return cursor.fetchall()
        finally:
            # The error's traceback refers to this frame. Drop the frame's references, so that they
            # do not keep each other alive.
            error = reader = None

    def write_rows(self, sql: str, params: tuple[Any, ...]) -> int | None:
        """Send an UPDATE, and return the same number of rows as ``rowcount`` of a cursor.

        Also works in a transaction. Return None, and send nothing, if the caller has to use a
        cursor: for example, if ``execute_wrappers`` or the query log must see the statement.

        :param sql: one UPDATE that leaves no state in its session, such as a user variable.
        """
        connection, group = self.connection, self.group_wrapper
        if group is None or connection is None or not self._needs_no_cursor(group):
            return None
        self._prepare_statement(group)
        if (
            # _prepare_statement() has connected again. A receiver of connection_created may have
            # added execute_wrappers to the new connection.
            connection is not self.connection
            or connection.mode > _HELD
            or connection.default_cursor is not LeasedCursor
            or connection.collects
            or self._needs_rollback
            or (group.levels and group.needs_rollback)
            or classify(sql) is not _WRITE
        ):
            return None
        writer: Any = RowWriter(connection)
        run = LeasedCursor._run_free if connection.mode is _FREE else LeasedCursor._run_held
        try:
            changed: int = run(writer, connection, _WRITE, sql, params)
            if writer._session is not None:
                # More results are unread, so close the cursor. Suppress errors of close(), as
                # Django's cursor does at the end of a "with" statement.
                with suppress(self.Database.Error):
                    writer.close()
            return changed
        except (self.Database.Error, Error) as exc:
            error: BaseException | None = exc
        # As read_rows() does.
        writer.error = error
        try:
            with ShardCursor(writer, self) as cursor:
                cursor._execute(sql, params)
                return int(cursor.rowcount)
        finally:
            error = writer = None

    def _needs_no_cursor(self, group: GroupAlias) -> bool:
        """Whether a cursor of this connection object would only send its statement.

        False, for example, if there are ``execute_wrappers``, if queries are logged, or if another
        package has replaced a method of Django's cursors.
        """
        try:
            # The same as settings.DEBUG, but faster, because no method of Django's settings object
            # is called.
            is_debugging = object.__getattribute__(settings, "DEBUG")
        except AttributeError:
            is_debugging = settings.DEBUG
        return not (
            self._generation != relocation.generation
            or (self.health_check_enabled and not self.health_check_done)
            or self._thread_ident != get_ident()
            or self.execute_wrappers
            or group.execute_wrappers
            or is_debugging
            or group.force_debug_cursor
            or self.force_debug_cursor
            or not apps.ready
            or _get_running_loop() is not None  # Django's cursor() refuses to block an event loop.
            or not are_djangos(self, super(ShardConnectionMixin, type(self)))
            or not cursors_only_send()
        )
