"""Keep the last statements of a transaction, to send them in one packet with the COMMIT."""

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
    from sharded_orm.backends.mysql.session import NodeSession
    from sharded_orm.backends.mysql.transaction import ServerTransaction


class CommitPacket:
    """Statements that are sent together with the COMMIT: a base class of
    :class:`~sharded_orm.backends.mysql.connection.VirtualConnection`.

    While :meth:`collecting` is active, INSERTs, UPDATEs and DELETEs that return no rows wait, and
    are sent in the packet of the COMMIT. If the server refuses one of them, it does not execute the
    COMMIT. Another statement that must run earlier sends the waiting ones first.

    Invariant: while statements wait, their session is leased. So the fence of a key or shard that
    moves meanwhile affects them as if they had been sent.
    """

    if not TYPE_CHECKING:  # The subclass has slots for these attributes.
        __slots__ = ()

    if TYPE_CHECKING:
        alias: str
        schema: str | None
        mode: SessionMode
        session: NodeSession | None
        insert_session: NodeSession | None
        transaction: ServerTransaction
        #: Whether INSERTs, UPDATEs and DELETEs are kept now, to be sent with the COMMIT.
        collects: bool
        #: The statements that will be sent with the COMMIT, each with its cursor.
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
        """Keep a statement of ``cursor`` until the COMMIT. The COMMIT then sets ``lastrowid`` of
        the cursor.

        Return the statement as it will be sent.
        """
        assert self.session is not None
        check_route()
        statement = self.session.bind(query, args)
        self.waiting.append((statement, cursor))
        self.transaction.only_reads = False
        return statement

    def send_waiting(self) -> None:
        """Send the statements that were kept for the COMMIT now, because another statement is to be
        executed after them.
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
            # Empty the list for the moment, because begin_statement() would send the statements in it.
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
            # The session is lost. The server may have committed the transaction, or may do so later.
            # Count the transaction as open, so that _lose() records the loss.
            self.transaction.is_open = True
            self._lose(exc)
            return
        # Record the prefix statements that have succeeded. The server has refused a statement, and
        # executed none of the later ones.
        self.record_prefix(prefix, min(len(prefix), getattr(exc, "prefix_done", 0)))
        self.transaction.record_error(exc, in_autocommit=False)
