"""The connection object of an alias that stands for a whole shard group, such as ``photos``.

Django iterates over the aliases of groups, not over those of shards. So what Django does to every
connection reaches the shards through their group, at a cost that does not depend on the number of
shards: closing, clearing query logs, ``ATOMIC_REQUESTS``, transactions and blocked connections of
test cases, test databases.
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
from sharded_orm.backends.group.registry import ShardRegistry
from sharded_orm.backends.group.test_databases import test_databases
from sharded_orm.backends.group.transactions import GroupTransactions
from sharded_orm.backends.query_log import GroupQueryLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_DEFAULT_IDLE_ALIASES = 1024


class GroupAliasMixin(GroupTransactions):
    """First base of a group's connection object, before the engine of the group's nodes.

    The object never runs SQL. Its ``vendor``, ``features``, ``ops`` and checks are those of the
    engine. If they need a server, they ask one node.
    """

    # Inside ensure_connection(). Django's test cases replace ``connect`` to forbid an alias, see
    # ShardConnectionMixin._cursor().
    _connecting = False
    _connection: GroupConnection | None = None

    def __init__(self, settings_dict: dict[str, Any], alias: str = DEFAULT_DB_ALIAS) -> None:
        self.init_transactions()
        engine = engine_of(settings_dict)
        limit: int | None = settings_dict.get("MAX_IDLE_ALIASES", _DEFAULT_IDLE_ALIASES)
        bound = features_of(engine).max_idle_aliases
        if bound is not None and limit is not None:
            limit = min(limit, bound)
        # Tests patch connection objects and capture their queries, so none is evicted.
        self.shards = ShardRegistry(None if settings_dict["GROUP"] in test_databases else limit)
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
        """A connection object of one node, outside of any shard, for questions about servers.

        It connects at its first query.
        """
        if self._seen_generation != relocation.generation:
            self._refresh_server()
        return self._server

    def _refresh_server(self) -> None:
        """Connect to another node if the topology has changed so."""
        generation = relocation.generation
        settings: dict[str, Any] | None = connections.settings.get(self.alias)
        if settings is not None and not relocation.same_place(self.settings_dict, settings):
            BaseDatabaseWrapper.close(self._server)
            self.settings_dict = settings
            self._build_server()
        self._seen_generation = generation

    # ##### Connecting: no session belongs to a group #####

    @property
    def connection(self) -> GroupConnection | None:
        return self._connection

    @connection.setter
    def connection(self, value: GroupConnection | None) -> None:
        self._connection = value
        if value is None and self.levels:
            # Closed inside a transaction, whose outermost block has just ended.
            self.abandon_levels()

    def connect(self) -> None:
        """Count as connected. Cheap: every statement of every shard comes here."""
        if self._seen_generation != relocation.generation:
            self._refresh_server()
        if self._connection is not None:
            return
        if not self._connecting:
            # Test cases patch this method to forbid connections in other threads.
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
        # Not AUTOCOMMIT of the settings: that is about the connections of a node.
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
        """Close the shards of this thread; inside a transaction, as Django's close() does."""
        self.validate_thread_sharing()
        for wrapper in self.shards:
            wrapper.close()
        # Not the engine's close(): SQLite's keeps databases in memory open.
        BaseDatabaseWrapper.close(self._server)
        BaseDatabaseWrapper.close(self)

    def close_if_unusable_or_obsolete(self) -> None:
        if self.connection is not None and not self.autocommit:
            # As Django: a transaction that was left open is lost.
            self.close()
            return
        self.shards.close_obsolete()

    def is_in_memory_db(self) -> bool:
        # LiveServerTestCase shares such connections between threads. Shards in tests are files,
        # which each thread opens itself.
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
        server: Any = self.server  # Only Django's features of MySQL ask for this.
        return server.mysql_server_data

    # ##### Constraints: those of the shards in the transaction #####

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
        """The test databases of the group while tests run, else None."""
        return test_databases.get(self.settings_dict["GROUP"])


def engine_of(settings_dict: dict[str, Any]) -> type[ShardConnectionMixin]:
    """Return the class of the connection objects of a group's shards."""
    return cast(
        "type[ShardConnectionMixin]", load_backend(settings_dict["NODE_ENGINE"]).DatabaseWrapper
    )
