"""The options and the report of a move of shards to another node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

Tell = Callable[[str], None]


@dataclass(frozen=True)
class ShardMoveOptions:
    """The options of a move of shards.

    :param patience: the number of seconds for which the mover tries to switch a shard that is in
        use by transactions, before it gives up. If shards move by replication, the replica may be
        this many seconds behind.
    :param rate: the largest number of rows per second that are copied; None for no limit.
    :param keep: the time for which the old node keeps the tables, which are renamed, after the
        move.
    """

    patience: float = 60.0
    rate: int | None = None
    keep: timedelta = timedelta(days=1)


@dataclass
class ShardMoveReport:
    """The outcome of :func:`~sharded_orm.operations.shard_moves.runner.move_shards`.

    :param run: the id of the run in the journal.
    :param moved: for the number of each moved shard, the node on which the shard is now.
    :param already: the numbers of shards that were on the node before.
    :param failures: for the number of each shard that was not moved, the reason. The shard is where
        it was.
    :param notes: further sentences for the operator.
    :param rows: number of rows that were copied.
    :param copying: the number of seconds that copying took, until few changes were left.
    :param comparing: the number of seconds that the first comparison of all rows took.
    :param pauses: for the number of each moved shard, the seconds for which statements waited.
    :param stopped: why the work was stopped early; "" if it was not.
    """

    group: str
    run: int | None = None
    moved: dict[int, str] = field(default_factory=dict)
    already: list[int] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rows: int = 0
    copying: float = 0.0
    comparing: float = 0.0
    pauses: list[float] = field(default_factory=list)
    stopped: str = ""

    @property
    def ok(self) -> bool:
        return not self.failures and not self.stopped

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "group": self.group,
            "run": self.run,
            "moved": {str(number): node for number, node in self.moved.items()},
            "already": self.already,
            "failures": {str(number): why for number, why in self.failures.items()},
            "notes": self.notes,
            "rows": self.rows,
            "copying_seconds": round(self.copying, 3),
            "comparing_seconds": round(self.comparing, 3),
            "longest_pause_ms": round(max(self.pauses, default=0.0) * 1000, 1),
            "stopped": self.stopped,
        }
