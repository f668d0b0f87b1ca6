"""The second connection of a thread: never shared with a parent, renewed when it is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from django.core.management import call_command
from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from sharded_orm.autonomous_connections import AutonomousConnections
from tests.queries.conftest import DATABASES

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


@pytest.fixture
def autonomous() -> Iterator[AutonomousConnections]:
    yield AutonomousConnections()
    AutonomousConnections.close_all()


def test_a_forked_child_has_connections_of_its_own(
    autonomous: AutonomousConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction.atomic(using="directory"):
        parents, _ = autonomous.get("directory")
        assert autonomous.get("directory").connection is parents
        parents.ensure_connection()
        monkeypatch.setattr(os, "getpid", lambda: -1)
        assert autonomous.get("directory").connection is not parents
        assert parents.connection is not None  # not closed: the session is the parent's
    # Unlike close() of Django's SQLite backend, also if the database is in memory.
    BaseDatabaseWrapper.close(parents)


def test_a_lost_connection_is_renewed(
    autonomous: AutonomousConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction.atomic(using="directory"):
        own, _ = autonomous.get("directory")
        own.ensure_connection()
        own.errors_occurred = True
        closed: list[bool] = []
        monkeypatch.setattr(own, "is_usable", lambda: False)
        monkeypatch.setattr(own, "close", lambda: closed.append(True))
        autonomous.get("directory")
        assert closed


def test_a_second_connection_ends_with_its_test(autonomous: AutonomousConnections) -> None:
    """PostgreSQL drops no database to which there is a connection."""
    with transaction.atomic(using="directory"):
        own, _ = autonomous.get("directory")
        own.ensure_connection()
    # As Django's test cases do for each alias.
    call_command("flush", database="photos", interactive=False, verbosity=0)
    assert own.connection is None
