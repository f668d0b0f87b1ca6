"""The connection object of an alias that stands for a whole shard group, such as ``photos``.

Django iterates over the aliases of groups, but not over those of shards. So if Django does
something to all connections, the group's connection object does it to the connections of the
group's shards. For example, Django closes connections, clears query logs, begins the transactions
of ``ATOMIC_REQUESTS`` and of test cases, forbids connections in test cases, and creates test
databases. The cost does not depend on the number of shards.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, cast

from django.db import DEFAULT_DB_ALIAS, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import load_backend

from sharded_orm.backends.features import features_of
from sharded_orm.backends.group import relocation
from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.backends.group.refusals import GroupConnection, group_alias_error
from sharded_orm.backends.group.shard_connections import ShardConnections
from sharded_orm.backends.group.test_databases import test_databases
from sharded_orm.backends.group.transactions import GroupTransactions
from sharded_orm.backends.query_log import GroupQueryLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_DEFAULT_IDLE_ALIASES = 1024


class GroupAliasMixin(GroupTransactions):
    """First base class of a shard group's connection object. The second base class is the backend
    class of the group's nodes, such as MySQL's.

    The object itself never runs SQL. Its ``vendor``, ``features``, ``ops`` and system checks come
    from the second base class. If one of these has to query a server, it queries one node of the
    group.
    """

    # True while ensure_connection() runs. Django's test cases forbid connections by replacing
    # BaseDatabaseWrapper.ensure_connection(), so it must be called before each connection. For this
    # purpose, connect() calls it if this attribute is False.
    _connecting = False
    _connection: GroupConnection | None = None

    def __init__(self, settings_dict: dict[str, Any], alias: str = DEFAULT_DB_ALIAS) -> None:
        self.init_transactions()
        engine = engine_of(settings_dict)
        limit: int | None = settings_dict.get("MAX_IDLE_ALIASES", _DEFAULT_IDLE_ALIASES)
        bound = features_of(engine).max_idle_aliases
        if bound is not None and limit is not None:
            limit = min(limit, bound)
        # Set no limit while tests run. With a limit, a connection object could be dropped although
        # a test has patched it, or captures its queries.
        self.shards = ShardConnections(None if settings_dict["GROUP"] in test_databases else limit)
        super().__init__(settings_dict, alias)
        self.queries_log = GroupQueryLog(self.queries_limit)
        self._seen_generation = settings_dict.get("GENERATION", relocation.generation)
        self._build_server()

    def _build_server(self) -> None:
        engine = engine_of(self.settings_dict)
        self._server: BaseDatabaseWrapper = engine(
            engine.server_settings(self.settings_dict), self.alias
        )
        self.features = self._server.features
        self.validation = self._server.validation

    @property
    def server(self) -> BaseDatabaseWrapper:
        """A connection object for queries about the server. It belongs to one node of the group.

        At its first query, it connects to the node, but not to the database of a shard.
        """
        if self._seen_generation != relocation.generation:
            self._refresh_server()
        return self._server

    def _refresh_server(self) -> None:
        """Replace the connection object that ``server`` returns, if the new topology (the map of
        shards to nodes) has other settings for the group.
        """
        generation = relocation.generation
        settings: dict[str, Any] | None = connections.settings.get(self.alias)
        if settings is not None and not relocation.same_place(self.settings_dict, settings):
            BaseDatabaseWrapper.close(self._server)
            self.settings_dict = settings
            self._build_server()
        self._seen_generation = generation

    # ##### Connecting: a group itself has no database session #####

    @property
    def connection(self) -> GroupConnection | None:
        return self._connection

    @connection.setter
    def connection(self, value: GroupConnection | None) -> None:
        self._connection = value
        if value is None and self.levels:
            # Django sets this attribute to None after it has closed the connection. Inside an
            # atomic block, it does so at the end of the block. If a transaction of the group is
            # still open, the transaction is lost. So end the transactions of the group's shards.
            self.abandon_levels()

    def connect(self) -> None:
        """Make the group count as connected, by setting the attributes that Django's connect()
        sets.

        Opens no database session, because a group has none. Called for every statement on every
        shard, so it must be cheap.
        """
        if self._seen_generation != relocation.generation:
            self._refresh_server()
        if self._connection is not None:
            return
        if not self._connecting:
            # Connect by ensure_connection(), because Django's test cases patch that method to
            # forbid connections in other threads.
            self.ensure_connection()
            return
        self.check_settings()
        self.in_atomic_block = False
        self.savepoint_ids = []
        self.atomic_blocks = []
        self.needs_rollback = False
        self.close_at = None
        self.closed_in_transaction = False
        self.errors_occurred = False
        self.connection = GroupConnection(self.alias)
        # A group's connection object always begins in autocommit. The setting AUTOCOMMIT applies
        # only to the connections of its shards.
        self.set_autocommit(True)
        self.run_on_commit = []

    def ensure_connection(self) -> None:
        self._connecting = True
        try:
            super().ensure_connection()
        finally:
            self._connecting = False

    def is_usable(self) -> bool:
        return True

    def close(self) -> None:
        """Close the connections of all shards of the group in this thread.

        An open transaction is lost, as with Django's close().
        """
        self.validate_thread_sharing()
        for wrapper in self.shards:
            wrapper.close()
        # Call the base class, because the close() of Django's SQLite backend does not close databases
        # in memory.
        BaseDatabaseWrapper.close(self._server)
        BaseDatabaseWrapper.close(self)

    def close_if_unusable_or_obsolete(self) -> None:
        if self.connection is not None and not self.autocommit:
            # Autocommit is off, because an atomic block is open, or because the user has called
            # set_autocommit(False). So a transaction may be open. Close the connection, and lose
            # the transaction, as Django does.
            self.close()
            return
        self.shards.close_obsolete()

    def is_in_memory_db(self) -> bool:
        # LiveServerTestCase calls this method to find the connections to in-memory databases,
        # because its threads have to share these. SQLite shards are files even in tests, so each
        # thread can have a connection of its own.
        return False

    # ##### SQL: refused #####

    def _cursor(self, name: str | None = None) -> NoReturn:
        raise group_alias_error(self.alias)

    def schema_editor(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise group_alias_error(self.alias, "change tables")

    def prepare_database(self) -> None:
        raise group_alias_error(self.alias, "be migrated")

    @contextmanager
    def _nodb_cursor(self) -> Iterator[Any]:
        with self.server.cursor() as cursor:
            yield cursor

    @property
    def mysql_server_data(self) -> Any:
        # Django's MySQL backend reads this attribute in its features. Other backends do not read
        # it.
        server: Any = self.server
        return server.mysql_server_data

    # ##### Constraints: checked on the shards that take part in the transaction #####

    def disable_constraint_checking(self) -> bool:
        return False

    def enable_constraint_checking(self) -> None:
        pass

    def check_constraints(self, table_names: Iterable[str] | None = None) -> None:
        for wrapper in list(self.participants.values()):
            wrapper.check_constraints(table_names)

    # ##### Tests #####

    @property
    def tests(self) -> Any:
        """The test databases of the group while tests run; None outside of test runs."""
        return test_databases.get(self.settings_dict["GROUP"])


def engine_of(settings_dict: dict[str, Any]) -> type[ShardConnectionMixin]:
    """Return the class of the connection objects of a group's shards. It is the ``DatabaseWrapper``
    of the backend that the group's nodes use.

    :param settings_dict: the settings of the group's alias.
    """
    return cast(
        "type[ShardConnectionMixin]", load_backend(settings_dict["NODE_ENGINE"]).DatabaseWrapper
    )
