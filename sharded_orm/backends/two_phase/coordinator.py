"""Commit the transaction of a group in two phases: all shards that it wrote to commit, or none.

The first shard that the transaction uses is the decider. Its transaction is an ordinary one. At the
commit, the decider inserts the decision, every other shard prepares its branch (its part of the
transaction), and then the decider commits. That commit decides for all shards.
docs/decisions/0041-two-phase-commit.md explains why this holds if a process dies at any point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from django.db import DatabaseError

from sharded_orm.backends.two_phase import old_decisions
from sharded_orm.backends.two_phase.branch import BranchName, fits, new_transaction
from sharded_orm.backends.write_hooks.commit import CommitOutcome
from sharded_orm.exceptions import (
    CommitOutcomeUnknown,
    ShardedOrmError,
    TwoPhaseMisused,
    TwoPhaseUnavailable,
)
from sharded_orm.topology.model import Shard

#: The largest number of shards in one two-phase transaction. For each shard, a server must keep a
#: session and a prepared transaction.
MAX_SHARDS: Final = 64


class Participant(Protocol):
    """The connection object of one shard in the transaction, as the coordinator uses it."""

    alias: str
    shard: Shard | None
    failed_commit: CommitOutcome | None
    is_bound: bool
    left_branch: bool
    commit_on_exit: bool

    @property
    def has_inner_block(self) -> bool: ...
    def two_phase_obstacle(self) -> str: ...
    def begin_decider(self) -> None: ...
    def begin_branch(self, branch: BranchName) -> None: ...
    def prepare_branch(self) -> None: ...
    def leave_bound_branch(self) -> None: ...
    def store_decision(self, transaction: str) -> None: ...
    def reads_as_autocommit(self) -> bool: ...
    def leave_group_levels(self, depth: int, *, commit: bool) -> None: ...


class Coordinator:
    """Commits one transaction of a group in two phases. Only the thread of the transaction may use it.

    :param report: called when a transaction in two phases is over, with the shards of the transaction
        and whether a branch (its part on one shard) was left to a recovery.
    """

    def __init__(self, report: Callable[[Sequence[Shard], bool], None]) -> None:
        self._report = report
        self._decider: Participant | None = None
        self._transaction = ""
        self._count = 0
        #: The shards that the transaction has used.
        self.shards: list[Shard] = []

    def join(self, member: Participant) -> None:
        """Make the transaction of a shard part of this two-phase commit.

        Called before the first statement of the shard's transaction is sent.

        :param member: the shard's connection object.
        :raises TwoPhaseUnavailable: the server of the shard cannot prepare a branch.
        :raises TwoPhaseMisused: the transaction has too many shards, or the session has state or is not
            in autocommit.
        """
        if obstacle := member.two_phase_obstacle():
            raise TwoPhaseUnavailable(
                f"Shard {member.alias!r} cannot commit in two phases: {obstacle}."
            )
        if not member.commit_on_exit:
            raise TwoPhaseMisused(
                f"Shard {member.alias!r} has autocommit switched off, so a block does not commit there."
                " Leave 'AUTOCOMMIT': False out of the settings of its node."
            )
        # Reset these attributes, because the end of the last transaction may have been interrupted.
        member.is_bound = member.left_branch = False
        if self._count == MAX_SHARDS:
            raise TwoPhaseMisused(
                f"A transaction in two phases can use {MAX_SHARDS} shards, and {member.alias!r} would be"
                " one more. Each is a session and a prepared branch: use a block for fewer rows at a time."
            )
        if self._decider is None:
            if not fits(member.alias):
                raise TwoPhaseUnavailable(
                    f"No transaction can be named after {member.alias!r}: the name of the group is too"
                    " long for the servers."
                )
            member.begin_decider()
            self._decider = member
            self._transaction = new_transaction(member.alias)
        else:
            assert member.shard is not None
            member.begin_branch(BranchName(self._transaction, member.shard.schema))
        self._count += 1
        self.shards += _shards([member])

    def commit(self, members: Sequence[Participant]) -> None:
        """Commit the transaction on all of ``members``, or on none.

        If several shards were written to, the commit costs two round trips for each shard:

        - on the decider, the shard that stores the decision to commit: the insertion of the
          decision, and the commit;
        - on any other shard: the preparation, and the commit.

        If only one shard was written to, all shards commit as usual.

        :param members: the connection objects of the shards, in the order of their first use.
        :raises CommitOutcomeUnknown: the connection to the decider was lost during its commit. A
            recovery later finds the decision, and commits or rolls back the branches accordingly.
        :raises: any other error means that nothing is committed. The caller then rolls back.
        """
        decider = self._decider
        writers = [member for member in members if not member.reads_as_autocommit()]
        if len(writers) < 2:
            for member in members:
                if member not in writers:
                    member.leave_group_levels(0, commit=True)
            for writer in writers:
                self._commit_alone(writer)
            return
        if decider is None or decider not in members:
            raise TwoPhaseMisused(
                "The connection of the first shard of the transaction was closed before the end of the"
                " block, and with it the decision. Nothing is committed: run the transaction again."
            )
        for member in members:
            if member.has_inner_block:
                raise TwoPhaseMisused(
                    f"The block ends while a block on its shard {member.alias!r} that began inside it is"
                    " still open. Nothing is committed: end the inner block first."
                )
        branches = [member for member in writers if member is not decider]
        # First commit the shards from which the transaction has only read. If one of these commits
        # fails, the whole transaction can still be rolled back, because the decision to commit is
        # not stored yet.
        for member in members:
            if member not in writers and member is not decider:
                member.leave_group_levels(0, commit=True)
        decider.store_decision(self._transaction)
        try:
            for member in branches:
                member.prepare_branch()
        except BaseException:
            # If a session was lost, its branch (its part of the transaction) may be prepared. So
            # report that a branch may be left to a recovery.
            self._report(_shards([decider, *branches]), True)
            raise
        self._decide(decider, branches)
        self._finish(decider, branches)

    def _commit_alone(self, writer: Participant) -> None:
        writer.failed_commit = None
        try:
            writer.leave_group_levels(0, commit=True)
        except Exception as exc:
            if writer.failed_commit is CommitOutcome.UNKNOWN:
                raise CommitOutcomeUnknown([writer.alias], exc) from exc
            raise

    def _decide(self, decider: Participant, branches: Sequence[Participant]) -> None:
        decider.failed_commit = None
        for member in branches:
            member.is_bound, member.left_branch = True, False
        try:
            decider.leave_group_levels(0, commit=True)
        except BaseException as exc:
            if _has_refused(decider, exc):
                for member in branches:
                    member.is_bound = False
                raise
            # The decision to commit may be stored. So the branches (the parts on the other shards)
            # stay prepared when the caller rolls back, and a recovery ends them.
            self._report(_shards([decider, *branches]), True)
            if not isinstance(exc, Exception):
                raise
            aliases = [decider.alias, *(member.alias for member in branches)]
            raise CommitOutcomeUnknown(aliases, exc) from exc

    def _finish(self, decider: Participant, branches: Sequence[Participant]) -> None:
        """Commit the branches (the parts on the other shards) after the decision to commit was stored.
        A branch whose commit fails stays prepared.

        :param decider: the connection object of the shard that has stored the decision.
        :param branches: the connection objects of the other shards that were written to.
        """
        interruption: BaseException | None = None
        for member in branches:
            try:
                member.leave_group_levels(0, commit=True)
            except BaseException as exc:
                # Continue with the other branches (the parts on other shards), because the decision to
                # commit holds for them, too.
                interruption = interruption or exc
                if member.is_bound:
                    member.leave_bound_branch()
        is_left = any(member.left_branch for member in branches)
        if not is_left:
            old_decisions.add(decider.alias, self._transaction)
        self._report(_shards([decider, *branches]), is_left)
        if interruption is not None:
            raise interruption


def _has_refused(decider: Participant, exc: BaseException) -> bool:
    """Whether it is certain that the failed COMMIT of ``decider`` has not committed.

    :param decider: the shard that stores the decision to commit.
    :param exc: the error that the COMMIT has raised.
    """
    # Any error of another class, such as KeyboardInterrupt, was not raised by the COMMIT itself. It
    # may have interrupted the rollback after a refused COMMIT, so nothing is certain.
    is_of_commit = isinstance(exc, DatabaseError | ShardedOrmError)
    return is_of_commit and decider.failed_commit in (CommitOutcome.OPEN, CommitOutcome.OVER)


def _shards(members: Sequence[Participant]) -> list[Shard]:
    return [member.shard for member in members if member.shard is not None]
