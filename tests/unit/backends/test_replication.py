"""Positions of MariaDB's replication, as text."""

from __future__ import annotations

import pytest

from sharded_orm.backends.mysql.replication import missing, positions


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
        # Numbers, not text; whoever wrote the event.
        ("0-1-9", "0-2-10", ""),
        ("0-1-10", "0-1-9", "0-1-10"),
        # Each domain counts for itself; others of the replica do not matter.
        ("0-1-15,1-1-3", "0-1-15,1-1-2,5-5-5", "1-1-3"),
        ("0-1-15,1-1-3", "1-1-3", "0-1-15"),
    ],
)
def test_missing(wanted: str, have: str, expected: str) -> None:
    assert missing(wanted, have) == expected
