"""Two-phase commits (XA) on MySQL and MariaDB: the methods with which an alias's virtual connection
takes part in one.
"""

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
    """Base class of :class:`~sharded_orm.backends.mysql.connection.VirtualConnection`: its part in
    a two-phase commit.

    The part of the transaction on one shard is an XA branch. The methods begin the branch and
    prepare it, or leave a prepared branch on the server for a recovery.
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
        """Make the next transaction part of a two-phase commit. Sends nothing.

        :param branch: the name of the XA branch that the next transaction becomes, as XA statements
            need it. Empty on the shard that stores the decision to commit, where an ordinary
            transaction begins.
        :raises TwoPhaseMisused: the connection is pinned, which means that it keeps a session in
            which the program has left state. This state may conflict with XA.
        """
        if self.mode is SessionMode.PINNED:
            raise TwoPhaseMisused(
                f"Alias {self.alias!r} keeps a session with state of its own, which cannot take part in"
                " a block with two_phase=True. Close its connection before the block."
            )
        self.transaction.branch, self.transaction.plain_only = branch, True

    def prepare_branch(self) -> None:
        """Prepare the XA branch (the part of a two-phase transaction on this shard): make the
        server store it for a later commit or rollback. One round trip.

        :raises MySQLdb.Error: the branch is not prepared. But if the error is the loss of the
            session, the server may have prepared the branch shortly before.
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
        """Close the session without ending its XA branch (this shard's part of a two-phase commit).

        If the branch is prepared, it stays on the server until a recovery commits it or rolls it
        back.
        """
        if self.mode < SessionMode.LOST and self.session is not None:
            self._lose(OperationalError("the branch is left to a recovery"))
        if self.mode is SessionMode.LOST:
            self.rollback()
