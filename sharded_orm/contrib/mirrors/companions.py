"""Lets the command ``mirrors`` also maintain copies of rows that are not mirrors.

Reference tables are an example: each shard has a copy of a table of the global database.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass
class CompanionReport:
    """The result of one operation on copies of rows.

    :param rows: number of copies that the operation has written or compared.
    :param differences: sentences about copies that differ from the original rows.
    :param pending: number of copies that differ only because a change was not delivered to them
        yet.
    :param problems: sentences about shards that did not answer, or refused a copy.
    """

    rows: int = 0
    differences: list[str] = field(default_factory=list)
    pending: int = 0
    problems: list[str] = field(default_factory=list)


class Companion(Protocol):
    """The operations of the command ``mirrors`` on copies that are not mirrors, such as reference
    tables.

    The app that makes the copies registers an instance by :func:`provide_companion` when it is
    ready.
    """

    def labels(self) -> list[str]:
        """Return the labels of the models that have copies."""

    def find(self, name: str) -> str | None:
        """Return the label of the model with this label or class name; None if there is none."""

    def relay(self, stopping: Callable[[], bool]) -> CompanionReport:
        """Deliver the changes that writers have not delivered themselves, so that all copies are up
        to date.

        :param stopping: returns True if the work is to stop early.
        """

    def check(
        self, label: str, *, repair: bool, newest_first: bool, sample: float | None
    ) -> CompanionReport:
        """Compare the copies of a model with the original rows.

        :param label: the label of the model.
        :param repair: whether to correct copies that differ.
        :param newest_first: whether rows with the highest primary keys come first.
        :param sample: the fraction of rows to compare, in chunks drawn at random; None for all.
        """

    def build(self, label: str, stopping: Callable[[], bool]) -> CompanionReport:
        """Write the copies of a model that are missing or differ."""

    def status(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return a list with a dict about each model, to be shown as JSON, and a list of problems.

        A problem is a sentence, for example about a shard that does not answer.
        """


_companions: list[Companion] = []


def provide_companion(companion: Companion) -> None:
    """Let the command ``mirrors`` also handle the copies of ``companion``, such as reference tables."""
    _companions.append(companion)


def companions() -> list[Companion]:
    return _companions


def find_companion(name: str) -> tuple[Companion, str] | None:
    """Return a pair: the companion that copies the model ``name``, and the label of the model.

    Return None if no companion copies such a model.

    :param name: the label of the model, or the name of its class.
    """
    for companion in _companions:
        if (label := companion.find(name)) is not None:
            return companion, label
    return None
