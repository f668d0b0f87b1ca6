"""Two-phase commits on PostgreSQL: the methods with which an alias's virtual connection prepares
its part of the transaction, and later commits it or rolls it back.
"""

from __future__ import annotations

import psycopg

from sharded_orm.backends.postgresql import branches
from sharded_orm.backends.postgresql.session import PostgreSQLNodeSession
from sharded_orm.backends.postgresql.session_lease import SessionLease
from sharded_orm.backends.postgresql.statement_kind import reason
from sharded_orm.backends.session_mode import SessionMode
from sharded_orm.exceptions import TwoPhaseMisused


class BranchPreparation(SessionLease):
    """Base class of an alias's virtual connection: its part in a two-phase commit.

    In a two-phase commit, the part of the transaction on one shard is called a branch. First, each
    branch is prepared, which means that its server stores it. A prepared branch belongs to no
    session, and survives the end of the session that has prepared it. So any session of the node
    can later commit it or roll it back, even behind a connection pooler.
    """

    #: The name under which the server prepares the current transaction, if the transaction is a
    #: branch (one shard's part of a two-phase commit). Otherwise "".
    branch = ""
    #: Whether the server has prepared the current branch (one shard's part of a two-phase commit).
    #: A prepared branch accepts no more statements: it can only be committed or rolled back.
    is_prepared = False

    #: Whether the current or next transaction is part of a two-phase commit. While it is,
    #: statements that would end the transaction, or leave state in the session, are refused.
    is_shared = False

    def begin_branch(self, name: str = "") -> None:
        """Make the next transaction a part of a two-phase commit. Sends nothing to the server.

        :param name: the name of the branch (this shard's part of the two-phase commit). Empty on
            the decider, the shard whose commit decides for all branches, because its transaction is
            not prepared.
        :raises TwoPhaseMisused: the connection is pinned, because a statement such as ``SET`` has
            left state in its session. The state could be lost, because the session may be closed
            after the branch.
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
        """Refuse a statement that would end the current transaction, if this is part of a two-phase
        commit.

        For example, the project runs ``COMMIT`` as raw SQL. Does nothing outside of a two-phase
        commit.

        :param sql: the statement.
        :raises TwoPhaseMisused: the current transaction is part of a two-phase commit.
        """
        if self.is_shared:
            raise TwoPhaseMisused(
                f"Alias {self.alias!r}: {reason(sql)!r}, which commits implicitly or ends the transaction,"
                " cannot run in a block with two_phase=True. Run it outside of the block."
            )

    def prepare_branch(self) -> None:
        """Prepare the branch: make the server store the current transaction for a later commit or
        rollback.

        One round trip.

        :raises psycopg.Error: the server has not prepared the transaction. But if the error is the
            loss of the session, the server may have prepared the transaction shortly before.
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
        """Close the session without a commit or rollback of its branch.

        If the server has prepared the branch, the branch stays there until a recovery commits it or
        rolls it back. Otherwise the server rolls the transaction back.
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
            # The COMMIT PREPARED or ROLLBACK PREPARED has failed, so the prepared branch may still
            # be on the server. The library's recovery ends the branch later. Only close the session
            # here.
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
