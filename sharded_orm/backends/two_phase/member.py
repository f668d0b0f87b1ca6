"""The part of a shard's connection object that serves transactions committed in two phases."""

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
    """Mixin for a backend's connection object: prepares a branch, and commits it or leaves it prepared.

    A branch is the part of a two-phase transaction on one shard. If the backend's servers can prepare
    branches, the backend overrides :attr:`two_phase_refusal` and the methods below it. As with any
    Django connection object, only the thread that owns it may use it.
    """

    #: Why shards of this backend cannot commit in two phases; "" if they can.
    two_phase_refusal: ClassVar[str] = "its backend has no statements for a commit in two phases"
    #: The outcome of this object's last failed COMMIT; None before the first failure.
    failed_commit: CommitOutcome | None = None
    #: Whether this shard's part of the transaction is prepared, and the decision to commit may be
    #: stored. From then on, only a recovery may roll the part back.
    is_bound = False
    #: Whether the last transaction was left prepared on the server, for a recovery to end it.
    left_branch = False
    # Whether the server has confirmed the COMMIT that is in progress.
    _is_confirmed = False

    # ##### Methods for backends to override #####

    def two_phase_obstacle(self) -> str:
        """Return why the server cannot prepare transactions for a two-phase commit; "" if it can.

        The text contains the remedy. At most one query per process and node.
        """
        return self.two_phase_refusal

    def begin_decider(self) -> None:
        """Make the next transaction of this object the one that stores the decision to commit.
        Sends nothing.

        It is an ordinary transaction, in which no statement may commit implicitly.

        :raises TwoPhaseMisused: the session has state that such a transaction cannot have.
        """
        return

    def begin_branch(self, branch: BranchName) -> None:
        """Make the next transaction of this object ``branch``, one shard's part of a two-phase commit.
        Sends nothing.

        :raises TwoPhaseMisused: the session has state that a branch cannot have.
        """
        raise NotImplementedError

    def prepare_branch(self) -> None:
        """Prepare this shard's part of a two-phase commit, so that it survives the end of its
        session and a restart of its server. Only the commit or the rollback of the transaction may
        follow.

        :raises django.db.Error: the branch is not prepared, or it is unknown whether it is.
        """
        raise NotImplementedError

    def leave_branch(self) -> None:
        """Close the session, and leave a prepared transaction as it is. Sends nothing.

        If the transaction is not prepared, the server rolls it back.
        """
        raise NotImplementedError

    def prepared_branches(self) -> list[BranchName]:
        """Return the prepared branches (parts of two-phase commits) of this library on the server of
        this alias. One query.

        Branches of other projects may be among them. Does not use the transaction of this alias.
        """
        return []

    def end_branch(self, branch: BranchName, *, commit: bool) -> Completion:
        """Commit or roll back a prepared branch (one shard's part of a two-phase commit), whichever
        session prepared it. Two statements at most.

        Does not use the transaction of this alias.

        :raises django.db.Error: the server does not answer, or refuses the statement.
        """
        raise NotImplementedError

    def fate_of(self, transaction: str, seconds: float) -> Fate:
        """Return whether ``transaction`` has committed. This shard must be the one that stores its
        decision to commit.

        Tries to insert the decision in a new session, and rolls that back. The insertion fails if
        the decision is stored. It waits for an open transaction that has inserted the same
        decision.

        :param seconds: how long to wait, approximately.
        :raises django.db.Error: the shard does not answer, or has no table of decisions.
        """
        raise NotImplementedError

    # ##### The decision #####

    def store_decision(self, transaction: str) -> None:
        """Insert the decision to commit ``transaction``. It takes effect when the row is committed.

        Must be called before the first branch is prepared. The row is then locked until the
        transaction ends. So a process that finds a prepared branch, and can insert the same row,
        knows that no decision to commit can follow.
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
        # The group has announced the writes of all shards to the cache before the first branch was
        # prepared. Do not announce again, because an error now would roll the branch back.
        if not self.is_bound:
            super().announce_commit()

    def _commit(self) -> None:
        # Overrides BaseDatabaseWrapper._commit. Once the decision to commit is stored, an error of
        # this shard changes nothing: its branch stays prepared, and a recovery commits it later. So
        # Django must not roll back.
        if not self.is_bound:
            self._is_confirmed = False
            try:
                super()._commit()
            except BaseException as exc:
                # Only a database error certainly comes from COMMIT itself. Any other error, such as
                # one that a signal handler raises, may come after the commit.
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
        # Overrides CommitHookMixin._tell_watchers, which is called first after a successful COMMIT. So
        # the server has confirmed the COMMIT here.
        self._is_confirmed = self._is_confirmed or bool(committed)
        super()._tell_watchers(committed)

    def _rollback(self) -> None:
        # Overrides BaseDatabaseWrapper._rollback. If the decision to commit may be stored, this
        # shard's part of the two-phase commit must stay prepared.
        if self.is_bound:
            self.leave_bound_branch()
        super()._rollback()

    def leave_bound_branch(self) -> None:
        """Leave the prepared transaction to a recovery, and close its session. Sends nothing."""
        self.is_bound, self.left_branch = False, True
        # Keep the markers, the cache entries that announce uncommitted writes, because the writes may
        # take effect later.
        self._leave_writes()
        self.leave_branch()

    def _close(self) -> None:
        # Overrides BaseDatabaseWrapper._close. If the decision to commit may be stored, this shard's
        # part of the two-phase commit must stay prepared.
        if self.is_bound:
            self.leave_bound_branch()
        super()._close()
