"""What a cleaner has done, and what has kept it from the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from django.db import Error

from sharded_orm.exceptions import LeaseLost, OperationHeld, ShardedOrmError

#: Texts of problems that a report has at most.
MAX_PROBLEMS = 100


@dataclass
class CleanReport:
    """What a cleaner has done.

    :param settled: number of marked entities whose index rows are right now.
    :param failed: number of marked entities with index rows that could not be written.
    :param written: number of index rows that were missing.
    :param removed: number of index rows that were left over.
    :param compared: number of entities and rows that the whole pass has compared.
    :param problems: sentences about shards and entities.
    :param damaged: sentences about entities whose bodies cannot be read.
    """

    settled: int = 0
    failed: int = 0
    written: int = 0
    removed: int = 0
    compared: int = 0
    problems: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def take(self) -> CleanReport:
        """Return a copy, and begin anew."""
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
        """A context manager: what goes wrong on a shard is added to the problems, and ends the block."""
        outcome = ShardOutcome()
        try:
            yield outcome
        except OperationHeld:
            pass  # Another cleaner works there.
        except LeaseLost as exc:  # The global database did not answer.
            outcome.has_failed = True
            self.add_problem(str(exc))
        except (Error, ShardedOrmError) as exc:
            outcome.has_failed = True
            self.add_problem(f"{alias}: {exc}")


@dataclass
class ShardOutcome:
    """How the work on a shard has ended.

    :param has_failed: whether an error has ended it. It has not, if another cleaner works there.
    """

    has_failed: bool = False
