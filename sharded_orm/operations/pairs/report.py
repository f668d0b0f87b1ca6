"""The options of a switch between the sides of a pair of servers, and the report on its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

Tell = Callable[[str], None]


@dataclass(frozen=True)
class SwitchOptions:
    """The options of a switch.

    :param patience: the largest number of seconds for each of three waits. The switch waits until
        the new side has almost all changes; then until the transactions that have written on the
        old side have ended; and then until the new side has their changes, too. During the second
        and the third wait, writes of the shard have to wait.
    :param force: whether the old side is given up, because its server is down. Writes that the new
        side has not received are lost, unless the old side comes back.
    :param is_upgrade: whether the switch is a step of a rolling upgrade. Then the old side only
        receives changes of the new side, and executes them later.
    """

    patience: float = 10.0
    is_upgrade: bool = False
    force: bool = False


@dataclass(frozen=True)
class UnsentWrites:
    """What is known about the writes that are lost if the active side is given up.

    :param node: the side that is given up.
    :param survivor: the other side.
    :param received: the position in the log of ``node`` up to which ``survivor`` has received all
        changes.
    :param unsent: the part of the log of ``node`` that ``survivor`` has not received; None if
        ``node`` does not answer.
    """

    node: str
    survivor: str
    received: str
    unsent: str | None

    def __str__(self) -> str:
        if self.unsent is not None:
            text = f"{self.node} answers, and refuses writes from now on. {self.survivor} lacks"
            if not self.unsent:
                return f"{text} nothing of it."
            return (
                f"{text} {self.unsent} of it, everything after {self.received or 'its begin'}."
                f" 'manage.py pairs rejoin {self.node}' puts that aside."
            )
        return (
            f"{self.node} does not answer. {self.survivor} has received its transactions up to"
            f" {self.received or 'none'}. What {self.node} has written after that is lost, unless it comes"
            " back; how much it is cannot be known. If the server was only cut off, it takes writes of"
            " processes that do not know the new topology, until it is reached or stopped."
        )


@dataclass
class SwitchReport:
    """The outcome of a switch.

    :param run: the id of the run in the journal.
    :param switched: maps the number of each switched shard to the node that is active now.
    :param already: the numbers of shards that needed no switch, because they were active on the
        wanted side.
    :param failures: maps the number of each shard that was not switched to the reason.
    :param notes: further sentences for the operator.
    :param loss: what may be lost because a side was given up; None for other switches.
    :param pauses: maps the number of each switched shard to the seconds for which its writes
        waited.
    :param stopped: why the work was stopped early; "" if it was not.
    """

    group: str
    run: int | None = None
    switched: dict[int, str] = field(default_factory=dict)
    already: list[int] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    loss: UnsentWrites | None = None
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
            "switched": {str(number): node for number, node in self.switched.items()},
            "already": self.already,
            "failures": {str(number): why for number, why in self.failures.items()},
            "notes": self.notes,
            "pauses": [round(pause, 4) for pause in self.pauses],
            "loss": None if self.loss is None else asdict(self.loss),
            "stopped": self.stopped,
        }
