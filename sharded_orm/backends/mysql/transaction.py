"""The state of a transaction on the server, and its statements that have not been sent yet."""

from __future__ import annotations

from collections.abc import Sequence

from sharded_orm.backends import savepoints

BEGIN = b"BEGIN"
AUTOCOMMIT_OFF = b"SET autocommit=0"
AUTOCOMMIT_ON = b"SET autocommit=1"


class ServerTransaction:
    """The state of a virtual connection's transaction on the server.

    ``BEGIN`` and savepoints are not sent at once. They are sent together with the next statement that
    the server must execute. One object serves all transactions of the connection, one after the other.
    """

    __slots__ = ("is_open", "only_reads", "pending", "strict", "unsure")

    def __init__(self) -> None:
        #: Whether the server has begun the transaction.
        self.is_open = False
        #: Whether the session was put into autocommit=0, and so is always in a transaction.
        self.strict = False
        #: Whether an error or an implicit commit may have ended the transaction or removed savepoints.
        self.unsure = False
        #: Whether all statements of the transaction were plain reads (StatementKind.READ).
        self.only_reads = True
        #: Savepoint statements that will be sent with the next statement.
        self.pending: list[bytes] = []

    @property
    def is_as_autocommit(self) -> bool:
        """Whether a read in the transaction would return the same in autocommit, if the isolation
        level is READ COMMITTED.

        That is so if the transaction has only read, and if no error or implicit commit has made its
        state uncertain.
        """
        return self.only_reads and not self.strict and not self.unsure

    def prefix(self, *, plain: bool) -> list[bytes]:
        """Return the statements to send before the next one: BEGIN and savepoints, if needed.

        If ``plain`` is False, or if the transaction may have ended unnoticed, ``SET autocommit=0``
        is returned in place of BEGIN, once per transaction.

        :param plain: False if the next statement commits implicitly or leaves state in the session;
            otherwise True.
        """
        if not self.strict and (self.unsure or not plain):
            return [AUTOCOMMIT_OFF, *self.pending]
        return self.pending[:] if self.is_open else [BEGIN, *self.pending]

    def record(self, executed: Sequence[bytes]) -> None:
        """Note that the server has executed the statements ``executed``.

        :param executed: the first statements of what :meth:`prefix` returned, or all of them.
        """
        begins = 0
        if executed and executed[0] in (BEGIN, AUTOCOMMIT_OFF):
            begins = 1
            self.is_open = True
            self.strict = self.strict or executed[0] == AUTOCOMMIT_OFF
        if self.pending and self.is_open:
            del self.pending[: len(executed) - begins]

    def ending(self, statement: bytes) -> list[bytes]:
        """Return the statements that end the transaction and restore autocommit.

        :param statement: COMMIT or ROLLBACK.
        """
        return [statement, AUTOCOMMIT_ON] if self.strict else [statement]

    def forget(self) -> None:
        """Reset all attributes. To be called when the transaction has ended on the server."""
        self.is_open = self.strict = self.unsure = False
        self.only_reads = True
        self.pending.clear()

    def defer(self, sql: str) -> bool:
        """Defer one of Django's savepoint statements: send it with a later statement, or never.

        Return True if ``sql`` is deferred, and False if it must be sent now.
        """
        return savepoints.defer(sql, self.pending, may_release=self.is_open and not self.unsure)
