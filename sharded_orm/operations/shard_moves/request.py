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

    :param patience: the number of seconds for which the mover waits until no transaction uses the
        tables of the shard, because only then can the shard be switched to the new node. After this
        time, the mover gives up. If shards move by replication, this is also the largest number of
        seconds that the replica may be behind.
    :param rate: the largest number of rows per second that are copied; None for no limit.
    :param keep: how long the old node keeps the old tables after the move. They are renamed, so
        that no statement finds them.
    """

    patience: float = 60.0
    rate: int | None = None
    keep: timedelta = timedelta(days=1)


@dataclass
class ShardMoveReport:
    """The outcome of :func:`~sharded_orm.operations.shard_moves.runner.move_shards`.

    :param run: the id of the run in the journal.
    :param moved: maps the number of each moved shard to its new node.
    :param already: the numbers of shards that were on the target before, and need not move.
    :param failures: maps the number of each shard that was not moved to the reason. The shard is on
        its old node as before, unless the reason says that the move was not ended.
    :param notes: further sentences for the operator.
    :param rows: number of rows that were copied.
    :param copying: the number of seconds that copying took, for all moved shards together. It
        includes the repeated copying of rows that the site has changed meanwhile, until few changes
        were left.
    :param comparing: the number of seconds that the first comparison of all rows took, for all
        moved shards together.
    :param pauses: for each moved shard, the number of seconds for which statements waited during
        the switch.
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
