"""Autonomous statements: committed on their own, whatever the caller's transaction does.

Placements and ids must outlive a rollback of the caller and must not wait for its end.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from django.core.signals import request_finished, request_started
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper


class Autonomous(NamedTuple):
    """A connection, and whether what it writes is committed with each statement."""

    connection: BaseDatabaseWrapper
    commits: bool


class AutonomousConnections:
    """Connections in autocommit, for each thread its own; closed as Django closes its own.

    The thread's connection of the alias serves while it stands in autocommit. Inside a
    transaction a second one beside it does, which the transaction cannot roll back. Only
    inside Django's ``TestCase`` does the caller's connection serve all the same, and does
    not commit: the test leaves nothing behind, and cannot wait for its own locks.
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
        # A test database is another one under the same alias.
        if connection is None or connection.settings_dict["NAME"] != shared.settings_dict["NAME"]:
            connection = own[alias] = connections.create_connection(alias)
        return Autonomous(connection, True)

    def _of_thread(self) -> dict[str, BaseDatabaseWrapper]:
        own: dict[str, BaseDatabaseWrapper] = self._own.__dict__.setdefault("connections", {})
        return own

    def _close_obsolete(self, **kwargs: Any) -> None:
        for connection in self._of_thread().values():
            connection.close_if_unusable_or_obsolete()
