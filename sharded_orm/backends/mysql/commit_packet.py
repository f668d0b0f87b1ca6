"""Hold back the last writes of a transaction, to send them in one packet with its COMMIT.

This saves a round trip to the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from MySQLdb import OperationalError

from sharded_orm.backends.mysql.errors import error_for_callers
from sharded_orm.backends.mysql.session import is_lost
from sharded_orm.backends.mysql.transaction import AUTOCOMMIT_OFF, AUTOCOMMIT_ON, COMMIT
from sharded_orm.backends.session_mode import SessionMode
from sharded_orm.backends.write_hooks.route_check import check_route

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.node import NodePool
    from sharded_orm.backends.mysql.session import NodeSession
    from sharded_orm.backends.mysql.transaction import ServerTransaction


class CommitPacket:
    """Base class of :class:`~sharded_orm.backends.mysql.connection.VirtualConnection` that sends
    the last writes of a transaction together with its COMMIT, in one packet.

    While :meth:`collecting` is active, INSERTs, UPDATEs and DELETEs that return no rows wait in
    ``waiting``. If the server refuses one of them, it does not execute the COMMIT. If the
    transaction runs another statement before the COMMIT, such as a SELECT, the waiting statements
    are sent before it.

    Invariant: while statements wait, their session stays leased. Their key or shard may move
    meanwhile. The fence of the move (triggers that refuse writes) then treats the waiting
    statements like those of the transaction that were sent already.
    """

    if not TYPE_CHECKING:  # The subclass has slots for these attributes.
        __slots__ = ()

    if TYPE_CHECKING:
        alias: str
        pool: NodePool
        schema: str | None
        mode: SessionMode
        session: NodeSession | None
        insert_session: NodeSession | None
        transaction: ServerTransaction
        #: Whether :meth:`collecting` is active: INSERTs, UPDATEs and DELETEs are kept until the
        #: COMMIT.
        collects: bool
        #: The statements that are kept until the COMMIT, as pairs (statement, cursor that executed
        #: it).
        waiting: list[tuple[bytes, Any]]
        lease_session: Callable[[], NodeSession]
        begin_statement: Callable[[], tuple[NodeSession, list[bytes]]]
        record_prefix: Callable[[list[bytes], int], None]
        settle: Callable[[], None]
        _lose: Callable[[BaseException], BaseException]

    @property
    def may_wait(self) -> bool:
        """Whether statements of the open transaction can be sent with its COMMIT.

        False in a two-phase commit, because each shard prepares its transaction before the COMMIT.
        """
        return (
            self.mode is SessionMode.TRANSACTION
            and not self.transaction.plain_only
            and not (self.session is not None and self.session.split)
        )

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep the statements of the ``with`` block, to send them with the COMMIT, if :attr:`may_wait`
        allows that.
        """
        if self.mode is SessionMode.TRANSACTION and self.session is None:
            self.lease_session()
        self.collects = self.may_wait
        try:
            yield
        finally:
            self.collects = False

    def wait_for_commit(self, cursor: Any, query: Any, args: Any) -> bytes:
        """Keep a statement of ``cursor`` until the COMMIT. The ``lastrowid`` of the cursor is set
        only when the statement has been sent.

        Return the statement with its parameters filled in.
        """
        assert self.session is not None
        check_route()
        statement = self.session.bind(query, args)
        self.waiting.append((statement, cursor))
        self.transaction.only_reads = False
        return statement

    def send_waiting(self) -> None:
        """Send the statements that were kept for the COMMIT now, because the transaction is about
        to run a statement that must come after them.
        """
        self._send_waiting(is_commit=False)

    def commit_waiting(self) -> None:
        """Send the statements that were kept for the COMMIT together with the COMMIT, in one packet."""
        self._send_waiting(is_commit=True)
        self.transaction.forget()
        self.settle()

    def _send_waiting(self, *, is_commit: bool) -> None:
        waiting = self.waiting[:]
        try:
            # Empty the list for the moment. Otherwise, begin_statement() would send the statements
            # in it.
            self.waiting.clear()
            session, prefix = self.begin_statement()
            self.waiting += waiting
            ending = []
            if is_commit:
                is_strict = self.transaction.strict or AUTOCOMMIT_OFF in prefix
                ending = [COMMIT, AUTOCOMMIT_ON] if is_strict else [COMMIT]
            try:
                ids = session.run_each(*prefix, *(statement for statement, _ in waiting), *ending)
            except BaseException as exc:
                self._record_failure(exc, prefix)
                if isinstance(exc, OperationalError) and (error := error_for_callers(exc, self)):
                    raise error from exc
                raise
        finally:
            self.waiting.clear()
        session.schema = self.schema
        self.record_prefix(prefix, len(prefix))
        for (_, cursor), number in zip(waiting, ids[len(prefix) :], strict=False):
            cursor.lastrowid = number
            if number:
                session.inserter = self
                self.insert_session = session

    def _record_failure(self, exc: BaseException, prefix: list[bytes]) -> None:
        if is_lost(exc):
            # The server may have committed the transaction before the session was lost, or may do
            # so later. Count the transaction as open, so that _lose() records that work may be
            # lost.
            self.transaction.is_open = True
            self._lose(exc)
            return
        # The server has refused a statement, and executed none of the later ones. Record which
        # statements of the prefix, such as BEGIN, it had executed before.
        self.record_prefix(prefix, min(len(prefix), getattr(exc, "prefix_done", 0)))
        self.transaction.record_error(exc, self.pool.undoing)
