"""Connections for statements that are committed at once, whatever becomes of the caller's
transaction.

For example, the directory (the table that maps each shard key to its shard) records the shard of a
new key on such a connection. The record must survive a rollback of the caller's transaction. And
other processes must see it before the caller commits.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple
from weakref import WeakSet

from django.core.signals import request_finished, request_started
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from sharded_orm.forks import identity

# The connections that a forked process has inherited from its parents. They are kept here, because
# the garbage collector would otherwise finalize them, and so write to sessions that the parents
# still use.
_connections_of_parents: list[dict[str, BaseDatabaseWrapper]] = []


class Autonomous(NamedTuple):
    """A connection for a statement that must not depend on the caller's transaction.

    ``commits`` is True if each statement on the connection is committed at once. It is False inside
    Django's ``TestCase``. There, ``connection`` is the test's connection, and its transaction is
    rolled back after the test.
    """

    connection: BaseDatabaseWrapper
    commits: bool


def is_in_test_case(alias: str) -> bool:
    """Whether Django's ``TestCase`` has opened a transaction on ``alias``, so that all statements
    there are rolled back after the test. Costs no query.
    """
    connection: Any = connections[alias]
    return any(block._from_testcase for block in connection.atomic_blocks)


class AutonomousConnections:
    """Gives out connections in autocommit mode: at most one per thread and alias.

    Outside a transaction, it gives out Django's connection for the alias. Inside a transaction, it
    gives out a second connection, so that a rollback does not undo the statement. The second
    connection is closed by Django's rules (``CONN_MAX_AGE``).

    Inside Django's ``TestCase``, it opens no second connection. Such a connection would wait for
    the locks of the test, and leave rows behind after the test.
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
            # An earlier statement on this connection has failed, so the connection may be broken.
            # If it is, close it here, because Django's close_old_connections() does not know it. In
            # a process without requests, nothing else would close it.
            connection.close_if_unusable_or_obsolete()
        if connection is None:
            connection = own[alias] = connections.create_connection(alias)
        return Autonomous(connection, True)

    @classmethod
    def close_all(cls) -> None:
        """Close the second connections of this thread.

        Such a connection connects again when it is next used. It then connects to the database that
        the settings name at that time. Test runs with shards call this method after they have
        changed the names of databases, and when they flush a group.
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
                # This process was forked. Keep the connections of its parent, but do not use them.
                # Using, closing or finalizing them would write to the parent's sessions.
                _connections_of_parents.append(state["connections"])
            state["connections"], state["process"] = {}, identity()
        own: dict[str, BaseDatabaseWrapper] = state["connections"]
        return own

    def _close_obsolete(self, **kwargs: Any) -> None:
        for connection in self._of_thread().values():
            connection.close_if_unusable_or_obsolete()
