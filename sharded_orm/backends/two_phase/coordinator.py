"""Commit the transaction of a group in two phases: either all shards to which it wrote commit, or
none.

The first shard that the transaction uses is the decider, whose transaction is an ordinary one. At
the commit, the decider inserts a row: the decision to commit. Then every other shard prepares its
branch (its part of the transaction). Then the decider commits. This commit decides for all shards.
docs/decisions/0041-two-phase-commit.md explains why this is safe if a process dies at any point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
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

#: The largest number of shards in one two-phase transaction, because each needs a session and a
#: prepared transaction on its server.
MAX_SHARDS: Final = 64


class Participant(Protocol):
    """What the coordinator uses of the connection object of each shard in the transaction."""

    alias: str
    shard: Shard | None
    failed_commit: CommitOutcome | None
    is_bound: bool
    left_branch: bool
    commit_on_exit: bool
    autocommit: bool

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
    def close(self) -> None: ...


class Coordinator:
    """Commits one transaction of a group in two phases. Only the thread of the transaction may use
    it.

    :param report: called at the end of a two-phase commit with the shards of the transaction, and
        with True if a branch (the part on one shard) was left for a recovery to end.
    """

    def __init__(self, report: Callable[[Sequence[Shard], bool], None]) -> None:
        self._report = report
        self._decider: Participant | None = None
        self._transaction = ""
        self._count = 0
        #: The shards that the transaction has used.
        self.shards: list[Shard] = []

    def join(self, member: Participant) -> None:
        """Make the transaction on one more shard a part of this two-phase commit.

        Called before the first statement of the transaction on this shard is sent.

        :param member: the shard's connection object.
        :raises TwoPhaseUnavailable: the server of the shard cannot prepare a branch.
        :raises TwoPhaseMisused: the transaction has too many shards. Or the session of the shard
            has state, or is not in autocommit.
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
        # Reset these attributes. The last transaction on this connection may have left them True,
        # if it was interrupted.
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

        If the transaction wrote to several shards, the commit costs two round trips for each of
        them:

        - The decider, the shard that stores the decision, inserts the decision, and later commits.
        - Every other shard prepares its branch, and later commits it.

        If the transaction wrote to one shard only, all shards commit as usual.

        :param members: the connection objects of the shards, in the order of their first use.
        :raises CommitOutcomeUnknown: the connection to the decider was lost during its commit. A
            recovery later looks for the decision, and commits the branches or rolls them back.
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
        # First commit on the shards from which the transaction has only read. If one of these
        # commits fails, the whole transaction can still be rolled back, because no decision is
        # stored yet.
        for member in members:
            if member not in writers and member is not decider:
                member.leave_group_levels(0, commit=True)
        decider.store_decision(self._transaction)
        try:
            for member in branches:
                member.prepare_branch()
        except BaseException:
            # If the session was lost, its server may have prepared the branch nevertheless. So
            # report that a branch may be left for a recovery to end.
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
            # The decision to commit may be stored. So when the caller rolls back, the branches (the
            # parts on the other shards) must stay prepared. A recovery ends them later.
            # Report this before anything else, because a second interruption may come at any time,
            # and then the code below does not run.
            self._report(_shards([decider, *branches]), True)
            if not decider.autocommit:
                # The transaction is still open, because PostgreSQL's driver does not switch
                # autocommit on after an interruption. A recovery would wait for this transaction.
                # So end it by closing its session. Do not raise an error of close(), because the
                # caller must learn that the outcome is unknown.
                with suppress(Exception):
                    decider.close()
            if not isinstance(exc, Exception):
                raise
            aliases = [decider.alias, *(member.alias for member in branches)]
            raise CommitOutcomeUnknown(aliases, exc) from exc

    def _finish(self, decider: Participant, branches: Sequence[Participant]) -> None:
        """Commit the branches (the parts on the other shards) after the decision was stored. A
        branch whose commit fails stays prepared, and a recovery commits it later.

        :param decider: the connection object of the shard that has stored the decision.
        :param branches: the connection objects of the other shards to which the transaction wrote.
        """
        interruption: BaseException | None = None
        for member in branches:
            try:
                member.leave_group_levels(0, commit=True)
            except BaseException as exc:
                # Go on with the other branches in spite of the error, because the decision to
                # commit is stored.
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
    """Whether it is certain that the decider, whose COMMIT has failed, has not committed.

    :param decider: the shard that stores the decision to commit.
    :param exc: the error that the COMMIT has raised.
    """
    # An error of another class, such as KeyboardInterrupt, does not come from the server's answer
    # to COMMIT. It may have been raised before or after COMMIT, so nothing is certain.
    is_of_commit = isinstance(exc, DatabaseError | ShardedOrmError)
    return is_of_commit and decider.failed_commit in (CommitOutcome.OPEN, CommitOutcome.OVER)


def _shards(members: Sequence[Participant]) -> list[Shard]:
    return [member.shard for member in members if member.shard is not None]
