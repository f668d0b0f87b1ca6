"""Positions of MariaDB's replication as text, and the meaning of its errors."""

from __future__ import annotations

import pytest
from django.db import Error, InterfaceError, OperationalError

from sharded_orm.backends.mysql.gtids import missing, positions
from sharded_orm.backends.mysql.replication import MySQLReplicationServer

has_no_answer = MySQLReplicationServer.has_no_answer
why_no_session = MySQLReplicationServer.why_no_session


def test_positions() -> None:
    assert positions("") == {}
    assert positions("0-1-15, 7-2-9") == {0: (1, 15), 7: (2, 9)}


@pytest.mark.parametrize(
    ("wanted", "have", "expected"),
    [
        ("0-1-15", "0-1-15", ""),
        ("0-1-15", "0-1-14", "0-1-15"),
        ("0-1-15", "", "0-1-15"),
        ("", "0-1-15", ""),
        # Compared as numbers, not as text, whichever server wrote the event.
        ("0-1-9", "0-2-10", ""),
        ("0-1-10", "0-1-9", "0-1-10"),
        # Each domain counts by itself; other domains of the replica do not matter.
        ("0-1-15,1-1-3", "0-1-15,1-1-2,5-5-5", "1-1-3"),
        ("0-1-15,1-1-3", "1-1-3", "0-1-15"),
    ],
)
def test_missing(wanted: str, have: str, expected: str) -> None:
    assert missing(wanted, have) == expected


# ##### The meaning of an error for a server and for an account #####

WHO = "the OPERATOR account 'operator'"


@pytest.mark.parametrize("code", [2002, 2003, 2005, 2006, 2013])
def test_nobody_answers(code: int) -> None:
    exc = OperationalError(code, "Can't connect")
    assert has_no_answer(exc)
    assert why_no_session("db1", WHO, exc).startswith("node 'db1' does not answer: ")


@pytest.mark.parametrize("code", [1045, 1130, 1698, 1862, 2059, 4151])
def test_the_account_is_refused(code: int) -> None:
    exc = OperationalError(code, "Access denied")
    assert not has_no_answer(exc)
    assert why_no_session("db1", WHO, exc).startswith(f"node 'db1' refuses {WHO}: ")


@pytest.mark.parametrize(
    "exc", [OperationalError(1040, "Too many connections"), InterfaceError("odd"), Error()]
)
def test_nothing_else_is_taken_for_a_dead_server(exc: Error) -> None:
    """A server may be given up only if it is dead."""
    assert not has_no_answer(exc)
    assert f"gives {WHO} no session" in why_no_session("db1", WHO, exc)
