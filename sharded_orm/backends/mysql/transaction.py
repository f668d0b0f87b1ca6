"""What the server has been sent of a transaction, and what waits for the next statement."""

from __future__ import annotations

from collections.abc import Sequence

from sharded_orm.backends.mysql.statement_kind import StatementKind, savepoint_name

BEGIN = b"BEGIN"
AUTOCOMMIT_OFF = b"SET autocommit=0"
AUTOCOMMIT_ON = b"SET autocommit=1"


class ServerTransaction:
    """The transaction of a virtual connection on its session; one object for all of them in turn.

    ``BEGIN`` and savepoints travel with the next statement that the server must see.
    """

    __slots__ = ("is_open", "pending", "strict", "unsure")

    def __init__(self) -> None:
        #: The server has begun the transaction.
        self.is_open = False
        #: The session is in autocommit=0 on our behalf: it always has a transaction.
        self.strict = False
        #: An error or an implicit commit may have ended the transaction, or removed savepoints.
        self.unsure = False
        #: Savepoint statements that the next statement takes along.
        self.pending: list[bytes] = []

    def prefix(self, *, plain: bool) -> list[bytes]:
        """The statements that must go to the server before the next one.

        :param plain: the next one neither commits implicitly nor leaves session state.
        """
        if not self.strict and (self.unsure or not plain):
            return [AUTOCOMMIT_OFF, *self.pending]
        return self.pending[:] if self.is_open else [BEGIN, *self.pending]

    def record(self, executed: Sequence[bytes]) -> None:
        """The server has executed these statements, the first ones of a prefix."""
        begins = 0
        if executed and executed[0] in (BEGIN, AUTOCOMMIT_OFF):
            begins = 1
            self.is_open = True
            self.strict = self.strict or executed[0] == AUTOCOMMIT_OFF
        if self.pending and self.is_open:
            del self.pending[: len(executed) - begins]

    def ending(self, statement: bytes) -> list[bytes]:
        """The statements that end the transaction.

        :param statement: COMMIT or ROLLBACK.
        """
        return [statement, AUTOCOMMIT_ON] if self.strict else [statement]

    def forget(self) -> None:
        """The transaction is over, on the server as well."""
        self.is_open = self.strict = self.unsure = False
        self.pending.clear()

    def defer(self, kind: StatementKind, sql: str) -> bool:
        """Keep one of Django's savepoint statements back; False if the server must see it now.

        A savepoint that ends before another statement follows costs nothing.
        """
        statement = sql.encode()
        if kind is StatementKind.SAVEPOINT:
            self.pending.append(statement)
            return True
        created = b"SAVEPOINT " + savepoint_name(sql).encode()
        if created in self.pending:
            # What came after it belonged to it. ROLLBACK TO keeps the savepoint itself.
            keep = kind is StatementKind.ROLLBACK_TO
            del self.pending[self.pending.index(created) + keep :]
            return True
        if kind is StatementKind.RELEASE and self.is_open and not self.unsure:
            # It cannot fail.
            self.pending.append(statement)
            return True
        return False
