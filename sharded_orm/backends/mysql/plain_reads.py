"""Reads of a shard without a cursor object, if a cursor would do nothing but send the statement.

For a small query, the objects and calls of a cursor take a tenth of the processor time. See decision 0052.
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
    """Mixin for the connection object of a shard: reads without a cursor object."""

    Database: Any
    connection: VirtualConnection | None
    force_debug_cursor: bool
    health_check_enabled: bool
    health_check_done: bool

    def read_rows(self, sql: str, params: tuple[Any, ...]) -> Any:
        """Return all rows of a query, as a new cursor of this connection object would return them.

        Return None, and send nothing, if a cursor must be used: in a transaction, for example, or if
        somebody observes statements.

        :param sql: one SELECT that locks nothing and leaves nothing in its session.
        """
        connection, group = self.connection, self.group_wrapper
        try:
            # As settings.DEBUG, without the Python function that gets attributes of Django's settings.
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
        # Do what a cursor does after an error: it raises Django's error, or follows the shard to another
        # node. This is outside of "except", because the context of Django's error would differ there.
        reader.error = error
        try:
            with ShardCursor(reader, self) as cursor:
                cursor._execute(sql, params)
                return cursor.fetchall()
        finally:
            # The traceback of the error has this frame. Do not let the frame have the error.
            error = reader = None
