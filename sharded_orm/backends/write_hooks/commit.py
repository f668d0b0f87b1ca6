"""Hooks around COMMIT and ROLLBACK, for transactions that wrote to cached models.

:class:`CommitHookMixin` is a base class of each backend's ``DatabaseWrapper``, for shards and for
ordinary aliases. It calls a :class:`~sharded_orm.backends.write_hooks.observer.TransactionListener`
before COMMIT and after the end of the transaction. The mixin reports the end of the transaction to the
listener exactly once, however the transaction ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import Atomic, TransactionManagementError

from sharded_orm.backends.write_hooks import observer
from sharded_orm.backends.write_hooks.followers import CommitWatcher
from sharded_orm.backends.write_hooks.session_id import SessionID, SessionIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

W = TypeVar("W", bound=SessionIdentity)
logger = logging.getLogger("sharded_orm.backends")


class CommitOutcome(Enum):
    """What is known about a transaction after its COMMIT has raised an error."""

    OPEN = auto()
    """The transaction is still open. Django rolls it back."""
    OVER = auto()
    """The transaction has ended."""
    UNKNOWN = auto()
    """The connection was lost during COMMIT. The server may still commit the transaction."""


if TYPE_CHECKING:

    class _Wrapper(BaseDatabaseWrapper):
        """``BaseDatabaseWrapper`` with the private attributes that Django's type stubs leave out."""

        _thread_ident: int
        _thread_sharing_count: int

        def _cursor(self, name: str | None = None) -> Any: ...
        def _close(self) -> None: ...
        def _commit(self) -> None: ...
        def _rollback(self) -> None: ...
        def _set_autocommit(self, autocommit: bool) -> None: ...
        def _savepoint(self, sid: str) -> None: ...
        def _savepoint_rollback(self, sid: str) -> None: ...

else:
    _Wrapper = BaseDatabaseWrapper


