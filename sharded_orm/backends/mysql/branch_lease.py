"""The virtual connection of a Django alias whose transaction is an XA branch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from MySQLdb import OperationalError

from sharded_orm.backends.session_mode import SessionMode
from sharded_orm.exceptions import TwoPhaseMisused

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.session import NodeSession
    from sharded_orm.backends.mysql.transaction import ServerTransaction


class BranchLease:
    """Base class of :class:`~sharded_orm.backends.mysql.connection.VirtualConnection`.

    Its methods begin an XA branch, prepare it, and leave it on the server, prepared, while the session
    is closed.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        alias: str
        mode: SessionMode
        session: NodeSession | None
        transaction: ServerTransaction
        rollback: Callable[[], None]
        _lose: Callable[[BaseException], BaseException]
        _lost_error: Callable[[], BaseException]
        _watched_session: Callable[[], AbstractContextManager[NodeSession]]

    def begin_branch(self, branch: bytes = b"") -> None:
        """Let the next transaction be an XA branch, or the ordinary one that decides. Sends nothing.

        :param branch: the name of the branch, as XA statements take it.
        :raises TwoPhaseMisused: a session is pinned: XA and its own state may exclude each other.
        """
        if self.mode is SessionMode.PINNED:
            raise TwoPhaseMisused(
                f"Alias {self.alias!r} keeps a session with state of its own, which cannot take part in"
                " a block with two_phase=True. Close its connection before the block."
            )
        self.transaction.branch, self.transaction.plain_only = branch, True

    def prepare_branch(self) -> None:
        """Prepare the branch. One round trip.

        :raises MySQLdb.Error: the branch is not prepared or, if the session is lost, may be.
        """
        transaction: Any = self.transaction
        if self.mode >= SessionMode.LOST or not transaction.is_open:
            raise self._lost_error()
        branch = transaction.branch
        with self._watched_session() as session:
            schema, session.schema = session.schema, None
            session.run(b"XA END " + branch, b"XA PREPARE " + branch)
            session.schema = schema
        transaction.is_prepared = True

    def leave_branch(self) -> None:
        """Close the session with which the branch was prepared. The branch stays on the server."""
        if self.mode < SessionMode.LOST and self.session is not None:
            self._lose(OperationalError("the branch is left to a recovery"))
        if self.mode is SessionMode.LOST:
            self.rollback()
