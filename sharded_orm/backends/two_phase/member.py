"""What the connection object of a shard does in a transaction that is committed in two phases."""

from __future__ import annotations

import logging
import time
from typing import ClassVar

from django.db import DatabaseError, ProgrammingError

from sharded_orm.backends.two_phase import old_decisions
from sharded_orm.backends.two_phase.branch import TABLE, BranchName, Completion, Fate
from sharded_orm.backends.write_hooks.commit import CommitHookMixin, CommitOutcome
from sharded_orm.exceptions import ShardedOrmError

logger = logging.getLogger("sharded_orm.backends.two_phase")


class TwoPhaseMixin(CommitHookMixin):
    """Mixin for a backend's connection object: it prepares a branch, and commits or leaves it.

    A backend whose servers can do so overrides :attr:`two_phase_refusal` and the methods below it.
    As with any Django connection object, only the thread that owns it may use it.
    """

    #: Why shards of this backend cannot commit in two phases; "" if they can.
    two_phase_refusal: ClassVar[str] = "its backend has no statements for a commit in two phases"
    #: The outcome of this object's last COMMIT that raised an error; None before the first.
    failed_commit: CommitOutcome | None = None
    #: Whether the branch of this object is prepared, and the decider has been told to commit. From then
    #: on nobody may roll the branch back, except for a recovery.
    is_bound = False
    #: Whether the branch of the last transaction was left to a recovery.
    left_branch = False
    # Whether the server has confirmed the COMMIT that is under way.
    _is_confirmed = False

    # ##### For backends #####

    def two_phase_obstacle(self) -> str:
        """Return why the server cannot prepare a branch, with the remedy; "" if it can.

        At most one query per process and node.
        """
        return self.two_phase_refusal

    def begin_decider(self) -> None:
        """Let the transaction that begins with the next statement be the one that decides. Sends nothing.

        Nothing in it may be committed before its end.

        :raises TwoPhaseMisused: the session has state that such a transaction cannot have.
        """
        return

    def begin_branch(self, branch: BranchName) -> None:
        """Let the transaction that begins with the next statement be ``branch``. Sends nothing.

        :raises TwoPhaseMisused: the session has state that a branch cannot have.
        """
        raise NotImplementedError

    def prepare_branch(self) -> None:
        """Prepare the branch of :meth:`begin_branch`: it survives the end of its session and a restart.

        Afterwards, nothing but the commit or the rollback of the transaction may follow.

        :raises django.db.Error: the branch is not prepared, or nobody can tell whether it is.
        """
        raise NotImplementedError

    def leave_branch(self) -> None:
        """Give the session up, without ending the branch if it is prepared. Sends nothing.

        The server rolls back a branch that is not prepared.
        """
        raise NotImplementedError

    def prepared_branches(self) -> list[BranchName]:
        """Return the prepared branches of this library on the server of this alias. One query.

        Branches of other sites may be among them. Does not use the transaction of this alias.
        """
        return []

    def end_branch(self, branch: BranchName, *, commit: bool) -> Completion:
        """Commit or roll back a prepared branch of any session. Two statements at most.

        Does not use the transaction of this alias.

        :raises django.db.Error: the server does not answer, or refuses.
        """
        raise NotImplementedError

    def fate_of(self, transaction: str, seconds: float) -> Fate:
        """Return what has become of ``transaction``, whose decision belongs on this shard.

        Tries to insert the decision, and undoes that. Uses a new session, and waits for the end of an
        open transaction that has inserted it.

        :param seconds: how long to wait, about.
        :raises django.db.Error: the shard does not answer, or has no table of decisions.
        """
        raise NotImplementedError

    # ##### The decision #####

    def store_decision(self, transaction: str) -> None:
        """Insert the decision to commit ``transaction``. It counts as soon as it is committed.

        Must be called before the first branch is prepared. Then the row is locked as long as the
        transaction is open: whoever finds a prepared branch and can insert the same row knows that no
        decision can follow.
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
            except ProgrammingError as exc:
                exc.add_note(
                    f"The table {TABLE!r} of {self.alias!r} is one of the app"
                    " 'sharded_orm.contrib.two_phase': run 'manage.py migrate_shards'."
                )
                raise

    # ##### The end of the transaction #####

    def announce_commit(self) -> None:
        # The group has announced the writes of all shards before the first branch was prepared. If an
        # announcement failed now, it would roll the branch back.
        if not self.is_bound:
            super().announce_commit()

    def _commit(self) -> None:
        # Overrides BaseDatabaseWrapper._commit. If the decision is stored, no error of this shard can
        # undo it: the branch stays prepared, and a recovery commits it. So Django must not roll back.
        if not self.is_bound:
            self._is_confirmed = False
            try:
                super()._commit()
            except BaseException as exc:
                # Any other error, one of a signal handler for example, may come after the commit.
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
        # Overrides CommitHookMixin._tell_watchers, the first call after a COMMIT that has succeeded.
        self._is_confirmed = self._is_confirmed or bool(committed)
        super()._tell_watchers(committed)

    def _rollback(self) -> None:
        # Overrides BaseDatabaseWrapper._rollback.
        if self.is_bound:
            self.leave_bound_branch()
        super()._rollback()

    def leave_bound_branch(self) -> None:
        """Leave the prepared branch to a recovery, and give its session up. Sends nothing."""
        self.is_bound, self.left_branch = False, True
        # The writes take effect later, or never. So the markers in the cache must stay.
        self._leave_writes()
        self.leave_branch()

    def _close(self) -> None:
        # Overrides BaseDatabaseWrapper._close, which leaves a prepared branch as it is.
        if self.is_bound:
            self.leave_bound_branch()
        super()._close()
