"""The errors of operators' actions. They derive from the base classes in
:mod:`sharded_orm.exceptions`.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.core.exceptions import ImproperlyConfigured
from django.db import IntegrityError, OperationalError

from sharded_orm.exceptions import OperationError, bullet_list


class InvalidSelection(OperationError, LookupError):
    """The selected shards, group or node do not exist, or no shard is selected."""


class InvalidShardCommand(OperationError, ValueError):
    """A management command cannot run on shards: it does not exist, or has no ``--database`` option."""


class InvalidWaves(OperationError, ValueError):
    """The numbers by which work is divided into waves (batches of shards) are out of range."""


class JournalMissing(OperationError, ImproperlyConfigured):
    """The journal, which records long operations, has no tables or cannot be written now.

    The journal's tables are in the global database (the one that is not sharded).
    """


class NothingUnclear(OperationError, LookupError):
    """An operator has declared the result of an interrupted operation on a shard, but the shard has
    no interrupted operation with an unknown result.
    """


class OperationDiffers(OperationError, OperationalError):
    """Other processes are executing the same operation with different arguments."""


class PromotionRefused(OperationError, OperationalError):
    """A primary cannot be replaced by its replica. :attr:`problems` lists every reason."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"The promotion is refused:{bullet_list(self.problems)}")


class PromotionFailed(OperationError, OperationalError):
    """An error has stopped a promotion, which replaces a primary by its replica.

    :attr:`settled` is False if servers were left in an intermediate state.
    """

    def __init__(self, message: str, *, settled: bool = True) -> None:
        self.settled = settled
        super().__init__(message)


class PairRefused(OperationError, OperationalError):
    """Two nodes do not replicate from each other correctly, or cannot be made to do so.

    :attr:`problems` lists every reason.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"The pair is not in order:{bullet_list(self.problems)}")


class RollingRefused(OperationError, ValueError):
    """A rolling upgrade, which migrates one side of a pair and later the other one, is refused.

    :attr:`problems` lists every reason.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            f"A rolling upgrade is refused, and nothing was changed:{bullet_list(self.problems)}"
        )


class AbortRefused(OperationError, OperationalError):
    """A rolling upgrade of a pair cannot be undone any more. :attr:`problems` lists every reason."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"The upgrade cannot be aborted:{bullet_list(self.problems)}")


class SwitchRefused(OperationError, ValueError):
    """The writes of some shards cannot be switched to the other side of their pair as requested.

    :attr:`problems` lists every reason.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"The switch is refused:{bullet_list(self.problems)}")


class SwitchFailed(OperationError, OperationalError):
    """An error has stopped the switch of a shard to the other side of its pair."""


class GrowthRefused(OperationError, ValueError):
    """The shard group cannot get the requested new shards, or its ranges cannot be changed as requested."""


class BalanceRefused(OperationError, ValueError):
    """No plan of moves to balance nodes or shards can be made. :attr:`problems` lists every reason."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"There is no plan, and nothing was changed:{bullet_list(self.problems)}")


class ImportRefused(OperationError, ValueError):
    """The rows of tables cannot be imported into shards. Nothing was written.

    :attr:`problems` lists every reason.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            f"The import is refused, and nothing was written:{bullet_list(self.problems)}"
        )


class ImportConflict(OperationError, IntegrityError):
    """A shard has a different row with the id of a row that is to be imported.

    Neither row was changed. The message names both.
    """


class ImportFailed(OperationError, OperationalError):
    """An error has stopped an import. The message says what the state is, and how to go on."""


class OperationStopped(OperationError):
    """The work on a shard was told to stop, and has stopped cleanly. It can be continued later."""


class OperationUnclear(OperationError):
    """It is unknown whether an interrupted change took effect. The message says what to check."""


class InvalidMigrationTarget(OperationError, LookupError):
    """The app or migration does not exist, or no sequence of migrations leads to the wanted state."""


class SchemaDiffers(OperationError, OperationalError):
    """A shard's schema after its migrations is not the expected one. The message lists the differences."""
