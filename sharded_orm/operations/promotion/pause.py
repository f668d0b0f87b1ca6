"""Measure for how long a promotion refused writes.

One process may begin a promotion and another one, on another host, may finish it. So the times are
taken from the clock of the global database, and stored in the journal. The result is wrong only if
somebody changes the clock of this database during the promotion.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from sharded_orm.operations.runs.journal import JournalRun


@dataclass(frozen=True)
class Pause:
    """The time for which a promotion refused writes, in seconds.

    The pause begins when the old primary is made to refuse writes. It ends when the new topology
    document is published and the new primary takes writes, or when the promotion is undone. It does
    not include the short time until each process has read the new document.

    The exact time is not always known: a killed process may not have recorded the end.

    :param least: the pause was at least so long.
    :param most: the pause was at most so long. None if the old primary refused writes already
        before the promotion, for an unknown time.
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
        """Return for how long the promotion ``run`` refused writes; None if it has refused none.

        :param earliest: the earliest moment at which the pause may have ended, in ISO format.
        :param latest: the latest moment at which the pause may have ended, in ISO format.
        """
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


#: The values in a report for a promotion that has made no server refuse writes, so that there is no
#: pause. They take the place of :meth:`Pause.to_json`.
UNKNOWN = {"refused_for": None, "refused_for_at_least": None}


def moment(run: JournalRun) -> str:
    """Return the time now, as text in ISO format, from the clock of the global database."""
    return run.now().isoformat()


def _seconds(since: str, until: str) -> float:
    elapsed = datetime.fromisoformat(until) - datetime.fromisoformat(since)
    # Never return a negative number, even if the clock was set back between the two times.
    return max(elapsed.total_seconds(), 0.0)
