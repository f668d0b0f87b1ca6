"""Names of transactions that are committed in two phases, and of their branches.

A branch is the part of such a transaction on one shard. The servers keep the name of each prepared
branch. From the name alone, any process can find the shard that has the decision.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

#: The table with the decisions, on each shard. A row is the decision to commit a transaction.
TABLE: Final = "sharded_orm_decision"
#: Servers with XA allow 64 bytes for the name of a transaction, and as many for that of a branch.
MAX_BYTES: Final = 64
_RANDOM_BYTES = 8
_SEPARATOR = "."


@dataclass(frozen=True, order=True)
class BranchName:
    """The name of the part of a transaction that is on one shard.

    :param transaction: the result of :func:`new_transaction`, the same for all branches of the
        transaction.
    :param schema: name of the shard's schema. Two projects on one server (on PostgreSQL: in one
        database) cannot have schemas of the same name. So the name also shows which project the branch
        belongs to.
    """

    transaction: str
    schema: str

    @property
    def decider(self) -> str:
        """The alias of the shard that has the decision; "" if the name is not one of ours."""
        return self.transaction.partition(_SEPARATOR)[2]

    def __str__(self) -> str:
        return f"{self.transaction}/{self.schema}"


class Fate(Enum):
    """What is known of a transaction whose branches are prepared."""

    COMMITTED = auto()
    """The decision to commit is stored, for good."""
    ABORTED = auto()
    """There is no such decision, and there can never be one."""
    OPEN = auto()
    """The transaction that may store the decision is still open, or nobody can tell."""


class Completion(Enum):
    """How an attempt to end a prepared branch went."""

    DONE = auto()
    """This call has ended the branch."""
    GONE = auto()
    """It had ended before: somebody else was faster, or it has changed no row."""
    HELD = auto()
    """The session that prepared the branch is still connected, and nobody else may end the branch."""


def new_transaction(decider: str) -> str:
    """Return a new, random name for a transaction that is committed in two phases.

    The name ends with the alias of the decider.

    :param decider: alias of the shard on which the decision to commit will be stored.
    """
    return f"{secrets.token_hex(_RANDOM_BYTES)}{_SEPARATOR}{decider}"


def fits(alias: str) -> bool:
    """Whether a transaction can be named after the shard ``alias``."""
    return 2 * _RANDOM_BYTES + len(_SEPARATOR) + len(alias.encode()) <= MAX_BYTES
