"""Measure how long a promotion refused writes, even if several processes have executed it.

The times are in the journal, by the clock of the global database. So the clocks of the operators'
hosts need not agree, even if a promotion is resumed on another host. The result is wrong only if
somebody changes the database's clock during the promotion.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from sharded_orm.operations.runs.journal import JournalRun


@dataclass(frozen=True)
class Pause:
    """The time for which a promotion refused writes, in seconds.

    The pause begins when the old primary is fenced. It ends when the new map (the topology
    document) is published and the new primary takes writes, or when the promotion is undone.
    Processes learn of the new map a little later, which is not included.

    :param least: the shortest time that is possible.
    :param most: the longest time that is possible. None if the old primary was fenced before the
        promotion already, for an unknown time.
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
        """Return the pause of the promotion ``run``: the time for which it refused writes.

        Return None if the promotion has fenced no server (made none refuse writes).

        :param earliest: the earliest moment at which the pause may have ended, in ISO format.
        :param latest: the latest such moment.
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


#: The values that a report shows instead of :meth:`Pause.to_json` if the promotion has fenced no
#: server (made none refuse writes).
UNKNOWN = {"refused_for": None, "refused_for_at_least": None}


def moment(run: JournalRun) -> str:
    """Return the present time by the global database's clock, in ISO format as in the journal."""
    return run.now().isoformat()


def _seconds(since: str, until: str) -> float:
    elapsed = datetime.fromisoformat(until) - datetime.fromisoformat(since)
    # Never return a negative number, even if the clock was set back between the two times.
    return max(elapsed.total_seconds(), 0.0)
