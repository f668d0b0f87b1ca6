"""The names of two-phase transactions and of their branches.

A branch is the part of a two-phase transaction on one shard. The server of the shard keeps the name
of each prepared branch. The name contains the alias of the shard that stores the decision to
commit. So a process that finds a prepared branch can ask that shard whether to commit the branch.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final

from django.db import DatabaseError, Error

from sharded_orm.backends.sqlstate import LOCK_NOT_AVAILABLE
from sharded_orm.exceptions import ShardedOrmError

if TYPE_CHECKING:
    from sharded_orm.topology.model import Shard

#: The table for the decisions of two-phase commits. The app ``sharded_orm.contrib.two_phase``
#: creates it on each shard. A row means that the transaction with this name is committed.
TABLE: Final = "sharded_orm_decision"
#: The largest length in bytes of the name of a transaction. The name of a branch consists of this
#: name and of a schema. Servers with XA allow 64 bytes for each of the two.
MAX_BYTES: Final = 64
_RANDOM_BYTES = 8
_SEPARATOR = "."
_PG_UNKNOWN_TABLE, _MYSQL_UNKNOWN_TABLE = "42P01", 1146
_MYSQL_LOCK_WAIT = 1205


@dataclass(frozen=True, order=True)
class BranchName:
    """The name of a branch, the part of a two-phase transaction on one shard.

    :param transaction: the result of :func:`new_transaction`, the same for all branches of a
        transaction.
    :param schema: name of the shard's schema. The schema also tells the projects on a server apart,
        because two projects cannot have a schema of the same name on one server (on PostgreSQL: in
        one database).
    """

    transaction: str
    schema: str

    @property
    def decider(self) -> str:
        """The alias of the decider, the shard that stores the decision to commit. "" if the library
        has not made this name.
        """
        return self.transaction.partition(_SEPARATOR)[2]

    def __str__(self) -> str:
        return f"{self.transaction}/{self.schema}"


class Fate(Enum):
    """Whether a two-phase transaction is committed, as far as the shard with the decision can tell."""

    COMMITTED = auto()
    """The decision to commit is stored, for good."""
    ABORTED = auto()
    """There is no such decision, and there can never be one."""
    OPEN = auto()
    """The transaction that may store the decision is still open, or nobody can tell."""


class Completion(Enum):
    """The result of an attempt to end a prepared branch (one shard's part of a two-phase commit)."""

    DONE = auto()
    """This call has ended the branch."""
    GONE = auto()
    """The branch had ended before: somebody else was faster, or it has changed no row."""
    HELD = auto()
    """The session that prepared the branch is still connected, and nobody else may end the branch."""


def note_missing_table(error: DatabaseError, alias: str) -> None:
    """If ``error`` says that the shard ``alias`` has no table of decisions, add a note with the
    remedy.
    """
    cause = error.__cause__
    if (
        getattr(cause, "sqlstate", None) == _PG_UNKNOWN_TABLE
        or error.args[:1] == (_MYSQL_UNKNOWN_TABLE,)
        or str(error).startswith("no such table")  # SQLite has no number for it.
    ):
        error.add_note(
            f"The table {TABLE!r} of {alias!r} is one of the app 'sharded_orm.contrib.two_phase': run"
            " 'manage.py migrate_shards'."
        )


def note_orphans(error: Error, wrapper: Any) -> None:
    """If ``error`` says that a statement has waited for a lock in vain, and prepared branches on
    the shard may hold this lock, add a note that names their transactions.

    A prepared branch whose process has died holds its locks until a recovery ends it. This function
    queries the server in another session, but only for errors of this kind. If the pool has no
    session left, it adds no note.

    :param wrapper: the connection object of a shard that is in a block with ``two_phase=True``.
    """
    state = getattr(error.__cause__, "sqlstate", None)
    if state != LOCK_NOT_AVAILABLE and error.args[:1] != (_MYSQL_LOCK_WAIT,):
        return
    if wrapper.node_pool.is_exhausted:
        return  # The caller, who may have asked not to wait (NOWAIT), would wait for a session.
    shard: Shard = wrapper.shard
    try:
        branches: list[BranchName] = wrapper.prepared_branches()
    except (Error, ShardedOrmError):
        return  # The caller receives the error of the wait.
    names = [branch.transaction for branch in branches if branch.schema == shard.schema]
    if names:
        error.add_note(
            f"Prepared on this shard, and perhaps in the way, are the branches of {names!r}. If their process has"
            " died, 'manage.py transactions recover' ends them."
        )


def new_transaction(decider: str) -> str:
    """Return a new, random name for a two-phase transaction.

    The name ends with the alias of the decider, the shard whose commit decides for all shards. For
    example, ``0f3c9a5b2e7d4816.photos_00042``.

    :param decider: the alias of this shard.
    """
    return f"{secrets.token_hex(_RANDOM_BYTES)}{_SEPARATOR}{decider}"


def fits(alias: str) -> bool:
    """Whether the alias of a shard is short enough for a transaction whose name contains it."""
    return 2 * _RANDOM_BYTES + len(_SEPARATOR) + len(alias.encode()) <= MAX_BYTES
