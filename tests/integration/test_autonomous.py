"""The second connection of a thread: never shared with a parent, renewed when it is lost."""

from __future__ import annotations

import os

import pytest
from django.db import transaction

from sharded_orm.autonomous_connections import AutonomousConnections

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=["directory"], transaction=True),
]


def test_a_forked_child_has_connections_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = AutonomousConnections()
    with transaction.atomic(using="directory"):
        parents, _ = connections.get("directory")
        assert connections.get("directory").connection is parents
        parents.ensure_connection()
        monkeypatch.setattr(os, "getpid", lambda: -1)
        assert connections.get("directory").connection is not parents
        assert parents.connection is not None  # not closed: the session is the parent's
    parents.close()


def test_a_lost_connection_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    connections = AutonomousConnections()
    with transaction.atomic(using="directory"):
        own, _ = connections.get("directory")
        own.ensure_connection()
        own.errors_occurred = True
        closed: list[bool] = []
        monkeypatch.setattr(own, "is_usable", lambda: False)
        monkeypatch.setattr(own, "close", lambda: closed.append(True))
        connections.get("directory")
        assert closed
