"""How transactions end that wrote to cached models: who is told of COMMIT, and what if it fails.

Shards or not, every backend's ``DatabaseWrapper`` has :class:`CommitHookMixin` among its bases.
What is to be done before COMMIT and after the end is a :class:`~sharded_orm.backends.write_hooks.observer.TransactionListener`;
this module sees to it that each is done once, in whatever way the transaction ends.
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
    """What became of a transaction when its COMMIT failed."""

    OPEN = auto()
    """It goes on; whoever sees the error rolls it back."""
    OVER = auto()
    UNKNOWN = auto()


if TYPE_CHECKING:

    class _Wrapper(BaseDatabaseWrapper):
        """With what every backend's has, and the stubs of Django leave out."""

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
    """Ends of transactions that wrote; see the module.

    A backend overrides :meth:`commit_outcome` and, where its sessions have names, the
    other methods about sessions.
    """

    #: What is to happen when the transaction ends, because of what it wrote.
    transaction_writes: observer.TransactionListener | None = None
    #: A write of the ORM ran in the transaction that is open.
    wrote = False

    # ##### What a backend tells about its session #####

    def session_id(self) -> SessionID:
        """The database session that holds the transaction; nobody if it has no name.

        May ask the database, in the transaction.
        """
        return SessionID()

    def judges(self, writer: SessionIdentity) -> bool:
        """Whether :meth:`sessions_gone` can tell about ``writer``. May ask the database, but
        not in the transaction. True while it does not answer."""
        return False

    def sessions_gone(self, writers: Sequence[W]) -> set[W]:
        """Those of ``writers`` whose session does not exist any more on this alias's server, so
        that what it began can neither commit nor run on. Empty if the server does not answer."""
        return set()

    def hold_session(self) -> None:
        """Share the session of the transaction with nobody until :meth:`release_session`."""

    def release_session(self) -> None:
        """End what :meth:`hold_session` began. Repeatable."""

    def discard_session(self) -> None:
        """Close the session that is kept, if that is possible without a loss."""

    def commit_outcome(self) -> CommitOutcome:
        """What became of the transaction, when COMMIT or another statement has raised an error."""
        raise NotImplementedError

    # ##### Ends of transactions that wrote #####

    def write_transaction(self) -> Atomic:
        """A transaction around one write, in autocommit."""
        if connections[self.alias] is not self:
            raise TransactionManagementError(
                f"A cached model cannot be written by a copy of the connection {self.alias!r}."
            )
        return Atomic(self.alias, savepoint=False, durable=False)

    def announce_commit(self) -> None:
        """Tell of what was written; the next thing to happen is COMMIT.

        :raises CacheUnavailable: it cannot be told; the transaction has been rolled back.
        """
        ending = self.transaction_writes
        if ending is None:
            return
        try:
            ending.announce()
        except BaseException as exc:
            # Not only errors of databases, by which Atomic would do so: what is left open is
            # committed when autocommit is switched on.
            try:
                self._rollback()
            except Exception:  # Logged, and the connection closed: the first error is on its way.
                logger.debug("rolling back %r after %r", self.alias, exc, exc_info=True)
                self.close()
            # As BaseDatabaseWrapper.rollback(): else the next commit would call them.
            self.run_on_commit = []
            raise

    def _commit(self) -> None:
        # Overrides BaseDatabaseWrapper._commit. Hooks of on_commit run later.
        if self.transaction_writes is None:
            super()._commit()
        else:
            self._commit_writes(super()._commit)
        self.wrote = False

    def _set_autocommit(self, autocommit: bool) -> None:
        # Overrides the backend's: switching autocommit on commits what is open.
        if autocommit and self.transaction_writes is not None:
            self._commit_writes(partial(super()._set_autocommit, autocommit))
        else:
            super()._set_autocommit(autocommit)
        if autocommit:
            self.wrote = False

    def _rollback(self) -> None:
        # Overrides BaseDatabaseWrapper._rollback.
        ending = self.transaction_writes
        if (
            ending is not None
            and ending.is_announced
            and self.commit_outcome() is CommitOutcome.UNKNOWN
        ):
            # Lost in a statement that commits by itself, perhaps.
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
                    # Nobody will send COMMIT any more, so it cannot take effect.
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
                fate = self.commit_outcome()
                if fate is CommitOutcome.OVER:
                    self._conclude_writes()
                elif fate is CommitOutcome.UNKNOWN:
                    self._leave_writes()
                raise
            self._conclude_writes()
        finally:
            self.release_session()

    def _leave_writes(self) -> None:
        ending, self.transaction_writes = self.transaction_writes, None
        if ending is not None:
            ending.lost()

    def _conclude_writes(self) -> None:
        ending, self.transaction_writes = self.transaction_writes, None
        self.wrote = False
        if ending is not None:
            ending.over()

    def _close(self) -> None:
        # Overrides BaseDatabaseWrapper._close: whatever was open is rolled back.
        try:
            super()._close()
        finally:
            self._conclude_writes()
