"""Tells whether a database connection may read from the cache now, and store results in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sharded_orm.backends.features import features_of
from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.models.cached.cached_instances import InstanceFactory
from sharded_orm.models.cached.lookup_plan import LookupPlan


class ConnectionState:
    """Says whether a database connection may use the cache now.

    It also keeps the :class:`InstanceFactory` of each model on this connection, and implements
    :class:`~sharded_orm.cache.repair.Sessions`, by which the cache finds out whether the database
    session of a writer has ended. Only the connection's thread may use the object.
    """

    def __init__(self, connection: ShardConnectionMixin) -> None:
        self._connection: Any = connection
        self._factories: dict[Any, InstanceFactory] = {}
        options = connection.settings_dict.get("OPTIONS") or {}
        # The isolation level of transactions; None on SQLite, whose transactions are always
        # serializable.
        features = features_of(connection)
        self._isolation = features.isolation_level(options)
        self._may_read_uncommitted = self._isolation == "read uncommitted" or (
            self._isolation == "unknown" and features.has_read_uncommitted
        )

    def may_fill(self) -> bool | None:
        """Return how the connection may use the cache at this moment.

        :returns: True: it may read from the cache, and store what it reads from the database.
            False: it may only read from the cache. None: it must not use the cache.
        """
        if self._may_read_uncommitted:
            return None  # The connection may read rows that are rolled back later.
        connection = self._connection
        group = connection.group_wrapper
        if connection.connection is None:
            in_transaction = not connection.settings_dict["AUTOCOMMIT"]
        else:
            in_transaction = connection._in_atomic_block or not connection.autocommit
        if not in_transaction and not (group is not None and group.levels):
            return True
        if connection.wrote or connection.needs_rollback or self._isolation != "read committed":
            # The transaction must not use the cache, for one of three reasons. It has written rows,
            # and must read them, but the cache does not have uncommitted rows. Or an error forces
            # it to roll back. Or its isolation level lets it read only rows that were committed
            # before it began, but the cache may have later ones.
            return None
        # Under READ COMMITTED, each statement reads what is committed when it begins. So what a
        # transaction reads before its first write may be stored in the cache, as in autocommit
        # mode.
        return bool(connection.reads_as_autocommit())

    def factory(self, plan: LookupPlan) -> InstanceFactory:
        factory = self._factories.get(plan)
        if factory is None:
            factory = self._factories[plan] = InstanceFactory(plan, self._connection)
        return factory

    def judges(self, writer: Any) -> bool:
        return bool(self._connection.judges(writer))

    def gone(self, writers: Sequence[Any]) -> set[Any]:
        return set(self._connection.sessions_gone(writers))


def connection_state(connection: Any) -> ConnectionState | None:
    """Return the :class:`ConnectionState` of a connection of this thread.

    Return None if the connection's backend is not one of this library. Such a backend does not
    announce its writes to the cache before they are committed, so its reads must not use the cache.
    """
    state: ConnectionState | None = connection.__dict__.get("_for_cache")
    if state is None and isinstance(connection, ShardConnectionMixin):
        # Keep the ConnectionState on its connection object, the only one that it can be used for.
        state = connection.__dict__["_for_cache"] = ConnectionState(connection)
    return state


class ConnectionUse(NamedTuple):
    """How a connection may use the cache for the rows of one model.

    :param factory: makes instances from cached rows.
    :param fill: whether a result from the database may be stored in the cache.
    """

    alias: str
    state: ConnectionState
    factory: InstanceFactory
    fill: bool


def connection_use(plan: LookupPlan, connection: Any) -> ConnectionUse | None:
    """Return how a connection of this thread may use the cache now; None if it must not."""
    state = connection_state(connection)
    fill = None if state is None else state.may_fill()
    if state is None or fill is None:
        return None
    # tuple.__new__() makes a ConnectionUse in half the time of its constructor.
    return tuple.__new__(ConnectionUse, (connection.alias, state, state.factory(plan), fill))
