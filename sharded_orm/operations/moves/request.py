"""The options of moves of keys, the keys that are to move, and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

AUTO = "auto"
_MOST_NAMED = 10


@dataclass(frozen=True)
class MoveOptions:
    """How keys are moved.

    :param max_pause: seconds for which writes to a key may wait in the last step of its move. If
        they would wait longer, they go on at the source shard, and the step is tried again later. A
        pause can still be longer, because the time is not checked while the last changes are
        written and all rows are compared.
    :param rate: the largest number of rows per second that a worker copies; None for no limit.
    :param workers: number of keys that are moved at once.
    :param keep: the time for which the old rows are kept, in side tables on the former shard.
    :param kill: whether to end the database sessions of an earlier process, which has begun a move
        and hangs or is paused. Its sessions may hold locks.
    """

    max_pause: float = 1.0
    rate: int | None = None
    workers: int = 4
    keep: timedelta = timedelta(days=7)
    kill: bool = False


@dataclass(frozen=True)
class KeyToMove:
    """A key that an operator wants to move.

    :param value: the key, as the value that its field sends to the database.
    :param text: the text under which the directory stores the key.
    """

    value: Any
    text: str
    source: int
    target: int


@dataclass
class MoveReport:
    """The report of :func:`~sharded_orm.operations.moves.runner.move_keys`, ``repair`` or
    ``abort``.

    :param run: the id of the run in the journal; None if there was nothing to do.
    :param moved: maps each moved key to the number of the shard on which it is now.
    :param aborted: keys whose moves this call has aborted for an operator.
    :param already: keys that were on their target before.
    :param failures: maps each key that was not moved to the reason. Its rows are where they were.
    :param unsettled: maps each moved key with an incomplete move to a sentence about what is left
        to do. Either its old rows are still on the old shard, or its new shard still refuses
        writes.
    :param notes: further sentences for the operator. For example, one says which tables belong to
        no model.
    :param recovered: maps keys to the numbers of the shards on which they are now. An earlier
        process had left the moves of these keys unfinished, and this call has ended them.
    :param stopped: why the work was stopped early; "" if it was not.
    :param left: number of keys whose moves were not begun.
    """

    group: str
    run: int | None = None
    moved: dict[str, int] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    unsettled: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    recovered: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    pauses: list[float] = field(default_factory=list)
    stopped: str = ""
    left: int = 0

    def problems(self) -> list[str]:
        """Return a sentence for each key that needs the attention of an operator."""
        return [f"{key}: {why}" for key, why in (self.failures | self.unsettled).items()]

    @property
    def ok(self) -> bool:
        return not self.failures and not self.unsettled and not self.stopped

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "group": self.group,
            "run": self.run,
            "moved": self.moved,
            "aborted": self.aborted,
            "already": self.already,
            "failures": self.failures,
            "unsettled": self.unsettled,
            "notes": self.notes,
            "recovered": self.recovered,
            "rows": self.rows,
            "longest_pause_ms": round(max(self.pauses, default=0.0) * 1000, 1),
            "stopped": self.stopped,
            "left": self.left,
        }


class NoProgress:
    """Receives the reports of a move and shows nothing."""

    def begin(self, group: str, total: int) -> None: ...
    def done(self, alias: str, what: str = "") -> None: ...
    def unit_failed(self, description: str, error: str) -> None: ...
    def end(self) -> None: ...


def keys_text(keys: Sequence[str]) -> str:
    """Return a text that names at most ten keys, and says how many more there are."""
    named = ", ".join(map(repr, keys[:_MOST_NAMED]))
    return named if len(keys) <= _MOST_NAMED else f"{named} and {len(keys) - _MOST_NAMED} more"
