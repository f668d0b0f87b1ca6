"""Decide how long the virtual connection of an alias keeps a session (server connection) of its
node. Only for backends whose databases are servers.

Thousands of aliases share few sessions. So an alias leases a session from the pool of its node, and
normally returns the session after each statement or transaction.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic

from sharded_orm.backends.pool import S, SessionPool
from sharded_orm.backends.session_mode import SessionMode
from sharded_orm.backends.write_hooks.session_id import SessionID

logger = logging.getLogger("sharded_orm.backends")


class SessionHold(Generic[S]):
    """Base class of virtual connections. A virtual connection leases a session from a pool, and
    keeps the session as long as its alias needs it.

    A virtual connection is the ``connection`` attribute of an alias's ``DatabaseWrapper``. Not
    thread-safe, like Django's connections.

    :param alias: the Django alias, for logs and errors.
    """

    __slots__ = (
        "alias", "autocommitted", "awaits_discard", "held_after_commit", "in_batch", "is_held", "mode", "pool", "session",
    )  # fmt: skip

    def __init__(self, pool: SessionPool[S], alias: str) -> None:
        self.pool = pool
        self.alias = alias
        #: The leased session; None if this connection holds none now.
        self.session: S | None = None
        self.mode = SessionMode.FREE
        #: Whether Django has switched autocommit on.
        self.autocommitted = True
        #: Whether hold() was called, and release() was not called since. The session is kept
        #: meanwhile.
        self.is_held = False
        #: Whether the code is in a one_session() block, whose statements must all run on the same
        #: session.
        self.in_batch = False
        #: Whether hold_after_commit() was called, so that the session is kept when its transaction
        #: ends.
        self.held_after_commit = False
        #: Whether discard_after_commit() was called in a one_session() block. The session is closed
        #: at the end of the block.
        self.awaits_discard = False

    def __del__(self) -> None:
        # This object was dropped without close(), for example because its thread has ended. Close
        # the session, because nobody else would ever return it to the pool.
        session = getattr(self, "session", None)
        if session is not None:
            self.pool.discard(session)

    @property
    def has_state(self) -> bool:
        """Whether the session has a transaction or other state that would be lost if the session
        were closed.
        """
        raise NotImplementedError

    def lease_session(self) -> S:
        """Take a session from the pool for this connection."""
        raise NotImplementedError

    def settle(self) -> None:
        """Compute ``mode`` anew, and return the session to the pool if this connection does not
        need it any more.

        Called after each change of the attributes on which ``mode`` depends. Does nothing if the
        session is pinned (kept until close()) or lost, or if the connection is closed.
        """
        raise NotImplementedError

    @property
    def is_idle(self) -> bool:
        """Whether this connection can be closed without any loss: no session is leased, no cursor
        has unread results, and no transaction has begun.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Check that this connection can run a statement.

        If it holds a session, this must be alive. Otherwise it must be possible to lease one.

        :raises: the driver's error, if the session is dead or none can be leased.
        """
        raise NotImplementedError

    def session_id(self) -> SessionID:
        """Return the identity of the leased session on its server. The identity is empty if no
        session is leased.
        """
        raise NotImplementedError

    @contextmanager
    def one_session(self) -> Iterator[None]:
        """Make all statements in a ``with`` block run on one session, even in autocommit."""
        before = self.in_batch
        self.ensure_session()
        self.in_batch = True
        self.settle()
        try:
            yield
        finally:
            self.in_batch = before
            if self.awaits_discard and not before:
                self.awaits_discard = False
                self._discard_session()
            self.settle()

    def limit_writes(self, seconds: float | None) -> None:
        """Limit the time that each later write may take on the server, until the next call.

        If the session has a shorter limit of its own, that limit stays in force.

        :param seconds: the limit; None for the limit of the server.
        """
        raise NotImplementedError

    def begin_branch(self, branch: Any = None) -> None:
        """Make the next transaction a part of a two-phase commit. Sends nothing to the server.

        :param branch: the name of the branch (this shard's part of the two-phase commit). None for
            the decider, the shard whose commit decides for all branches. The transaction of the
            decider is an ordinary one.
        """
        raise NotImplementedError

    def prepare_branch(self) -> None:
        """Make the server store this shard's part of a two-phase commit, so that it survives the
        end of its session. One round trip.

        Only a commit or a rollback of the transaction may follow.
        """
        raise NotImplementedError

    def leave_branch(self) -> None:
        """Close the session without ending its branch, this shard's part of a two-phase commit.

        A prepared branch stays on the server until a recovery commits it or rolls it back.
        """
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        return self.mode is SessionMode.CLOSED

    def ensure_session(self) -> None:
        """Lease a session if this connection holds none. Does nothing if this connection has pinned
        its session (keeps it until close()), or has lost its session.
        """
        if self.mode <= SessionMode.HELD and self.session is None:
            self.session = self.lease_session()

    def hold(self) -> None:
        """Keep one session until release(), because the caller wants to leave state in it, such as
        the lock of a migration.

        Further calls change nothing. The state is gone after close(), or if the session is lost.
        """
        self.ensure_session()
        self.is_held = True
        self.settle()

    def release(self) -> None:
        """Undo hold(). The caller must have removed the state that it had left in the session.

        If the session is also pinned, it is kept until close().
        """
        self.is_held = False
        self.settle()

    def hold_after_commit(self) -> None:
        """Keep the session when its transaction ends.

        Meanwhile, no other alias can lease the session. Call release_after_commit() or
        discard_after_commit() afterwards.
        """
        self.held_after_commit = self.session is not None

    def release_after_commit(self) -> None:
        """Undo hold_after_commit(). The session returns to the pool, unless this connection needs
        it for another reason.

        Further calls do nothing.
        """
        self.held_after_commit = False
        self.settle()

    def discard_after_commit(self) -> None:
        """Close the session that hold_after_commit() has kept, so that no other process finds the
        session's id on the server any more.

        The session stays open if other state of this connection would be lost with it. In a
        one_session() block, it is closed at the end of the block, because later statements of the
        block need it.
        """
        if not self.held_after_commit:
            return
        if self.in_batch:
            self.awaits_discard = True
        else:
            self._discard_session()

    def _discard_session(self) -> None:
        if self.mode <= SessionMode.HELD and not self.has_state:
            session, self.session = self.session, None
            if session is not None:
                self.pool.discard(session)

    def record_pin(self, reason: str) -> None:
        """Note that the session is pinned (kept until close()), and log the reason.

        :param reason: the operation that has left state in the session.
        """
        self.mode = SessionMode.PINNED
        stats = self.pool.stats
        stats.pins += 1
        stats.pin_reasons[reason] = stats.pin_reasons.get(reason, 0) + 1
        logger.info(
            "Alias %r keeps a connection of node %r for itself until it is closed: %s"
            " leaves state in the session.", self.alias, self.pool.name, reason,
        )  # fmt: skip

    def record_loss(self, exc: BaseException) -> None:
        """Note that the error ``exc`` has ended the session, and that a transaction or other state
        was lost with it.
        """
        self.mode = SessionMode.LOST
        logger.warning(
            "Alias %r lost its connection to node %r, and what it held with it: %s",
            self.alias, self.pool.name, exc,
        )  # fmt: skip
