"""Read rows of a shard without a cursor object, where a cursor would only send the statement and
fetch the rows.

For a small query, the objects and calls of a cursor take a tenth of the processor time. See
decision 0052.
"""

from __future__ import annotations

from asyncio import _get_running_loop
from threading import get_ident
from typing import Any

from django.apps import apps
from django.conf import settings
from django.db import Error

from sharded_orm.backends.group import relocation
from sharded_orm.backends.group.cursor_methods import are_djangos
from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.backends.group.moved_shards import ShardCursor, cursors_only_send
from sharded_orm.backends.mysql.connection import VirtualConnection
from sharded_orm.backends.mysql.leased_cursor import LeasedCursor, RowReader
from sharded_orm.backends.mysql.statement_kind import StatementKind
from sharded_orm.backends.session_mode import SessionMode

_FREE, _READ = SessionMode.FREE, StatementKind.READ


class PlainReadMixin(ShardConnectionMixin):
    """Mixin for the connection object of a shard: adds reads without a cursor object."""

    Database: Any
    connection: VirtualConnection | None
    force_debug_cursor: bool
    health_check_enabled: bool
    health_check_done: bool

    def read_rows(self, sql: str, params: tuple[Any, ...]) -> Any:
        """Return all rows of a query, just as a new cursor of this connection object would.

        Return None, and send nothing, if a cursor is needed. That is so in a transaction, for
        example, or if somebody observes statements, as ``execute_wrappers`` do.

        :param sql: one SELECT that locks no rows and leaves no state in its session.
        """
        connection, group = self.connection, self.group_wrapper
        try:
            # Get settings.DEBUG directly: Django's settings object would call a slower Python
            # function.
            is_debugging = object.__getattribute__(settings, "DEBUG")
        except AttributeError:
            is_debugging = settings.DEBUG
        if (
            connection is None
            or connection.mode is not _FREE
            or connection.default_cursor is not LeasedCursor
            or group is None
            or group.levels
            or self._generation != relocation.generation
            or self._needs_rollback
            or self.awaits_snapshot
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
        ):
            return None
        # As ShardConnectionMixin._cursor().
        group.connect()
        self._report_use(group)
        reader: Any = RowReader(connection)
        try:
            LeasedCursor._run_free(reader, connection, _READ, sql, params)
            return reader._rows
        except (self.Database.Error, Error) as exc:
            error: BaseException | None = exc
        # Let a cursor handle the error: it raises Django's error or, if the shard has moved, reads
        # again on the new node. Do this outside of "except", so that the context of Django's error
        # is the same as with a cursor.
        reader.error = error
        try:
            with ShardCursor(reader, self) as cursor:
                cursor._execute(sql, params)
                return cursor.fetchall()
        finally:
            # The error's traceback refers to this frame. Drop the frame's references, so that they
            # do not keep each other alive.
            error = reader = None
