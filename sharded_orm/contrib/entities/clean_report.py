"""The report of a cleaner: which index rows the cleaner has repaired, and which problems it had."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from django.db import Error

from sharded_orm.exceptions import LeaseLost, OperationHeld, ShardedOrmError

#: The largest number of problems that a report describes.
MAX_PROBLEMS = 100


@dataclass
class CleanReport:
    """The work that a cleaner has done.

    An entity is marked while its index rows may be missing or out of date.

    :param settled: number of marked entities whose index rows are correct after the work.
    :param failed: number of marked entities with index rows that could not be written.
    :param written: number of index rows that were missing, and were written.
    :param removed: number of index rows that no entity needs any more, and were removed.
    :param compared: number of entities and index rows that were compared in the pass over all
        entities, marked or not.
    :param skipped: number of times that a shard was left to another cleaner, which works there.
    :param problems: sentences about shards and entities.
    :param damaged: sentences about entities whose bodies cannot be read.
    """

    settled: int = 0
    failed: int = 0
    written: int = 0
    removed: int = 0
    compared: int = 0
    skipped: int = 0
    problems: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def take(self) -> CleanReport:
        """Return a copy of the report, and reset the report to zero."""
        report = replace(self)
        vars(self).update(vars(CleanReport()))
        return report

    def add_problem(self, text: str) -> None:
        if text not in self.problems and len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)

    def add_damage(self, text: str) -> None:
        if text not in self.damaged and len(self.damaged) < MAX_PROBLEMS:
            self.damaged.append(text)

    @contextmanager
    def shard(self, alias: str) -> Iterator[ShardOutcome]:
        """Return a context manager for the work on a shard.

        An error ends the block. It is not raised, but added to the problems of the report.
        """
        outcome = ShardOutcome()
        try:
            yield outcome
        except OperationHeld:
            self.skipped += 1  # Another cleaner works there.
        except LeaseLost as exc:  # The global database did not answer.
            outcome.has_failed = True
            self.add_problem(str(exc))
        except (Error, ShardedOrmError) as exc:
            outcome.has_failed = True
            self.add_problem(f"{alias}: {exc}")


@dataclass
class ShardOutcome:
    """The result of the work on a shard.

    :param has_failed: True if an error has ended the work. It stays False if the shard is skipped
        because another cleaner works on it.
    """

    has_failed: bool = False
