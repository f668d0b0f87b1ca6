"""The methods with which the virtual connection of a Django alias takes part in a two-phase commit."""

from __future__ import annotations

import psycopg

from sharded_orm.backends.postgresql import branches
from sharded_orm.backends.postgresql.session import PostgreSQLNodeSession
from sharded_orm.backends.postgresql.session_lease import SessionLease
from sharded_orm.backends.postgresql.statement_kind import reason
from sharded_orm.backends.session_mode import SessionMode
from sharded_orm.exceptions import TwoPhaseMisused


class BranchPreparation(SessionLease):
    """Base class of an alias's virtual connection, for its part in a two-phase commit.

    A branch is the part of a two-phase commit on one shard. The methods prepare the branch, end it,
    or leave it prepared on the server. A prepared transaction belongs to no session. So any session
    of the node can commit or roll it back, even behind a connection pooler.
    """

    #: The name of the transaction if it is a branch (one shard's part of a two-phase commit);
    #: otherwise "".
    branch = ""
    #: Whether the branch (this shard's part of the two-phase commit) is prepared. Only its commit or
    #: rollback can follow then.
    is_prepared = False

    #: Whether the transaction is part of a two-phase commit.
    is_shared = False

    def begin_branch(self, name: str = "") -> None:
        """Make the next transaction follow the rules of a two-phase commit. Sends nothing.

        :param name: the name of the branch (the part of the two-phase commit on this shard) that
            the next transaction becomes. Empty for the transaction that stores the decision to
            commit.
        :raises TwoPhaseMisused: the connection keeps a session with state of its own, which would
            be lost when the session is closed after the branch.
        """
        if self.mode is SessionMode.PINNED:
            raise TwoPhaseMisused(
                f"Alias {self.alias!r} keeps a session with state of its own, which cannot take part in"
                " a block with two_phase=True. Close its connection before the block."
            )
        self.branch, self.is_shared = name, True

    def pin(self, reason: str, *, own_path: bool = False) -> PostgreSQLNodeSession:
        if self.is_shared:
            raise TwoPhaseMisused(
                f"Alias {self.alias!r}: {reason!r}, which leaves state in the session, cannot run in a block"
                " with two_phase=True. Run it outside of the block."
            )
        return super().pin(reason, own_path=own_path)

    def refuse_control(self, sql: str) -> None:
        """Refuse a statement that would end the transaction of a two-phase commit.

        :param sql: the statement.
        :raises TwoPhaseMisused: the transaction is part of a two-phase commit.
        """
        if self.is_shared:
            raise TwoPhaseMisused(
                f"Alias {self.alias!r}: {reason(sql)!r}, which commits implicitly or ends the transaction,"
                " cannot run in a block with two_phase=True. Run it outside of the block."
            )

    def prepare_branch(self) -> None:
        """Prepare the transaction for a two-phase commit. One round trip.

        :raises psycopg.Error: the transaction could not be prepared. But if the session is lost, the
            server may have prepared the transaction before the loss.
        """
        session = self.session
        if self.mode >= SessionMode.LOST or session is None or not session.in_transaction:
            raise self._lost_error()
        self._expire_cursors(at_close=False)
        try:
            status = session.raw.execute(branches.prepare_statement(self.branch)).statusmessage
        except BaseException as exc:
            if not session.is_usable:
                self._lose(exc)
            raise
        if status != "PREPARE TRANSACTION":
            # If an earlier statement has failed, the server rolls the transaction back instead of
            # preparing it, and reports no error. So raise an error here.
            raise psycopg.errors.InFailedSqlTransaction(
                f"the transaction on alias {self.alias!r} has failed, and was rolled back"
            )
        self.is_prepared = True

    def leave_branch(self) -> None:
        """Close the session. If its transaction is prepared for a two-phase commit, the transaction
        stays on the server.
        """
        if self.mode < SessionMode.LOST and self.branch and not self.autocommitted:
            self.is_prepared = False
            self._lose(psycopg.OperationalError("the branch is left to a recovery"))
        if self.mode is SessionMode.LOST:
            self.rollback()

    def _end_prepared(self, how: str) -> None:
        session = self.session
        if session is None:
            session = self.session = self.lease_session()
        try:
            branches.end_on(session, self.branch, commit=how == "commit")
        except BaseException as exc:
            # The statement has failed. The prepared transaction stays on the server, until the
            # library's recovery ends it. So only close the session.
            self._lose(exc)
            raise
        self._forget_transaction()
        self.settle()

    def _forget_branch(self) -> None:
        self.branch, self.is_prepared, self.is_shared = "", False, False

    def rollback(self) -> None:
        raise NotImplementedError

    def _forget_transaction(self) -> None:
        raise NotImplementedError

    def _expire_cursors(self, *, at_close: bool) -> None:
        raise NotImplementedError
