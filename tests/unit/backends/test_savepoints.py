"""Statements about savepoints wait for the next statement that the server must run."""

from __future__ import annotations

import pytest

from sharded_orm.backends.savepoints import SavepointStatement, defer, savepoint_statement


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        ('SAVEPOINT "s1_x1"', SavepointStatement.SAVEPOINT),
        ("ROLLBACK TO SAVEPOINT `s1_x1`", SavepointStatement.ROLLBACK_TO),
        ('RELEASE SAVEPOINT "s140_x12"', SavepointStatement.RELEASE),
        ("SAVEPOINT mine", None),
        ('SAVEPOINT "s1_x1"; DELETE FROM t', None),
        ("SELECT 1", None),
    ],
)
def test_django_s_own_savepoints_are_known(sql: str, what: SavepointStatement | None) -> None:
    assert savepoint_statement(sql) is what


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
