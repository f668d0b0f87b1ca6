"""How shards are moved to another node, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

Tell = Callable[[str], None]


@dataclass(frozen=True)
class ShardMoveOptions:
    """How shards are moved.

    :param patience: seconds to wait, over and over, for transactions that use the shard when it is
        about to switch. Afterwards the move is given up.
    :param rate: the most rows per second that are copied; None for no limit.
    :param keep: for how long the old tables are kept on the former node, under other names.
    """

    patience: float = 60.0
    rate: int | None = None
    keep: timedelta = timedelta(days=1)


@dataclass
class ShardMoveReport:
    """The outcome of :func:`~sharded_orm.operations.shard_moves.runner.move_shards`.

    :param run: the id of the run in the journal.
    :param moved: the node on which each moved shard is now, by the number of the shard.
    :param already: shards that were on the node before.
    :param failures: why shards were not moved, by number. They are where they were.
    :param notes: sentences about what else is to know.
    :param rows: number of rows that were copied.
    :param pauses: for how many seconds statements on each moved shard waited.
    :param stopped: why the work was stopped early; "" if it was not.
    """

    group: str
    run: int | None = None
    moved: dict[int, str] = field(default_factory=dict)
    already: list[int] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rows: int = 0
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
            "longest_pause_ms": round(max(self.pauses, default=0.0) * 1000, 1),
            "stopped": self.stopped,
        }
