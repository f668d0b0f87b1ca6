"""How long a promotion refused writes, over all processes that have worked on it.

The journal has the times, by the clock of the global database. So the clocks of the operators'
hosts need not agree, and a promotion that is resumed on another host is measured as one. The result
is wrong only if that clock is set in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from sharded_orm.operations.runs.journal import JournalRun


@dataclass(frozen=True)
class Pause:
    """Seconds from the fence until the map was switched. Writers learn of the new map after that.

    :param least: the shortest possible length.
    :param most: the longest possible length; None if writes were refused before the promotion
        already, since an unknown time.
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


#: The JSON of a promotion that has fenced nothing.
UNKNOWN = {"refused_for": None, "refused_for_at_least": None}


def moment(run: JournalRun) -> str:
    """The present time, as the journal stores it."""
    return run.now().isoformat()


def _seconds(since: str, until: str) -> float:
    elapsed = datetime.fromisoformat(until) - datetime.fromisoformat(since)
    # The clock may have been set back.
    return max(elapsed.total_seconds(), 0.0)
