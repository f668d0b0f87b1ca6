"""The end of transactions that wrote to cached models: the hooks around COMMIT and ROLLBACK.

Each backend's ``DatabaseWrapper`` has :class:`CommitHookMixin` among its bases, also for aliases
that are no shards. A :class:`~sharded_orm.backends.write_hooks.observer.TransactionListener` does
the work before COMMIT and after the end. This module calls each of its methods once, however the
transaction ends.
"""

from __future__ import annotations

import logging
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import Atomic, TransactionManagementError

from sharded_orm.backends.write_hooks import observer
from sharded_orm.backends.write_hooks.session_id import SessionID, SessionIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

W = TypeVar("W", bound=SessionIdentity)
logger = logging.getLogger("sharded_orm.backends")


class CommitOutcome(Enum):
    """The state of a transaction after its COMMIT has raised an error."""

    OPEN = auto()
    """The transaction continues; Django rolls it back."""
    OVER = auto()
    """It has ended."""
    UNKNOWN = auto()
    """COMMIT may still take effect."""


if TYPE_CHECKING:

    class _Wrapper(BaseDatabaseWrapper):
        """Private attributes that Django's stubs leave out."""

        _thread_ident: int
        _thread_sharing_count: int

        def _cursor(self, name: str | None = None) -> Any: ...
        def _close(self) -> None: ...
        def _commit(self) -> None: ...
        def _rollback(self) -> None: ...
        def _set_autocommit(self, autocommit: bool) -> None: ...

else:
    _Wrapper = BaseDatabaseWrapper


class CommitHookMixin(_Wrapper):
    """The hooks of a connection object; see the module.

    A backend overrides :meth:`commit_outcome` and, if its sessions have ids, the other methods
    about sessions.
    """

    #: The listener of the open transaction; None if it has not written to cached models.
    transaction_writes: observer.TransactionListener | None = None
    #: The ORM has written in the open transaction.
    wrote = False

    # ##### The session, by each backend #####

    def session_id(self) -> SessionID:
        """Return the identity of the session that has the transaction; empty if sessions have none.

        May query the database, in the transaction.
        """
        return SessionID()

    def judges(self, writer: SessionIdentity) -> bool:
        """Whether :meth:`sessions_gone` can decide about ``writer``.

        May query the database, but not in the transaction. True while it does not answer.
        """
        return False

    def sessions_gone(self, writers: Sequence[W]) -> set[W]:
        """Return the writers whose session no longer exists on this alias's server.

        Their transactions can neither commit nor continue. Empty if the server does not answer.
        """
        return set()

    def hold_session(self) -> None:
        """Do not share the transaction's session until :meth:`release_session`."""

    def release_session(self) -> None:
        """Share the session again. Repeatable."""

    def discard_session(self) -> None:
        """Close the session of :meth:`hold_session`, unless it has other state."""

    def commit_outcome(self) -> CommitOutcome:
        """Return the state of the transaction after COMMIT or another statement has failed."""
        raise NotImplementedError

    # ##### Ends of transactions that wrote #####

    def write_transaction(self) -> Atomic:
        """Return an atomic block around one write in autocommit."""
        if connections[self.alias] is not self:
            raise TransactionManagementError(
                f"A cached model cannot be written by a copy of the connection {self.alias!r}."
            )
        return Atomic(self.alias, savepoint=False, durable=False)

    def announce_commit(self) -> None:
        """Announce to the cache what was written; COMMIT follows.

        :raises CacheUnavailable: the cache does not answer; the transaction has been rolled back.
        """
        listener = self.transaction_writes
        if listener is None:
            return
        try:
            listener.announce()
        except BaseException as exc:
            # Atomic would roll back only after errors of databases. A transaction that is left
            # open is committed when autocommit is switched on.
            try:
                self._rollback()
            except Exception:  # Logged: the first error is on its way to the caller.
                logger.debug("rolling back %r after %r", self.alias, exc, exc_info=True)
                self.close()
            # As BaseDatabaseWrapper.rollback(); otherwise the next commit would call them.
            self.run_on_commit = []
            raise

    def _commit(self) -> None:
        # Overrides BaseDatabaseWrapper._commit. Functions of on_commit run later.
        if self.transaction_writes is None:
            super()._commit()
        else:
            self._commit_writes(super()._commit)
        self.wrote = False

    def _set_autocommit(self, autocommit: bool) -> None:
        # Overrides the backend's: switching autocommit on commits an open transaction.
        if autocommit and self.transaction_writes is not None:
            self._commit_writes(partial(super()._set_autocommit, autocommit))
        else:
            super()._set_autocommit(autocommit)
        if autocommit:
            self.wrote = False

    def _rollback(self) -> None:
        # Overrides BaseDatabaseWrapper._rollback.
        listener = self.transaction_writes
        if (
            listener is not None
            and listener.is_announced
            and self.commit_outcome() is CommitOutcome.UNKNOWN
        ):
            # Perhaps lost in a statement that commits implicitly.
            self._leave_writes()
        if self.transaction_writes is None:
            super()._rollback()
        else:
            self.hold_session()
            try:
                super()._rollback()
                self._conclude_writes()
            except BaseException:
                if self.commit_outcome() is not CommitOutcome.OPEN:
                    # COMMIT was not sent, so the transaction cannot take effect.
                    self._conclude_writes()
                raise
            finally:
                self.release_session()
        self.wrote = False

    def _commit_writes(self, commit: Callable[[], object]) -> None:
        self.announce_commit()
        self.hold_session()
        try:
            try:
                commit()
            except BaseException:
                outcome = self.commit_outcome()
                if outcome is CommitOutcome.OVER:
                    self._conclude_writes()
                elif outcome is CommitOutcome.UNKNOWN:
                    self._leave_writes()
                raise
            self._conclude_writes()
        finally:
            self.release_session()

    def _leave_writes(self) -> None:
        listener, self.transaction_writes = self.transaction_writes, None
        if listener is not None:
            listener.lost()

    def _conclude_writes(self) -> None:
        listener, self.transaction_writes = self.transaction_writes, None
        self.wrote = False
        if listener is not None:
            listener.over()

    def _close(self) -> None:
        # Overrides BaseDatabaseWrapper._close, which rolls an open transaction back.
        try:
            super()._close()
        finally:
            self._conclude_writes()
