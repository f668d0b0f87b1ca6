"""Which session has written, and whether it is still there, as the cache asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction

from sharded_orm.backends.postgresql.base import DatabaseWrapper
from sharded_orm.backends.write_hooks.session_id import SessionID
from tests.integration.postgresql.conftest import Node


@pytest.fixture
def blind(node: Node) -> Iterator[Any]:
    """A connection whose role may not see when sessions began, not even its own."""
    node.ask("CREATE ROLE blind")
    node.ask("GRANT USAGE ON SCHEMA t_0 TO blind")
    options = {**node[0].settings_dict["OPTIONS"], "assume_role": "blind"}
    wrapper = DatabaseWrapper({**node[0].settings_dict, "OPTIONS": options}, "t_0")
    yield wrapper
    wrapper.close()
    node.ask("DROP OWNED BY blind")
    node.ask("DROP ROLE blind")


def test_a_session_is_there_until_it_ends(node: Node) -> None:
    with transaction.atomic(using="t_0"):
        node.run(0, "SELECT 1")
        writer = node[0].session_id()
        assert writer.connection
        assert node[1].judges(writer)
        assert node[1].sessions_gone([writer]) == set()
        node.ask(f"SELECT pg_terminate_backend({node.session_of(0)}, 10000)")
        assert node[1].sessions_gone([writer]) == {writer}
        node[0].close()


def test_a_role_that_sees_no_sessions_tells_nothing_of_them(node: Node, blind: Any) -> None:
    blind.set_autocommit(False)
    with blind.cursor() as cursor:
        cursor.execute("SELECT 1")
    assert blind.session_id() == SessionID()
    blind.rollback()
    blind.set_autocommit(True)
    with transaction.atomic(using="t_0"):
        node.run(0, "SELECT 1")
        writer = node[0].session_id()
        assert not blind.judges(writer)
        assert blind.sessions_gone([writer]) == set()
