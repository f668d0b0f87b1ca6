"""The state of a transaction on the server (whether it has begun, for example), and its deferred
statements, which are not sent yet.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Final

from MySQLdb import MySQLError

from sharded_orm.backends import savepoints
from sharded_orm.exceptions import TwoPhaseMisused

BEGIN = b"BEGIN"
AUTOCOMMIT_OFF = b"SET autocommit=0"
AUTOCOMMIT_ON = b"SET autocommit=1"
COMMIT = b"COMMIT"

# Errors after which the server has rolled back the whole transaction: ER_CHECKREAD (with
# innodb_snapshot_isolation), ER_LOCK_TABLE_FULL and ER_LOCK_DEADLOCK. Each tuple has the number of
# an error, and is compared with args[:1] of the exception.
UNDOING: Final = frozenset([(1020,), (1206,), (1213,)])


class ServerTransaction:
    """What a virtual connection (the ``connection`` of a Django alias) knows about its transaction
    on the server: for example, whether the server has begun it.

    ``BEGIN`` and savepoints are not sent at once, but together with the next statement that the
    server must execute. One object serves all transactions of the connection, one after the other.
    """

    __slots__ = (
        "branch",
        "existing",
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
        #: Whether the session was put into autocommit=0. The server then begins a new transaction
        #: by itself whenever one has ended.
        self.strict = False
        #: Whether an error or an implicit commit may have ended the transaction or removed savepoints.
        self.unsure = False
        #: Whether an error such as a deadlock has rolled back the transaction, with all its
        #: statements up to then. Statements after the error may have begun another transaction.
        self.is_undone = False
        #: Whether all statements of the transaction so far were plain reads, which change and lock
        #: nothing.
        self.only_reads = True
        #: If the transaction is an XA branch (this shard's part of a two-phase commit), the name of
        #: the branch, written as in an XA statement. b"" for an ordinary transaction.
        self.branch = b""
        #: Whether the XA branch (this shard's part of a two-phase commit) is prepared. After that,
        #: it can only be committed or rolled back.
        self.is_prepared = False
        #: Whether the transaction is part of a two-phase commit. It then refuses statements that
        #: commit implicitly or leave state in the session.
        self.plain_only = False
        #: Deferred savepoint statements, which are sent together with the next statement.
        self.pending: list[bytes] = []
        #: The names of Django's savepoints in the transaction, also of those in ``pending``.
        self.existing: list[str] = []

    @property
    def begin(self) -> bytes:
        """The statement that begins the transaction: ``BEGIN``, or ``XA START`` for a part of a
        two-phase commit.
        """
        return b"XA START " + self.branch if self.branch else BEGIN

    def begins_in(self, prefix: Sequence[bytes]) -> bool:
        """Whether ``prefix``, the statements that are sent before the next one, contains the
        statement that begins the transaction.
        """
        return self.begin in prefix or AUTOCOMMIT_OFF in prefix

    @property
    def is_as_autocommit(self) -> bool:
        """Whether a read in this transaction returns what it would return in autocommit (with the
        isolation level READ COMMITTED).

        That is so if the transaction has only read, and no error or implicit commit has made its
        state uncertain.
        """
        return self.only_reads and not self.strict and not self.unsure

    def prefix(self, *, plain: bool) -> list[bytes]:
        """Return the statements to send before the next one: ``BEGIN`` and savepoints, if needed.

        ``SET autocommit=0`` takes the place of ``BEGIN``, once per transaction, in two cases:
        ``plain`` is False, or the server may have ended the transaction unnoticed. With
        autocommit=0, the server begins a new transaction by itself, so that later statements do not
        commit one by one.

        :param plain: False if the next statement commits implicitly or leaves state in the session;
            otherwise True.
        :raises TwoPhaseMisused: ``plain`` is False, and the transaction is part of a two-phase
            commit.
        """
        if self.plain_only and not plain:
            raise TwoPhaseMisused(
                "A statement that commits implicitly, or leaves state in the session, cannot run in a"
                " block with two_phase=True. Run it outside of the block."
            )
        if self.branch:
            # An XA branch (a part of a two-phase commit) cannot end unnoticed, so SET autocommit=0
            # is not needed. If an error rolls the branch back, the server refuses every statement
            # except XA END and XA ROLLBACK.
            return self.pending[:] if self.is_open else [self.begin, *self.pending]
        if not self.strict and (self.unsure or not plain):
            return [AUTOCOMMIT_OFF, *self.pending]
        return self.pending[:] if self.is_open else [BEGIN, *self.pending]

    def record(self, executed: Sequence[bytes]) -> None:
        """Record that the server has executed statements that :meth:`prefix` returned. For example,
        it has begun the transaction.

        :param executed: these statements, or only the first of them if a later one failed.
        """
        begins = 0
        if executed and executed[0] in (self.begin, AUTOCOMMIT_OFF):
            begins = 1
            self.is_open = True
            self.strict = self.strict or executed[0] == AUTOCOMMIT_OFF
        if self.pending and self.is_open:
            del self.pending[: len(executed) - begins]

    def end(self, run: Callable[..., None], statement: bytes) -> None:
        """End the transaction on the server. If the session was put into autocommit=0, set
        autocommit=1 again.

        :param run: function that sends statements in one packet.
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
                # Ignore the error: XA END fails if it was already sent, or if an error such as a
                # deadlock has rolled back the branch. If the session is lost, the next statement
                # raises an error.
                pass
            run(ending)

    def record_error(self, exc: BaseException, undoing: Container[tuple[int, ...]]) -> None:
        """Record that the server has refused a statement with the error ``exc``.

        :param undoing: the errors after which the server has rolled back the whole transaction;
            empty in autocommit.
        """
        self.unsure = True
        if exc.args[:1] in undoing:
            self.is_undone = True

    def forget(self) -> None:
        """Make the object ready for the next transaction, after this one has ended on the server."""
        self.is_open = self.strict = self.unsure = self.is_undone = False
        self.only_reads = True
        self.branch, self.is_prepared, self.plain_only = b"", False, False
        self.pending.clear()
        self.existing.clear()

    def defer(self, sql: str) -> bool:
        """If a savepoint statement of Django's can wait, keep it until the next statement is sent.

        Return True if it is kept, and False if it must be sent now.

        :param sql: a statement that :func:`~sharded_orm.backends.savepoints.parse_savepoint` knows.
        """
        statement = savepoints.parse_savepoint(sql.strip())
        assert statement is not None
        may_release = self.is_open and not self.unsure
        return savepoints.defer(statement, self.pending, self.existing, may_release=may_release)
