"""Statements about savepoints wait for the next statement that the server must run."""

from __future__ import annotations

import pytest

from sharded_orm.backends import savepoints
from sharded_orm.backends.savepoints import SavepointAction, SavepointStatement, parse_savepoint


@pytest.mark.parametrize(
    ("sql", "action", "name"),
    [
        ('SAVEPOINT "s1_x1"', SavepointAction.SAVEPOINT, '"s1_x1"'),
        ("ROLLBACK TO SAVEPOINT `s1_x1`", SavepointAction.ROLLBACK_TO, "`s1_x1`"),
        ('RELEASE SAVEPOINT "s140_x12"', SavepointAction.RELEASE, '"s140_x12"'),
    ],
)
def test_django_s_own_savepoints_are_known(sql: str, action: SavepointAction, name: str) -> None:
    assert parse_savepoint(sql) == SavepointStatement(action, name)


@pytest.mark.parametrize(
    "sql", ["SAVEPOINT mine", 'SAVEPOINT "s1_x1"; DELETE FROM t', "SELECT 1", ""]
)
def test_other_statements_are_none_of_django_s_savepoints(sql: str) -> None:
    assert parse_savepoint(sql) is None


def defer(sql: str, pending: list[bytes], existing: list[str], *, may_release: bool) -> bool:
    statement = parse_savepoint(sql)
    assert statement is not None
    return savepoints.defer(statement, pending, existing, may_release=may_release)


def test_a_savepoint_without_statements_is_never_sent() -> None:
    pending: list[bytes] = []
    assert defer('SAVEPOINT "s1_x1"', pending, [], may_release=False)
    assert defer('RELEASE SAVEPOINT "s1_x1"', pending, [], may_release=False)
    assert pending == []


def test_rolling_back_to_a_savepoint_that_was_not_sent_keeps_it() -> None:
    pending: list[bytes] = []
    existing: list[str] = []
    for name in ("s1_x1", "s1_x2"):
        assert defer(f'SAVEPOINT "{name}"', pending, existing, may_release=False)
    assert defer('ROLLBACK TO SAVEPOINT "s1_x1"', pending, existing, may_release=False)
    assert pending == [b'SAVEPOINT "s1_x1"']


def test_a_release_waits_only_if_it_cannot_fail() -> None:
    pending: list[bytes] = []
    assert not defer('RELEASE SAVEPOINT "s1_x1"', pending, ['"s1_x1"'], may_release=False)
    existing = ['"s1_x1"', '"s1_x2"', '"s1_x3"']
    assert defer('RELEASE SAVEPOINT "s1_x2"', pending, existing, may_release=True)
    assert pending == [b'RELEASE SAVEPOINT "s1_x2"']
    for ended in ("s1_x2", "s1_x3"):
        assert not defer(f'RELEASE SAVEPOINT "{ended}"', pending, existing, may_release=True)
    assert defer('RELEASE SAVEPOINT "s1_x1"', pending, existing, may_release=True)
    assert existing == []


def test_rolling_back_to_a_savepoint_of_the_server_is_sent_at_once() -> None:
    existing = ['"s1_x1"', '"s1_x2"']
    assert not defer('ROLLBACK TO SAVEPOINT "s1_x1"', [], existing, may_release=True)
    assert existing == ['"s1_x1"']
