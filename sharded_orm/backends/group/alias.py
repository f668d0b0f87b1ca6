"""The alias that stands for a whole shard group in a thread, e.g. ``photos``.

It is one of the aliases that Django iterates over, so whatever Django does to every
connection reaches the shards through it, at a cost that does not depend on how many
shards there are: closing, clearing query logs, ``ATOMIC_REQUESTS``, the transactions
and the blocking of test cases, test databases.
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
from sharded_orm.backends.group.registry import ShardRegistry
from sharded_orm.backends.group.test_databases import test_databases
from sharded_orm.backends.group.transactions import GroupTransactions
from sharded_orm.backends.group.unsupported import GroupConnection, group_alias_error
from sharded_orm.backends.query_log import GroupQueryLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_DEFAULT_IDLE_ALIASES = 1024


class GroupAliasMixin(GroupTransactions):
    """The connection object of a group alias; combined with the nodes' engine.

    It never runs SQL. ``vendor``, ``features``, ``ops`` and checks are those of the
    engine of the group's nodes; what they have to ask a server, they ask one node.
    """

    # Django's test cases replace ``connect`` to forbid an alias, see ShardConnectionMixin.
    _connecting = False
    _connection: GroupConnection | None = None

    def __init__(self, settings_dict: dict[str, Any], alias: str = DEFAULT_DB_ALIAS) -> None:
        self.init_transactions()
        engine = engine_of(settings_dict)
        limit: int | None = settings_dict.get("MAX_IDLE_ALIASES", _DEFAULT_IDLE_ALIASES)
        bound = features_of(engine).max_idle_aliases
        if bound is not None and limit is not None:
            limit = min(limit, bound)
        # Evicting a wrapper that a test has patched or captures queries of would break
        # the test.
        self.shards = ShardRegistry(None if settings_dict["GROUP"] in test_databases else limit)
        super().__init__(settings_dict, alias)
        self.queries_log = GroupQueryLog(self.queries_limit)
        self._seen = settings_dict.get("GENERATION", relocation.generation)
        self._make_server()

    def _make_server(self) -> None:
        engine = engine_of(self.settings_dict)
        self._server: BaseDatabaseWrapper = engine(
            engine.server_settings(self.settings_dict), self.alias
        )
        self.features = self._server.features
        self.validation = self._server.validation

    @property
    def server(self) -> BaseDatabaseWrapper:
        """A connection to one node, outside of any shard: what has to be known about servers.

        It connects when it is asked something.
        """
        if self._seen != relocation.generation:
            self._look_up()
        return self._server

    def _look_up(self) -> None:
        """The topology has changed: the node that is asked may be another one."""
        seen = relocation.generation
        settings: dict[str, Any] | None = connections.settings.get(self.alias)
        if settings is not None and not relocation.same_place(self.settings_dict, settings):
            BaseDatabaseWrapper.close(self._server)
            self.settings_dict = settings
            self._make_server()
        self._seen = seen

    # ##### Connecting: there is nothing to connect to #####

    @property
    def connection(self) -> GroupConnection | None:
        return self._connection

    @connection.setter
    def connection(self, value: GroupConnection | None) -> None:
        self._connection = value
        if value is None and self.levels:
            # Closed inside a transaction; its outermost block has just ended.
            self.abandon_levels()

    def connect(self) -> None:
        """Count as connected. Every statement of every shard comes here: it is cheap."""
        if self._seen != relocation.generation:
            self._look_up()
        if self._connection is not None:
            return
        if not self._connecting:
            # What test cases patch to forbid connections in other threads.
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
        # AUTOCOMMIT of a node is about its connections; the group has none.
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
        """Close the shards of this thread. Inside a transaction, as Django's close does."""
        self.validate_thread_sharing()
        for wrapper in self.shards:
            wrapper.close()
        # Not the engine's close: SQLite keeps databases in memory open.
        BaseDatabaseWrapper.close(self._server)
        BaseDatabaseWrapper.close(self)

    def close_if_unusable_or_obsolete(self) -> None:
        if self.connection is not None and not self.autocommit:
            # As Django: whoever left a transaction open loses it.
            self.close()
            return
        self.shards.close_obsolete()

    def is_in_memory_db(self) -> bool:
        # LiveServerTestCase shares such connections between threads; shards in tests are
        # files, which each thread opens for itself.
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
        server: Any = self.server  # On MySQL only, where Django's features ask for it.
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
        """The test shards of the group while tests run, else None."""
        return test_databases.get(self.settings_dict["GROUP"])


def engine_of(settings_dict: dict[str, Any]) -> type[ShardConnectionMixin]:
    """The class of the connection objects of the group's shards."""
    return cast(
        "type[ShardConnectionMixin]", load_backend(settings_dict["NODE_ENGINE"]).DatabaseWrapper
    )
