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
    """The methods that the connection object of a backend must have, so that its aliases can be
    shards.

    As with any connection object of Django, only the thread that owns the object may call these
    methods.
    """

    #: A method that runs a query and returns its rows without a cursor object, which is faster. It
    #: returns None, and sends nothing, if a cursor must be used, for example in a transaction. The
    #: attribute is None if the backend has no such method.
    read_rows: Callable[[str, tuple[Any, ...]], Any] | None = None
    #: A method that runs an UPDATE without a cursor object, and returns the number of rows that
    #: matched. Returns None, or is None, in the same cases as :attr:`read_rows`.
    write_rows: Callable[[str, tuple[Any, ...]], int | None] | None = None

    def is_idle(self) -> bool:
        """Whether this connection object can be closed without any loss.

        True if the object has no unread results, no session state and no leased session.
        """
        return True

    def check_without_server(self) -> None:
        """Check the connection settings of this alias as far as possible without connecting.

        :raises ImproperlyConfigured: Django or the driver refuses a setting. For example, the
            driver does not know an option in ``OPTIONS``.
        """
        wrapper = cast("BaseDatabaseWrapper", self)
        wrapper.check_settings()
        self.check_parameters(wrapper.get_connection_params())

    def check_parameters(self, params: dict[str, Any]) -> None:
        """Check that the driver accepts ``params``, the arguments for a new connection. Does not
        connect.

        :raises ImproperlyConfigured: the driver refuses them.
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
        """Read the definitions of ``tables`` again. Return ``known`` with the new definitions.

        This is a cheap way to find out whether a statement has changed the schema. It takes one
        round trip, and :meth:`schema_snapshot` takes two. New tables are included, and dropped
        tables are left out.
        But the definition of a new table that is not in ``tables`` may be "", and changes of
        triggers, routines and AUTO_INCREMENT counters are not noticed.

        :param known: an earlier result of :meth:`schema_snapshot` or of this method.
        :raises django.db.Error: one of ``tables`` does not exist.
        """
        return self.schema_snapshot()

    def build_schema(self, definitions: SchemaSnapshot) -> None:
        """Create those tables, views, … of ``definitions`` that the schema of this alias does not
        have yet.

        The schema must exist. Existing tables are not changed, so the call can be repeated. Must
        not be called in a transaction.
        """
        raise NotImplementedError

    def applied_digests(self, shards: Sequence[Shard]) -> dict[str, str | None]:
        """Return a digest of the applied migrations of each shard, keyed by shard alias.

        Two shards with equal digests have applied the same migrations. The digest is "" if the
        schema has no table ``django_migrations``, and None if the schema does not exist.

        :param shards: shards on the node of this alias. One query reads many of them (SQLite: one
            query for each file). The shards' own connection objects are not used.
        """
        raise NotImplementedError

    def schemas_present(self) -> set[str]:
        """Return the names of all schemas (SQLite: files) on the node of this alias."""
        raise NotImplementedError

    def shard_sizes(self, shards: Sequence[Shard]) -> dict[str, ShardSize]:
        """Return the size of each shard, keyed by shard alias. One query.

        The size of a schema that does not exist is 0 bytes.

        :param shards: shards on the node of this alias. Their own connection objects are not used.
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
        """Return the types of ``columns`` in ``tables`` on ``shards``. One query per 500 shards.

        In the result, the names of tables and columns are in lower case. Columns that do not exist
        are left out. The queries are not added to the query log. May be called only if
        ``features.can_introspect_collations`` is true.

        :param shards: shards on the node of this alias. If they are only the shard of this alias,
            and the alias has an open transaction, the query runs in this transaction. For other
            shards, the queries run outside of all transactions, and no shard's connection object is
            used.
        """
        raise NotImplementedError

    def node_failure(self) -> Exception | None:
        """Return the error of the last attempt of this process to open a session on the node of
        this alias.

        Return None if the attempt has succeeded, if there was none, or if there is no server
        (SQLite). If an error is returned, sessions that were opened earlier may still work. This
        method does not connect the alias. But while the node counts as failed, one caller every few
        seconds opens a session as a test, and waits for the result. All other callers get the last
        error at once.
        """
        return None

    def open_sessions(self) -> OpenSessions | None:
        """Return how many sessions the server of this alias's node has. One query.

        Return None if there is no server (SQLite).
        """
        return None

    def effect_of(self, sql: str) -> Effect:
        """Return what the statement ``sql`` changes: nothing, rows or the schema. Only its text is
        examined.
        """
        raise NotImplementedError

    def may_change_schema(self, sql: str) -> bool:
        """Whether the statement ``sql`` may change the schema, perhaps by a function that it calls.

        Only the text of the statement is examined. What its triggers do is not considered.
        """
        return self.effect_of(sql) is Effect.SCHEMA

    def statements_sent(self) -> int | None:
        """Return how many statements the connection has sent while it held a session. Statements
        that cannot change the schema need not be counted.

        The caller installs an ``execute_wrapper()``, to notice statements that change the schema.
        But statements of ``callproc()`` and of the driver's own cursors do not pass through this
        wrapper. So if the number has grown by more than the caller has seen, the caller reads the
        schema again. If the result is None, the caller must always read the schema again, because
        the number is unknown or reading is cheap.
        """
        return 0

    def undo_unfinished(self, sql: str) -> bool:
        """Remove what a statement has left half done because it was interrupted or has failed.

        For example, on PostgreSQL, ``CREATE INDEX CONCURRENTLY`` and ``DROP INDEX CONCURRENTLY``
        may leave an index that is not valid. Such an index is dropped. Must not be called in a
        transaction, and only by the session that has locked the schema.

        :param sql: the interrupted statement, or several statements separated by semicolons.
        :return: whether anything was removed.
        """
        return False

    def lock_schema(self, seconds: float) -> bool:
        """Take the lock that keeps other sessions from migrating this schema.

        Return False if the lock did not become free within ``seconds``. :meth:`unlock_schema`
        releases the lock. The server also releases it when the session ends, at :meth:`close`. If
        the process dies, the session ends as soon as the server has finished its last statement.
        Without a server (SQLite), nothing is locked, and True is returned.

        :param seconds: seconds to wait for the lock.
        """
        return True

    def unlock_schema(self) -> None:
        """Release the lock that :meth:`lock_schema` took. Does nothing if the lock is not held."""

    def structural_copy(
        self, definitions: SchemaSnapshot, schema: str
    ) -> AbstractContextManager[Self]:
        """Return a context manager that creates a temporary schema without rows. A migration can be
        tried out on it before it runs on shards.

        The schema has the given definitions. It is on the server of this alias (SQLite: in memory),
        and is dropped at the end of the block. The context manager yields a connection object for
        the schema, which has the name of this alias but belongs to no shard group.

        :param schema: name of the temporary schema; ignored on SQLite, where schemas have no names.
            If a schema of this name exists, it is dropped first.
        :raises RehearsalFailed: the existing schema of this name has rows (MySQL).
        """
        raise NotImplementedError

    def change_capture(self, account: Mapping[str, Any] | None = None) -> ChangeCapture:
        """Open a separate session on this schema that changes its fences and its journal.

        While a shard key moves, the journal is a table in which triggers record the changed rows,
        and a fence refuses writes of the key.

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
        """Open a separate session on this schema, for a move of the shard to another node: to read
        the definitions of its tables, and to hide (rename) the tables.

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
        """Open a separate session on this schema, for the fence of a shard that is on a pair of
        servers. The fence refuses the writes of the shard on the passive server.

        Only for backends with the feature ``pair_side``.

        :param confirm: called before each change; raises an error if the change must not be made.
        :param account: ``USER`` and ``PASSWORD`` of another account; by default that of this alias.
        :param answer_within: seconds in which the server must answer each statement; None for no
            limit.
        """
        raise NotImplementedError

    def wait_for_side_switch(self, seconds: float) -> None:
        """If the active side of this shard's pair is just being changed, wait until the change is
        over, for at most ``seconds``. Otherwise return at once.

        During the change, the pair's servers refuse writes of the shard. After this method, a
        refused write can be repeated. Call it outside of transactions. It sends one query, which
        the server answers at the end of the change. Only for backends with the feature
        ``pair_side``.

        :raises django.db.Error: the server does not answer, or has a shorter limit for statements.
        """
        raise NotImplementedError

    @classmethod
    def server_settings(cls, settings_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of ``settings_dict`` with which one can connect to the node without
        choosing the database of a shard.
        """
        return {**settings_dict, "NAME": ""}

    @classmethod
    def database_of(cls, node: Mapping[str, Any], schema: str) -> dict[str, Any]:
        """Return the settings that choose the database of a shard, such as ``{"NAME":
        "photos_00042"}`` on MySQL. They are merged into the settings of the shard's node.

        :param node: the settings of the shard's node.
        :param schema: name of the shard's schema.
        """
        return {"NAME": schema}
