"""The pause of writes in a report, also over several processes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from sharded_orm.operations.promotion.pause import Pause
from sharded_orm.operations.runs.journal import JournalRun


class Journal:
    def __init__(self, fenced_at: str | None, was_read_only: bool = False) -> None:
        self.arguments: dict[str, Any] = {
            "fenced_at": fenced_at, "was": {"old": was_read_only, "new": True}
        }  # fmt: skip


def pause(journal: Journal, earliest: str, latest: str) -> Pause | None:
    run = cast("JournalRun", journal)
    at = "2026-01-01T12:00:{}+00:00".format
    return Pause.of(run, earliest=at(earliest), latest=at(latest))


FENCED = Journal("2026-01-01T12:00:10+00:00")


@pytest.mark.parametrize(
    ("earliest", "latest", "text"),
    [
        ("12.050", "12.050", "2.05 s"),
        ("10.100", "14", "0.10 to 4.00 s"),
        # The clock of the database was set back.
        ("09", "09", "0.00 s"),
    ],
)
def test_a_pause(earliest: str, latest: str, text: str) -> None:
    assert str(pause(FENCED, earliest, latest)) == text


def test_one_that_began_before_the_promotion() -> None:
    found = pause(Journal("2026-01-01T12:00:10+00:00", was_read_only=True), "11", "11")
    assert str(found) == "1.00 s, and before the promotion"
    assert found is not None
    assert found.to_json() == {"refused_for": None, "refused_for_at_least": 1.0}


def test_nothing_was_fenced() -> None:
    assert pause(Journal(None), "11", "11") is None
