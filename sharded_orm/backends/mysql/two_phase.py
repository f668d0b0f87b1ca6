"""The methods with which the virtual connection of a Django alias takes part in a two-phase commit
(XA).
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
    """Base class of :class:`~sharded_orm.backends.mysql.connection.VirtualConnection` for two-phase
    commits.

    An XA branch is the part of a two-phase transaction on one shard. The methods begin a branch,
    prepare it, and close the session without ending the prepared branch.
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
        """Make the next transaction follow the rules of a two-phase commit. Sends nothing.

        :param branch: the name of the XA branch that the next transaction becomes, in the syntax of
            XA statements. Empty for the ordinary transaction that stores the decision to commit.
        :raises TwoPhaseMisused: a session is pinned (kept until close()). Such a session has state
            of its own, which may conflict with XA.
        """
        if self.mode is SessionMode.PINNED:
            raise TwoPhaseMisused(
                f"Alias {self.alias!r} keeps a session with state of its own, which cannot take part in"
                " a block with two_phase=True. Close its connection before the block."
            )
        self.transaction.branch, self.transaction.plain_only = branch, True

    def prepare_branch(self) -> None:
        """Prepare the XA branch, the part of a two-phase transaction on this shard, for its commit.
        One round trip.

        :raises MySQLdb.Error: the branch is not prepared; if the session is lost, it may be
            prepared.
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
        """Close the session that has prepared the XA branch (this shard's part of a two-phase commit).
        The prepared branch stays on the server.
        """
        if self.mode < SessionMode.LOST and self.session is not None:
            self._lose(OperationalError("the branch is left to a recovery"))
        if self.mode is SessionMode.LOST:
            self.rollback()
