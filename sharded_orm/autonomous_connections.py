"""Connections for autonomous statements: these are committed independently of the caller's transaction.

The directory uses them to record on which shard a new key is. The record must survive a rollback of
the caller's transaction, and must not wait for its commit.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from django.core.signals import request_finished, request_started
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from sharded_orm.forks import identity

# Connections that a fork copied into this process. They are kept because finalising them would write to
# the parent's sessions.
_connections_of_parents: list[dict[str, BaseDatabaseWrapper]] = []


class Autonomous(NamedTuple):
    """A connection, and whether each statement on it is committed at once."""

    connection: BaseDatabaseWrapper
    commits: bool


class AutonomousConnections:
    """Connections in autocommit mode, at most one per thread and alias.

    Django's connection for the alias is used while it is in autocommit mode. Inside a transaction, a
    second connection is used, which the transaction cannot roll back. The second connection is closed
    by the rules for Django's own (``CONN_MAX_AGE``), before and after a request. Inside Django's
    ``TestCase`` there is no second connection: Django's connection is used and does not commit, so that
    the test leaves nothing behind and does not wait for its own locks.
    """

    def __init__(self) -> None:
        self._own = threading.local()
        request_started.connect(self._close_obsolete)
        request_finished.connect(self._close_obsolete)

    def get(self, alias: str) -> Autonomous:
        """Return the connection to use now, in this thread, for an autonomous statement on ``alias``."""
        shared: Any = connections[alias]
        if not shared.in_atomic_block and shared.get_autocommit():
            return Autonomous(shared, True)
        if any(block._from_testcase for block in shared.atomic_blocks):
            return Autonomous(shared, False)
        own = self._of_thread()
        connection = own.get(alias)
        if connection is not None and connection.errors_occurred:
            # Check the connection here: a worker without requests calls close_old_connections(), which
            # does not know this connection.
            connection.close_if_unusable_or_obsolete()
        # A test run changes the database NAME of an alias; then a new connection is needed. A shard's
        # connection needs no check: it follows its shard.
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
                # After a fork. Using, closing or finalising these connections would write to the
                # parent's sessions.
                _connections_of_parents.append(state["connections"])
            state["connections"], state["process"] = {}, identity()
        own: dict[str, BaseDatabaseWrapper] = state["connections"]
        return own

    def _close_obsolete(self, **kwargs: Any) -> None:
        for connection in self._of_thread().values():
            connection.close_if_unusable_or_obsolete()
