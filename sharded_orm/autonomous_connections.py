"""Connections for autonomous statements, which are committed independently of the caller's transaction.

For example, the directory (the table of keys and their shards) uses such a connection to record the
shard of a new key. The record must survive a rollback of the caller's transaction, and must not
wait for the commit.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple
from weakref import WeakSet

from django.core.signals import request_finished, request_started
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from sharded_orm.forks import identity

# Connections that a fork copied into this process. They are kept because finalising them would write to
# the parent's sessions.
_connections_of_parents: list[dict[str, BaseDatabaseWrapper]] = []


class Autonomous(NamedTuple):
    """A connection for autonomous statements, which must not depend on the caller's transaction.

    ``commits`` is True if each statement on the connection is committed at once. It is False inside
    Django's ``TestCase``.
    """

    connection: BaseDatabaseWrapper
    commits: bool


def is_in_test_case(alias: str) -> bool:
    """Whether statements on ``alias`` are a part of the transaction of Django's ``TestCase``. Costs
    no query.
    """
    connection: Any = connections[alias]
    return any(block._from_testcase for block in connection.atomic_blocks)


class AutonomousConnections:
    """Connections in autocommit mode, at most one per thread and alias.

    Outside a transaction, this is Django's connection for the alias. Inside a transaction, it is a
    second connection, so that a rollback does not undo its statements. The second connection is
    closed by Django's rules (``CONN_MAX_AGE``).

    Inside Django's ``TestCase`` there is no second connection, because it would wait for the locks
    of the test and leave rows behind.
    """

    _instances: WeakSet[AutonomousConnections] = WeakSet()

    def __init__(self) -> None:
        self._instances.add(self)
        self._own = threading.local()
        request_started.connect(self._close_obsolete)
        request_finished.connect(self._close_obsolete)

    def get(self, alias: str) -> Autonomous:
        """Return the connection for one autonomous statement of this thread on ``alias``.

        A later statement may need another connection, so call this method before each statement.
        """
        shared: Any = connections[alias]
        if not shared.in_atomic_block and shared.get_autocommit():
            return Autonomous(shared, True)
        if is_in_test_case(alias):
            return Autonomous(shared, False)
        own = self._of_thread()
        connection = own.get(alias)
        if connection is not None and connection.errors_occurred:
            # An error has occurred on the connection. If it is broken, close it here: Django's
            # close_old_connections() does not know it, and in a process without requests nothing
            # else would close it.
            connection.close_if_unusable_or_obsolete()
        if connection is None:
            connection = own[alias] = connections.create_connection(alias)
        return Autonomous(connection, True)

    @classmethod
    def close_all(cls) -> None:
        """Close the second connections of this thread.

        At its next use, such a connection connects to the database that the settings name at that
        time. Test runs with shards call this method when they change the names of databases, and
        when they flush a group.
        """
        for instance in list(cls._instances):
            for connection in instance._of_thread().values():
                connection.close()
                # Call the method of the base class, because the close() of Django's SQLite backend
                # does not close databases in memory.
                BaseDatabaseWrapper.close(connection)

    def _of_thread(self) -> dict[str, BaseDatabaseWrapper]:
        state = self._own.__dict__
        if state.get("process") != identity():
            if "connections" in state:
                # Keep the connections that a fork has copied. Using, closing or finalising them would
                # write to the parent's sessions.
                _connections_of_parents.append(state["connections"])
            state["connections"], state["process"] = {}, identity()
        own: dict[str, BaseDatabaseWrapper] = state["connections"]
        return own

    def _close_obsolete(self, **kwargs: Any) -> None:
        for connection in self._of_thread().values():
            connection.close_if_unusable_or_obsolete()
