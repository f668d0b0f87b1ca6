"""The state of a transaction on the server, and its deferred statements, which are not sent yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from MySQLdb import MySQLError

from sharded_orm.backends import savepoints
from sharded_orm.exceptions import TwoPhaseMisused

BEGIN = b"BEGIN"
AUTOCOMMIT_OFF = b"SET autocommit=0"
AUTOCOMMIT_ON = b"SET autocommit=1"
COMMIT = b"COMMIT"

# Errors by which the server rolls back the whole transaction, each as the first arguments of the
# exception: ER_CHECKREAD (with innodb_snapshot_isolation), ER_LOCK_TABLE_FULL and ER_LOCK_DEADLOCK.
_UNDOING = ((1020,), (1206,), (1213,))


class ServerTransaction:
    """The state of the transaction that a virtual connection (the ``connection`` of a Django alias)
    has on the server.

    ``BEGIN`` and savepoints are not sent at once. They are sent together with the next statement that
    the server must execute. One object serves all transactions of the connection, one after the other.
    """

    __slots__ = (
        "branch",
        "is_open",
        "is_prepared",
        "is_undone",
        "only_reads",
        "pending",
        "plain_only",
        "strict",
        "unsure",
    )

    def __init__(self) -> None:
        #: Whether the server has begun the transaction.
        self.is_open = False
        #: Whether the session was put into autocommit=0, and so is always in a transaction.
        self.strict = False
        #: Whether an error or an implicit commit may have ended the transaction or removed savepoints.
        self.unsure = False
        #: Whether an error such as a deadlock has rolled back all statements of the transaction before
        #: it. Later statements may have begun another one.
        self.is_undone = False
        #: Whether all statements of the transaction so far were plain reads.
        self.only_reads = True
        #: The name of the transaction's XA branch (its part in a two-phase commit), in the syntax of XA
        #: statements; b"" if the transaction is an ordinary one.
        self.branch = b""
        #: Whether the XA branch (this shard's part of a two-phase commit) is prepared. Only its commit
        #: or rollback can follow then.
        self.is_prepared = False
        #: Whether the transaction refuses statements that commit implicitly or leave state in the
        #: session, as a part of a two-phase commit does.
        self.plain_only = False
        #: Savepoint statements that will be sent with the next statement.
        self.pending: list[bytes] = []

    @property
    def begin(self) -> bytes:
        """The statement that begins the transaction."""
        return b"XA START " + self.branch if self.branch else BEGIN

    def begins_in(self, prefix: Sequence[bytes]) -> bool:
        """Whether one of the statements ``prefix`` begins the transaction."""
        return self.begin in prefix or AUTOCOMMIT_OFF in prefix

    @property
    def is_as_autocommit(self) -> bool:
        """Whether a read in this transaction returns the same as a read in autocommit, if the
        isolation level is READ COMMITTED.

        True if the transaction has only read, and if no error or implicit commit has made its state
        uncertain.
        """
        return self.only_reads and not self.strict and not self.unsure

    def prefix(self, *, plain: bool) -> list[bytes]:
        """Return the statements to send before the next one: BEGIN and savepoints, if needed.

        If ``plain`` is False, or if the transaction may have ended unnoticed, the result has ``SET
        autocommit=0`` in place of BEGIN, once per transaction. Even if the server has ended the
        transaction, the next statement then begins a new one.

        :param plain: False if the next statement commits implicitly or leaves state in the session;
            otherwise True.
        :raises TwoPhaseMisused: ``plain`` is False, and the transaction is part of a two-phase
            commit, which takes plain statements only.
        """
        if self.plain_only and not plain:
            raise TwoPhaseMisused(
                "A statement that commits implicitly, or leaves state in the session, cannot run in a"
                " block with two_phase=True. Run it outside of the block."
            )
        if self.branch:
            # SET autocommit=0 is not needed, because an XA branch (a part of a two-phase commit)
            # cannot end unnoticed. If an error rolls the branch back, the server refuses every
            # statement except XA END and XA ROLLBACK.
            return self.pending[:] if self.is_open else [self.begin, *self.pending]
        if not self.strict and (self.unsure or not plain):
            return [AUTOCOMMIT_OFF, *self.pending]
        return self.pending[:] if self.is_open else [BEGIN, *self.pending]

    def record(self, executed: Sequence[bytes]) -> None:
        """Record that the server has executed the statements ``executed``.

        :param executed: the statements that :meth:`prefix` returned, or only the first of them.
        """
        begins = 0
        if executed and executed[0] in (self.begin, AUTOCOMMIT_OFF):
            begins = 1
            self.is_open = True
            self.strict = self.strict or executed[0] == AUTOCOMMIT_OFF
        if self.pending and self.is_open:
            del self.pending[: len(executed) - begins]

    def end(self, run: Callable[..., None], statement: bytes) -> None:
        """End the transaction on the server, and restore autocommit.

        :param run: sends statements in one packet.
        :param statement: COMMIT or ROLLBACK.
        """
        if not self.branch:
            run(*([statement, AUTOCOMMIT_ON] if self.strict else [statement]))
            return
        end = b"XA END " + self.branch
        ending = b"XA " + statement + b" " + self.branch
        if self.is_prepared:
            run(ending)
        elif statement == COMMIT:
            run(end, ending + b" ONE PHASE")
        else:
            try:
                run(end)
            except MySQLError:
                # Ignore the error. XA END fails if it was sent before, or if an error such as a
                # deadlock has rolled back the branch. If the session is lost, the next statement
                # raises an error.
                pass
            run(ending)

    def record_error(self, exc: BaseException, *, in_autocommit: bool) -> None:
        """Record that the server has refused a statement with the error ``exc``."""
        self.unsure = True
        if not in_autocommit and exc.args[:1] in _UNDOING:
            self.is_undone = True

    def forget(self) -> None:
        """Reset all attributes. Must be called when the transaction has ended on the server."""
        self.is_open = self.strict = self.unsure = self.is_undone = False
        self.only_reads = True
        self.branch, self.is_prepared, self.plain_only = b"", False, False
        self.pending.clear()

    def defer(self, sql: str) -> bool:
        """Defer one of Django's savepoint statements: store it until the next statement is sent.

        Return True if ``sql`` is deferred, and False if it must be sent now.
        """
        return savepoints.defer(sql, self.pending, may_release=self.is_open and not self.unsure)
