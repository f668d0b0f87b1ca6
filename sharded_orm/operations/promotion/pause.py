"""For how long writes were refused, over all processes that have worked on a promotion.

The moments are in the journal, by the clock of the global database: those of the operators' hosts
need not agree, and a promotion that is resumed elsewhere is measured as one. They are wrong as far as
that clock is set in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from sharded_orm.operations.runs.journal import JournalRun


@dataclass(frozen=True)
class Pause:
    """Seconds from the fence until the map was switched; its writers learn of that after it.

    :param least: it lasted so long at least.
    :param most: and at most; None if writes were refused before the promotion, which cannot tell
        since when.
    """

    least: float
    most: float | None

    def __str__(self) -> str:
        least = f"{self.least:.2f}"
        if self.most is None:
            return f"{least} s, and before the promotion"
        most = f"{self.most:.2f}"
        return f"{least} s" if least == most else f"{least} to {most} s"

    @classmethod
    def of(cls, run: JournalRun, *, earliest: str, latest: str) -> Self | None:
        """The pause that ended between two moments; None if the promotion has fenced nothing."""
        began = run.arguments.get("fenced_at")
        if began is None:
            return None
        most = None if run.arguments["was"]["old"] else _seconds(began, latest)
        return cls(_seconds(began, earliest), most)

    def to_json(self) -> dict[str, Any]:
        return {
            "refused_for": None if self.most is None else round(self.most, 3),
            "refused_for_at_least": round(self.least, 3),
        }


#: Of a promotion that has fenced nothing.
UNKNOWN = {"refused_for": None, "refused_for_at_least": None}


def moment(run: JournalRun) -> str:
    """Now, as the journal keeps it."""
    return run.now().isoformat()


def _seconds(since: str, until: str) -> float:
    elapsed = datetime.fromisoformat(until) - datetime.fromisoformat(since)
    # The clock may have been set back.
    return max(elapsed.total_seconds(), 0.0)
