"""Decide how long the virtual connection of an alias keeps a physical session of its node.

Only for backends whose databases are servers.
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
    """Base class of virtual connections: keeps the leased session as long as the session is needed.

    A virtual connection is the ``connection`` of a Django alias. Not thread-safe, like Django's
    connections.

    :param alias: the Django alias, for logs and errors.
    """

    __slots__ = (
        "alias", "autocommitted", "awaits_discard", "held_after_commit", "in_batch", "is_held", "mode", "pool", "session",
    )  # fmt: skip

    def __init__(self, pool: SessionPool[S], alias: str) -> None:
        self.pool = pool
        self.alias = alias
        #: The session that is leased now; None if there is none.
        self.session: S | None = None
        self.mode = SessionMode.FREE
        #: Whether Django has switched autocommit on.
        self.autocommitted = True
        #: Whether the session is kept because hold() was called, and release() was not called yet.
        self.is_held = False
        #: Whether one_session() is active: several statements must run on one session.
        self.in_batch = False
        #: Whether hold_after_commit() was called: the session is then kept when its transaction ends.
        self.held_after_commit = False
        #: Whether the session is to be closed when one_session() ends.
        self.awaits_discard = False

    def __del__(self) -> None:
        # Close the leased session. This method runs when the connection is dropped without close(),
        # for example when its thread ends, and the session must not stay leased.
        session = getattr(self, "session", None)
        if session is not None:
            self.pool.discard(session)

    @property
    def has_state(self) -> bool:
        """Whether closing the session would lose a transaction or other state."""
        raise NotImplementedError

    def lease_session(self) -> S:
        """Lease a session of the pool for this connection."""
        raise NotImplementedError

    def settle(self) -> None:
        """Set ``mode`` from the other attributes. Return the session to the pool if it is not needed
        any more.

        Does nothing if the session is pinned (kept until close()) or lost, or if the connection is
        closed.
        """
        raise NotImplementedError

    @property
    def is_idle(self) -> bool:
        """Whether no session is leased, no cursor has unread results, and no transaction has begun."""
        raise NotImplementedError

    def check(self) -> None:
        """Check that the held session is alive or, if none is held, that a session can be leased.

        The driver's error is raised if the session is dead, or if no session can be leased.
        """
        raise NotImplementedError

    def session_id(self) -> SessionID:
        """Return the identity of the held session on its server; empty if no session is held."""
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
        """Limit the time that the server may take for each later write, until the next call.

        A shorter limit of the session stays in force.

        :param seconds: the limit; None for that of the server.
        """
        raise NotImplementedError

    def begin_branch(self, branch: Any = None) -> None:
        """Make the next transaction follow the rules of a two-phase commit. Sends nothing.

        :param branch: the name of the branch (the part of the two-phase commit on this shard) that
            the next transaction becomes. Left out for the ordinary transaction that stores the
            decision to commit.
        """
        raise NotImplementedError

    def prepare_branch(self) -> None:
        """Prepare the transaction for a two-phase commit, so that it survives the end of its session.
        One round trip.
        """
        raise NotImplementedError

    def leave_branch(self) -> None:
        """Close the session. If its transaction is prepared for a two-phase commit, the transaction
        stays on the server.
        """
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        return self.mode is SessionMode.CLOSED

    def ensure_session(self) -> None:
        """Lease a session if none is held. Does nothing if the session is pinned (kept until close())
        or lost.
        """
        if self.mode <= SessionMode.HELD and self.session is None:
            self.session = self.lease_session()

    def hold(self) -> None:
        """Keep one session until release(), so that the caller can leave state in the session.

        Repeated calls change nothing. The state is gone after close(), or if the session is lost.
        """
        self.ensure_session()
        self.is_held = True
        self.settle()

    def release(self) -> None:
        """Undo hold(). The caller must have removed the state that it left in the session.

        A session that is also pinned is kept until close().
        """
        self.is_held = False
        self.settle()

    def hold_after_commit(self) -> None:
        """Keep the session after commit, until release_after_commit() or discard_after_commit() is
        called.
        """
        self.held_after_commit = self.session is not None

    def release_after_commit(self) -> None:
        """Undo hold_after_commit(). The session returns to the pool, unless it is still needed.

        Further calls do nothing.
        """
        self.held_after_commit = False
        self.settle()

    def discard_after_commit(self) -> None:
        """Close the session that hold_after_commit() kept, so that its id no longer exists on the
        server.

        The session stays open if other state of this connection would be lost with it. During
        one_session(), it is closed at the end, because other statements must run on it, too.
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
        """Record that the session is kept until close(), and log the reason.

        :param reason: the operation that leaves state in the session.
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
        """Record that a session was lost with a transaction or other state, because of the error
        ``exc``.
        """
        self.mode = SessionMode.LOST
        logger.warning(
            "Alias %r lost its connection to node %r, and what it held with it: %s",
            self.alias, self.pool.name, exc,
        )  # fmt: skip
