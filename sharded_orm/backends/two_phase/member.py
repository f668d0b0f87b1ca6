"""The methods of a shard's connection object for two-phase commits."""

from __future__ import annotations

import logging
import time
from typing import ClassVar

from django.db import DatabaseError

from sharded_orm.backends.two_phase import old_decisions
from sharded_orm.backends.two_phase.branch import (
    TABLE,
    BranchName,
    Completion,
    Fate,
    note_missing_table,
)
from sharded_orm.backends.write_hooks.commit import CommitHookMixin, CommitOutcome
from sharded_orm.exceptions import ShardedOrmError

logger = logging.getLogger("sharded_orm.backends.two_phase")


class TwoPhaseMixin(CommitHookMixin):
    """Mixin for a backend's connection object: takes part in a two-phase commit.

    The part of the transaction on one shard is called a branch. The server first prepares the
    branch, so that it survives the end of its session, and later commits it or rolls it back. If
    the servers of a backend can do so, the backend overrides :attr:`two_phase_refusal` and the
    methods below it. As with any connection object of Django, only the thread that owns the object
    may use it.
    """

    #: Why shards of this backend cannot take part in a two-phase commit; "" if they can.
    two_phase_refusal: ClassVar[str] = "its backend has no statements for a commit in two phases"
    #: What is known after the last failed COMMIT of this object; None before the first failure.
    failed_commit: CommitOutcome | None = None
    #: Whether this shard's branch is prepared, and the decision to commit may be stored. Then this
    #: object must not roll the branch back any more. Only a recovery may, after it has looked for
    #: the decision.
    is_bound = False
    #: Whether the branch of the last transaction was left prepared on the server, for a recovery to
    #: end it.
    left_branch = False
    # Whether the server has answered the present COMMIT with success.
    _is_confirmed = False

    # ##### Methods for backends to override #####

    def two_phase_obstacle(self) -> str:
        """Return why the server cannot prepare the branches of a two-phase commit; "" if it can.

        The text names the remedy. At most one query per process and node.
        """
        return self.two_phase_refusal

    def begin_decider(self) -> None:
        """Make this shard the decider of a two-phase commit: its next transaction stores the
        decision to commit. Sends nothing.

        The transaction is an ordinary one, but no statement in it may commit implicitly.

        :raises TwoPhaseMisused: the session has state that such a transaction cannot have.
        """
        return

    def begin_branch(self, branch: BranchName) -> None:
        """Make the next transaction of this object ``branch``, this shard's part of a two-phase
        commit. Sends nothing.

        :raises TwoPhaseMisused: the session has state that a branch cannot have.
        """
        raise NotImplementedError

    def prepare_branch(self) -> None:
        """Prepare the branch, this shard's part of a two-phase commit. The branch then survives the
        end of its session and a restart of its server.

        Only a commit or a rollback of the transaction may follow.

        :raises django.db.Error: the branch is not prepared, or it is unknown whether it is.
        """
        raise NotImplementedError

    def leave_branch(self) -> None:
        """Close the session without ending its branch. Sends nothing.

        A prepared branch stays on the server. A branch that is not prepared is rolled back by the
        server.
        """
        raise NotImplementedError

    def prepared_branches(self) -> list[BranchName]:
        """Return the prepared branches of this library on the server of this alias. One query.

        Branches of other projects may be among them. Does not use the transaction of this alias.
        """
        return []

    def end_branch(self, branch: BranchName, *, commit: bool) -> Completion:
        """Commit or roll back a prepared branch, whichever session has prepared it. Two statements
        at most.

        Does not use the transaction of this alias.

        :raises django.db.Error: the server does not answer, or refuses the statement.
        """
        raise NotImplementedError

    def fate_of(self, transaction: str, seconds: float) -> Fate:
        """Return whether ``transaction`` is committed. This shard must be its decider, the one that
        stores its decision to commit.

        A new session tries to insert the decision, and rolls the insertion back. If the decision is
        stored, the insertion fails. If an open transaction has inserted the decision, the insertion
        waits for the end of this transaction.

        :param transaction: the name of the transaction.
        :param seconds: how long to wait, approximately.
        :raises django.db.Error: the shard does not answer, or has no table of decisions.
        """
        raise NotImplementedError

    # ##### The decision #####

    def store_decision(self, transaction: str) -> None:
        """Insert the decision to commit ``transaction``. The decision takes effect when the row is
        committed.

        Call this before the first branch is prepared. The inserted row is locked until the
        transaction ends. So if another process finds a prepared branch, and can itself insert the
        row, it knows that the transaction is over and will never be committed.
        """
        with self.cursor() as cursor:
            if names := old_decisions.take(self.alias):
                marks = ", ".join(["%s"] * len(names))
                cursor.execute(f"DELETE FROM {TABLE} WHERE name IN ({marks})", names)
            try:
                cursor.execute(
                    f"INSERT INTO {TABLE} (name, decided_at) VALUES (%s, %s)",
                    [transaction, int(time.time())],
                )
            except DatabaseError as exc:
                note_missing_table(exc, self.alias)
                raise

    # ##### The end of the transaction #####

    def announce_commit(self) -> None:
        # If the branch is prepared, the group has already announced the writes of all shards to the
        # cache. Do not announce them again, because an error here would roll the branch back.
        if not self.is_bound:
            super().announce_commit()

    def _commit(self) -> None:
        # Overrides BaseDatabaseWrapper._commit. If the decision to commit is stored, Django must
        # not roll the branch back after an error of this shard. The branch stays prepared, and a
        # recovery commits it later.
        if not self.is_bound:
            self._is_confirmed = False
            try:
                super()._commit()
            except BaseException as exc:
                # Only a database error certainly means that the COMMIT failed. Any other error,
                # such as one from a signal handler, may have been raised after the commit.
                is_of_commit = isinstance(exc, DatabaseError | ShardedOrmError)
                is_certain = is_of_commit and not self._is_confirmed
                self.failed_commit = self.commit_outcome() if is_certain else CommitOutcome.UNKNOWN
                raise
            return
        try:
            super()._commit()
        except BaseException as exc:
            logger.warning("The decided branch on %r is left to a recovery: %s", self.alias, exc)
            self.leave_bound_branch()
            if not isinstance(exc, Exception):
                raise
        self.is_bound = False

    def _tell_watchers(self, committed: bool | None) -> None:
        # Overrides CommitHookMixin._tell_watchers, because it is the first method that runs after a
        # successful COMMIT. So the server has confirmed the COMMIT here.
        self._is_confirmed = self._is_confirmed or bool(committed)
        super()._tell_watchers(committed)

    def _rollback(self) -> None:
        # Overrides BaseDatabaseWrapper._rollback. If the decision to commit may be stored, the
        # branch must stay prepared.
        if self.is_bound:
            self.leave_bound_branch()
        super()._rollback()

    def leave_bound_branch(self) -> None:
        """Close the session, and leave the prepared branch for a recovery to end. Sends nothing."""
        self.is_bound, self.left_branch = False, True
        # A recovery may commit the writes later. So leave the markers, which announce the writes,
        # in the cache: readers then query the database instead.
        self._leave_writes()
        self.leave_branch()

    def _close(self) -> None:
        # Overrides BaseDatabaseWrapper._close. If the decision to commit may be stored, the branch
        # must stay prepared.
        if self.is_bound:
            self.leave_bound_branch()
        super()._close()
