"""The methods by which management commands read and change the schemas of a shard or of its node.

Each backend's ``DatabaseWrapper`` implements these methods. They return which schemas exist, how each
schema is defined, and how large it is. They also create and lock schemas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, cast

from sharded_orm.backends.statements import Effect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from django.db.backends.base.base import BaseDatabaseWrapper

    from sharded_orm.backends.change_capture import ChangeCapture
    from sharded_orm.backends.key_guard import ColumnTypes
    from sharded_orm.backends.row_copy import RowCopy
    from sharded_orm.backends.schema_move import SchemaMove
    from sharded_orm.backends.side_fence import SideFence
    from sharded_orm.backends.sizes import ShardSize, TableSize
    from sharded_orm.backends.snapshot import SchemaSnapshot
    from sharded_orm.backends.write_hooks.session_id import OpenSessions
    from sharded_orm.topology.model import Shard


class ShardDatabaseMixin:
    """The methods that a backend's connection object must have so that its aliases can be shards.

    As with any Django connection object, only the thread that owns the object may call these methods.
    """

    #: A method that reads the rows of a query without a cursor object, where this makes no difference. None
    #: if the backend has no such method.
    read_rows: Callable[[str, tuple[Any, ...]], Any] | None = None
    #: The same for an UPDATE: the method returns the number of rows that matched.
    write_rows: Callable[[str, tuple[Any, ...]], int | None] | None = None

    def is_idle(self) -> bool:
        """Whether this connection object can be closed without any loss.

        True if the object has no unread results, no session state and no leased session.
        """
        return True

    def check_without_server(self) -> None:
        """Check the connection settings of this alias as far as that is possible without a server.

        :raises ImproperlyConfigured: Django or the driver refuses them. For example, the driver does not
            know an option in ``OPTIONS``.
        """
        wrapper = cast("BaseDatabaseWrapper", self)
        wrapper.check_settings()
        self.check_parameters(wrapper.get_connection_params())

    def check_parameters(self, params: dict[str, Any]) -> None:
        """Check that the driver accepts ``params``, the arguments for a new connection. Asks no server.

        :raises ImproperlyConfigured: it refuses them.
        """
        raise NotImplementedError

    def create_shard_database(self) -> None:
        """Create this shard's empty schema (SQLite: file). Does nothing if the schema exists."""
        raise NotImplementedError

    def schema_snapshot(self) -> SchemaSnapshot:
        """Return the definitions of all tables, views, triggers, … in this alias's schema.

        If this alias has an open transaction, the definitions are read within it, and the
        transaction stays open. Two round trips.

        :raises django.db.OperationalError: the schema does not exist.
        """
        raise NotImplementedError

    def schema_glance(self, known: SchemaSnapshot, tables: Sequence[str]) -> SchemaSnapshot:
        """Return the present definitions of ``tables``; the other objects of the schema are taken
        from ``known``.

        New tables are included, and dropped tables are left out. The definition of a new table that
        is not in ``tables`` may be "". Triggers, routines and AUTO_INCREMENT counters are also
        taken from ``known``. One round trip; :meth:`schema_snapshot` takes two.

        :param known: an earlier result of :meth:`schema_snapshot` or of this method.
        :raises django.db.Error: one of ``tables`` does not exist.
        """
        return self.schema_snapshot()

    def build_schema(self, definitions: SchemaSnapshot) -> None:
        """Create the tables, views, … of ``definitions`` that this alias's schema lacks.

        The schema must exist. Existing tables are not changed, so the call can be repeated. Must not be
        called in a transaction.
        """
        raise NotImplementedError

    def applied_digests(self, shards: Sequence[Shard]) -> dict[str, str | None]:
        """Return a digest of each shard's applied migrations, keyed by shard alias.

        Equal digests mean equal sets of migrations. The digest is "" if the schema has no table
        ``django_migrations``, and None if the schema does not exist.

        :param shards: shards on the node of this alias. Their connection objects are not used.
        """
        raise NotImplementedError

    def schemas_present(self) -> set[str]:
        """Return the names of all schemas (SQLite: files) on the node of this alias."""
        raise NotImplementedError

    def shard_sizes(self, shards: Sequence[Shard]) -> dict[str, ShardSize]:
        """Return the size of each shard, keyed by shard alias. One query.

        The size of a schema that does not exist is 0 bytes.

        :param shards: shards on the node of this alias. Their connection objects are not used.
        """
        raise NotImplementedError

    def table_sizes(self, shard: Shard) -> list[TableSize]:
        """Return the sizes of the tables of ``shard``, sorted by the table's name.

        The list is empty if the schema does not exist. One query (SQLite: one query per table).

        :param shard: a shard on the node of this alias.
        """
        raise NotImplementedError

    def column_types(
        self, shards: Sequence[Shard], tables: Sequence[str], columns: Sequence[str]
    ) -> ColumnTypes:
        """Return the types of ``columns`` in ``tables`` of ``shards``. One query per 500 shards.

        In the result, names of tables and columns are in lower case, and columns that do not exist
        are left out. The queries are not added to the query log. May be called only if
        ``features.can_introspect_collations`` is true.

        :param shards: shards on the node of this alias. If this alias's own shard is the only one,
            the query is part of the alias's open transaction. Otherwise, no shard's connection
            object is used.
        """
        raise NotImplementedError

    def node_failure(self) -> Exception | None:
        """Return the error of this process's last attempt to open a session of this alias's node.

        Return None if the attempt succeeded, if there was none, or if there is no server (SQLite).
        Older sessions may still work after an error. This method does not connect the alias. But
        while the node counts as failed, one caller every few seconds opens a session as a test, and
        waits for the result.
        """
        return None

    def open_sessions(self) -> OpenSessions | None:
        """Return how many sessions the server of this alias's node has. One query.

        Return None if there is no server (SQLite).
        """
        return None

    def effect_of(self, sql: str) -> Effect:
        """Return what the statement ``sql`` changes: nothing, rows or the schema.

        Only its text is examined.
        """
        raise NotImplementedError

    def may_change_schema(self, sql: str) -> bool:
        """Whether the statement ``sql`` may change the schema, even by a function that it calls.

        Only its text is examined. Triggers are not considered.
        """
        return self.effect_of(sql) is Effect.SCHEMA

    def statements_sent(self) -> int | None:
        """Return how many statements the connection has sent while it held a session.

        A difference between two calls shows statements that no ``execute_wrapper()`` sees: those of
        ``callproc()`` and of the driver's cursors. The caller then reads the schema again. A
        backend may leave out statements that cannot change the schema. None means that the caller
        must always read the schema again: the number is unknown, or the schema is cheap to read.
        """
        return 0

    def undo_unfinished(self, sql: str) -> bool:
        """Remove what an interrupted or failed statement has left half done.

        On PostgreSQL, ``CREATE INDEX CONCURRENTLY`` and ``DROP INDEX CONCURRENTLY`` may leave an index
        that is not valid. Such an index is dropped. Must not be called in a transaction, and only by
        the session that has locked the schema.

        :param sql: the statement, or several statements separated by semicolons.
        :return: whether anything was removed.
        """
        return False

    def lock_schema(self, seconds: float) -> bool:
        """Take the lock that prevents other sessions from migrating this schema.

        Return False if the lock did not become free within ``seconds``. :meth:`unlock_schema`
        releases the lock, and so does :meth:`close`, which ends the session. If the client process
        dies, the server keeps the lock until the client's last statement has ended. Without a
        server (SQLite), nothing is locked, and True is returned.

        :param seconds: seconds to wait for the lock.
        """
        return True

    def unlock_schema(self) -> None:
        """Release the lock that :meth:`lock_schema` took. Does nothing if the lock is not held."""

    def structural_copy(
        self, definitions: SchemaSnapshot, schema: str
    ) -> AbstractContextManager[Self]:
        """Return a context manager that builds a temporary schema without rows, and connects to it.

        The schema has the given definitions, and is on the server of this alias's schema (SQLite:
        in memory). It is dropped at the end of the ``with`` block. The context manager yields a
        connection object that has this alias, but belongs to no shard group.

        :param schema: name of the temporary schema; ignored if schemas have no names (SQLite). If a
            schema of that name exists, it is dropped first.
        :raises RehearsalFailed: the existing schema of that name has rows (MySQL).
        """
        raise NotImplementedError

    def change_capture(self, account: Mapping[str, Any] | None = None) -> ChangeCapture:
        """Open a separate session on this schema, for the journal of changed rows and for fences,
        which refuse writes of moving keys.

        :param account: ``USER`` and ``PASSWORD`` of the account that creates the triggers; by
            default the account of this alias.
        """
        raise NotImplementedError

    def row_copy(self, account: Mapping[str, Any] | None = None) -> RowCopy:
        """Open a separate session on this schema, to read, copy and compare the rows of a shard key.

        :param account: ``USER`` and ``PASSWORD`` of another account; by default that of this alias.
        """
        raise NotImplementedError

    def schema_move(
        self, confirm: Callable[[], None], account: Mapping[str, Any] | None = None
    ) -> SchemaMove:
        """Open a separate session on this schema, to read its definition and to hide its tables while
        it moves.

        :param confirm: called before each change; raises an error if the change must not be made.
        :param account: ``USER`` and ``PASSWORD`` of another account; by default that of this alias.
        """
        raise NotImplementedError

    def side_fence(
        self,
        confirm: Callable[[], None],
        account: Mapping[str, Any] | None = None,
        answer_within: int | None = None,
    ) -> SideFence:
        """Open a separate session on this schema, to let the passive side of a pair of servers refuse
        the writes of this shard. Only for backends with the feature ``has_side_fences``.

        :param confirm: called before each change; raises an error if the change must not be made.
        :param account: ``USER`` and ``PASSWORD`` of another account; by default that of this alias.
        :param answer_within: seconds in which the server must answer each statement; None for no limit.
        """
        raise NotImplementedError

    def wait_for_side_switch(self, seconds: float) -> None:
        """Wait, for at most ``seconds``, until a change of the active side of this shard's pair ends.

        Returns at once if the present node takes part in no such change. Call it outside of
        transactions. Leases a session for the wait. One query, which the server answers at the end of
        the change. Only for backends with the feature ``has_side_fences``.

        :raises django.db.Error: the server does not answer, or has a shorter limit for statements.
        """
        raise NotImplementedError

    @classmethod
    def server_settings(cls, settings_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of ``settings_dict`` that connects to the same node, but to no shard's
        database.
        """
        return {**settings_dict, "NAME": ""}

    @classmethod
    def database_of(cls, node: Mapping[str, Any], schema: str) -> dict[str, Any]:
        """Return the settings that name the database of a shard, to be added to those of its node.

        :param node: the settings of the shard's node.
        :param schema: name of the shard's schema.
        """
        return {"NAME": schema}
