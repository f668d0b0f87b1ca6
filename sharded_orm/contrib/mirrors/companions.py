"""Copies that are not mirrors, but that the command ``mirrors`` maintains as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass
class CompanionReport:
    """The work that was done on copies of rows.

    :param rows: number of copies that were written, or compared.
    :param differences: sentences about copies that differ from their rows.
    :param pending: number of copies that differ because a change is not delivered yet.
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
        """Bring the copies up to date: deliver the changes that writers have not delivered themselves.

        :param stopping: returns True if the work is to stop early.
        """

    def check(
        self, label: str, *, repair: bool, newest_first: bool, sample: float | None
    ) -> CompanionReport:
        """Compare the copies of a model with its rows.

        :param repair: whether to write copies that differ.
        :param newest_first: whether rows with the highest primary keys come first.
        :param sample: the fraction of rows to compare, in chunks drawn at random; None for all.
        """

    def build(self, label: str, stopping: Callable[[], bool]) -> CompanionReport:
        """Write the copies of a model that are missing or differ."""

    def status(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Return a dict about each model, to be shown as JSON, and sentences about problems."""


_companions: list[Companion] = []


def provide_companion(companion: Companion) -> None:
    """Let the command ``mirrors`` also handle the copies of ``companion``, such as reference tables."""
    _companions.append(companion)


def companions() -> list[Companion]:
    return _companions


def find_companion(name: str) -> tuple[Companion, str] | None:
    """Return the companion that copies the model with this name, and the label of the model.

    Returns None if no companion has such a model.
    """
    for companion in _companions:
        if (label := companion.find(name)) is not None:
            return companion, label
    return None
