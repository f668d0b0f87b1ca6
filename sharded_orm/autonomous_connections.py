"""Autonomous statements, which are committed independently of the caller's transaction.

For placements of keys: they must survive a rollback of the caller, and must not wait for its
commit.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from django.core.signals import request_finished, request_started
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from sharded_orm.forks import identity

# Connections that a fork copied into this process, kept so that nothing finalises them.
_connections_of_parents: list[dict[str, BaseDatabaseWrapper]] = []


class Autonomous(NamedTuple):
    """A connection, and whether each of its statements is committed at once."""

    connection: BaseDatabaseWrapper
    commits: bool


class AutonomousConnections:
    """Connections in autocommit, one per thread and alias; closed when Django closes its own.

    The thread's own connection of the alias is used while it is in autocommit. Inside a
    transaction a second connection is used, which the transaction cannot roll back. Inside Django's
    ``TestCase`` the caller's connection is used nevertheless, and does not commit: the test
    leaves nothing behind, and cannot wait for its own locks.
    """

    def __init__(self) -> None:
        self._own = threading.local()
        request_started.connect(self._close_obsolete)
        request_finished.connect(self._close_obsolete)

    def get(self, alias: str) -> Autonomous:
        """The connection to use now, in this thread, for statements on ``alias``."""
        shared: Any = connections[alias]
        if not shared.in_atomic_block and shared.get_autocommit():
            return Autonomous(shared, True)
        if any(block._from_testcase for block in shared.atomic_blocks):
            return Autonomous(shared, False)
        own = self._of_thread()
        connection = own.get(alias)
        if connection is not None and connection.errors_occurred:
            # close_old_connections() of a worker does not reach this connection.
            connection.close_if_unusable_or_obsolete()
        # A test run changes the database of an alias. The connection of a shard follows its shard
        # without help.
        if connection is None or (
            "SHARD" not in shared.settings_dict
            and connection.settings_dict["NAME"] != shared.settings_dict["NAME"]
        ):
            connection = own[alias] = connections.create_connection(alias)
        return Autonomous(connection, True)

    def _of_thread(self) -> dict[str, BaseDatabaseWrapper]:
        state = self._own.__dict__
        if state.get("process") != identity():
            if "connections" in state:
                # Using, closing or finalising the parent's sessions here would write to its
                # connections.
                _connections_of_parents.append(state["connections"])
            state["connections"], state["process"] = {}, identity()
        own: dict[str, BaseDatabaseWrapper] = state["connections"]
        return own

    def _close_obsolete(self, **kwargs: Any) -> None:
        for connection in self._of_thread().values():
            connection.close_if_unusable_or_obsolete()