class CommitHookMixin(_Wrapper):
    """Mixin for a backend's connection object: the hooks around COMMIT and ROLLBACK.

    A backend overrides :meth:`commit_outcome`. If its sessions have ids on a server, it also overrides
    the methods about sessions.
    """

    #: The object that reports the writes of the open transaction to the cache; None if the
    #: transaction has not written to cached models.
    transaction_writes: observer.TransactionListener | None = None
    #: The objects that are called before the COMMIT and at the end of the open transaction.
    commit_watchers: tuple[CommitWatcher, ...] = ()
    #: Whether the ORM has written anything in the open transaction.
    wrote = False

    #: Whether the server can limit the time of a single write. If False, :meth:`limited_session`
    #: yields False.
    limits_statements = False

    # ##### Methods about the session, for backends to override #####

    def session_id(self) -> SessionID:
        """Return the identity of the session that runs the transaction.

        The identity is empty if sessions have no ids, as on SQLite. May query the database, inside
        the transaction.
        """
        return SessionID()

    def known_session(self) -> AbstractContextManager[None] | None:
        """Return a context manager that keeps one session for a statement in autocommit.

        Within its block, :meth:`session_id` returns the id of the session already before the
        statement is sent. Return None if the backend cannot do so, if the session has no identity,
        or if the session may have an open transaction.
        """
        return None

    @contextmanager
    def limited_session(self, seconds: float) -> Iterator[bool]:
        """Within a ``with`` block, keep one session in autocommit, and limit the time of its writes
        to ``seconds``.

        If the context manager yields True, :meth:`session_id` returns the id of the session already
        before a statement is sent. The server breaks off each UPDATE, INSERT and DELETE that takes
        longer than ``seconds``, including its waits for locks, but without its commit. If the
        server or the session has a shorter limit, that one stays in force. If the shard moves to
        another node before the block ends, a statement is refused, as in a transaction.

        The context manager yields False, and changes nothing, if the backend cannot do this, if the
        session has no identity, or if the session may have an open transaction.
        """
        yield False

    def is_statement_limit(self, error: BaseException) -> bool:
        """Whether ``error`` means that the server has broken off a statement that ran for too long.
        In autocommit, the statement has then changed nothing.
        """
        return False

    def judges(self, writer: SessionIdentity) -> bool:
        """Whether :meth:`sessions_gone` can tell if the session ``writer`` still exists.

        It can if ``writer`` is a session on the server of this alias, and the account of this alias
        has the right to see it. Also True if the database does not answer now, because it may
        answer later. May query the database, outside of the open transaction.
        """
        return False

    def sessions_gone(self, writers: Sequence[W]) -> set[W]:
        """Return those sessions of ``writers`` that no longer exist on the server of this alias.

        Their transactions can no longer write or commit. The set is empty if the server does not
        answer.
        """
        return set()

    def reads_as_autocommit(self) -> bool:
        """Whether a read in the open transaction sees the same rows as a read in autocommit.

        True if the transaction has only read rows. The caller must make sure that the isolation
        level of the alias is READ COMMITTED. False if the transaction may have written anything,
        even by the project's own SQL, or if its session may have another isolation level.
        """
        return False

    def limit_lock_waits(self, seconds: float) -> None:
        """From now on, let each statement of the open transaction wait for a lock for at most
        ``seconds``.

        Does nothing on servers that limit these waits by themselves.
        """

    @property
    def may_lack_statements(self) -> bool:
        """Whether an error, such as a deadlock, may have undone earlier statements of the open
        transaction.

        If the program ignores the error and goes on, COMMIT stores only its later statements.
        """
        return False

    @property
    def has_failed(self) -> bool:
        """Whether a statement of the open transaction has failed in such a way that the transaction
        cannot be committed as a whole.

        COMMIT would not raise an error then, although earlier statements are lost. On MySQL, the
        server has already rolled them back. On PostgreSQL, it rolls them back instead of
        committing.
        """
        return False

    @property
    def has_lost_session(self) -> bool:
        """Whether the session of the open transaction is already known to be lost. COMMIT would
        then raise an error.
        """
        return False

    @property
    def seems_lost(self) -> bool:
        """Whether the server seems to have closed the session of the open transaction. Sends
        nothing.

        The commit on such a shard will fail. So when several shards commit one after the other,
        such a shard must be the first, so that nothing is stored on the other shards. Backends that
        find lost sessions in another way always return False.
        """
        return False

    def check_deferred_constraints(self) -> None:
        """Check now the constraints that the database would check at COMMIT, if the backend can do
        so.

        :raises django.db.IntegrityError: the transaction violates a constraint.
        """

    @property
    def sends_with_commit(self) -> bool:
        """Whether statements of the open transaction can be sent together with its COMMIT."""
        return False

    @contextmanager
    def sent_with_commit(self) -> Iterator[None]:
        """Send the INSERTs, UPDATEs and DELETEs of a ``with`` block together with the COMMIT, to
        save round trips.

        These statements must be the last ones of the outermost transaction. The ``lastrowid`` of
        their cursors is set at the COMMIT. If one of them fails, commit() raises the error, and the
        transaction is not committed. If the backend cannot send statements with the COMMIT, it
        executes each of them at once.
        """
        yield

    def hold_session(self) -> None:
        """Keep the transaction's session for this alias, even after the transaction has ended.

        Otherwise another alias could lease the session from the pool, and :meth:`discard_session`
        could not close it any more. :meth:`release_session` ends the reservation.
        """

    def release_session(self) -> None:
        """Undo :meth:`hold_session`, so that other aliases may use the session again. Further calls
        do nothing.
        """

    def discard_session(self) -> None:
        """Close the session that :meth:`hold_session` has kept.

        The session stays open if other state of this connection would be lost with it.
        """

    def commit_outcome(self) -> CommitOutcome:
        """Return what is known about the open transaction after COMMIT, or another statement, has
        raised an error.
        """
        raise NotImplementedError

    # ##### The end of a transaction that has written #####

    def write_transaction(self) -> Atomic:
        """Return an atomic block for a single write, to be used when the connection is in
        autocommit.

        :raises TransactionManagementError: this object is not the thread's connection of its alias,
            but a copy of it.
        """
        if connections[self.alias] is not self:
            raise TransactionManagementError(
                f"A cached or followed model cannot be written by a copy of the connection {self.alias!r}."
            )
        return Atomic(self.alias, savepoint=False, durable=False)

    def announce_commit(self) -> None:
        """Announce the transaction's writes to the cache, and call ``before_commit()`` of the
        watchers. Called immediately before COMMIT.

        :raises CacheUnavailable: the cache does not answer. The transaction has been rolled back.
            It is rolled back, too, if a watcher raises an error.
        """
        listener = self.transaction_writes
        if listener is None and not self.commit_watchers:
            return
        try:
            for watcher in self.commit_watchers:
                watcher.before_commit()
            if listener is not None:
                listener.announce()
        except BaseException as exc:
            # Roll back here, because Atomic does so only after a database error. Otherwise the
            # transaction would stay open, and would be committed as soon as autocommit is switched
            # on.
            try:
                self._rollback()
            except Exception:
                # Only log this second error, so that the caller gets the first one.
                logger.debug("rolling back %r after %r", self.alias, exc, exc_info=True)
                self.close()
            # Drop the functions of transaction.on_commit(), as BaseDatabaseWrapper.rollback() does.
            # Otherwise the next commit would call them.
            self.run_on_commit = []
            raise

    def _commit(self) -> None:
        # Overrides BaseDatabaseWrapper._commit, to call the hooks of COMMIT. Django calls the on_commit
        # functions after this method.
        if self.transaction_writes is None and not self.commit_watchers:
            super()._commit()
        else:
            self._commit_writes(super()._commit)
        self.wrote = False

    def _set_autocommit(self, autocommit: bool) -> None:
        # Overrides BaseDatabaseWrapper._set_autocommit. If autocommit is switched on while a
        # transaction is open, the database commits the transaction. So the hooks of COMMIT run
        # here.
        if autocommit and (self.transaction_writes is not None or self.commit_watchers):
            self._commit_writes(partial(super()._set_autocommit, autocommit))
        else:
            super()._set_autocommit(autocommit)
        if autocommit:
            self.wrote = False

    def _rollback(self) -> None:
        # Overrides BaseDatabaseWrapper._rollback, to report the end of the transaction.
        listener = self.transaction_writes
        if (
            listener is not None
            and listener.is_announced
            and self.commit_outcome() is CommitOutcome.UNKNOWN
        ):
            # The connection may have been lost during a statement that commits implicitly. Then the
            # writes may be committed. So leave the markers, which announce them, in the cache.
            self._leave_writes()
        if self.transaction_writes is None and not self.commit_watchers:
            super()._rollback()
        else:
            self.hold_session()
            try:
                super()._rollback()
                self._conclude_writes()
            except BaseException:
                if self.commit_outcome() is not CommitOutcome.OPEN:
                    # The rollback has failed, because the transaction was over or the connection is
                    # lost. COMMIT was never sent, so the writes were not committed.
                    self._conclude_writes()
                raise
            finally:
                self.release_session()
        self.wrote = False

    def _savepoint(self, sid: str) -> None:
        # Overrides BaseDatabaseWrapper._savepoint, to tell the watchers of the transaction.
        super()._savepoint(sid)
        for watcher in self.commit_watchers:
            watcher.savepoint(sid)

    def _savepoint_rollback(self, sid: str) -> None:
        # Overrides BaseDatabaseWrapper._savepoint_rollback, to tell the watchers of the
        # transaction.
        super()._savepoint_rollback(sid)
        for watcher in self.commit_watchers:
            watcher.savepoint_rolled_back(sid)

    def _commit_writes(self, commit: Callable[[], object]) -> None:
        self.announce_commit()
        self.hold_session()
        try:
            try:
                commit()
            except BaseException:
                outcome = self.commit_outcome()
                if outcome is CommitOutcome.OVER:
                    # The transaction is over, but nobody knows whether it was committed. None tells
                    # the watchers this.
                    self._tell_watchers(None)
                    self._conclude_writes()
                elif outcome is CommitOutcome.UNKNOWN:
                    self._leave_writes()
                raise
            self._tell_watchers(True)
            self._conclude_writes()
        finally:
            self.release_session()

    def _leave_writes(self) -> None:
        self._tell_watchers(None)
        listener, self.transaction_writes = self.transaction_writes, None
        if listener is not None:
            listener.lost()

    def _conclude_writes(self) -> None:
        self._tell_watchers(False)
        listener, self.transaction_writes = self.transaction_writes, None
        self.wrote = False
        if listener is not None:
            listener.over()

    def _tell_watchers(self, committed: bool | None) -> None:
        watchers, self.commit_watchers = self.commit_watchers, ()
        for watcher in watchers:
            watcher.ended(committed)

    def _close(self) -> None:
        # Overrides BaseDatabaseWrapper._close. The server rolls back an open transaction when its
        # connection is closed, so report that the transaction is over.
        try:
            super()._close()
        finally:
            self._conclude_writes()
