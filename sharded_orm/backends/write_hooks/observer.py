"""Hooks by which the cache learns of the ORM's writes and of the ends of transactions.

The compilers report each write to a :class:`WriteObserver` (see
:mod:`sharded_orm.backends.write_hooks.compilers`). The connection object reports the end of a
transaction to a :class:`TransactionListener`. The backends must not import the cache. So the
package's Django app passes the observer to :func:`provide_observer`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class TransactionListener(Protocol):
    """An object to which a connection object reports how one transaction ends.

    While the transaction is open, the object is ``transaction_writes`` of the connection object.
    All its methods are called in the thread that owns the connection object. After :meth:`over` or
    :meth:`lost`, none is called any more.
    """

    @property
    def is_announced(self) -> bool:
        """Whether the cache has received the announcement of the writes: :meth:`announce` has
        succeeded.
        """

    def announce(self) -> None:
        """Announce the transaction's writes to the cache, because they may be committed from now
        on.

        Called immediately before COMMIT. Also called before each statement that may commit
        implicitly. After such a statement, the transaction may go on. If this method raises an
        error, the COMMIT or the statement is not sent.
        """

    def over(self) -> None:
        """Called when the transaction is over: it was committed or rolled back, or its session no
        longer exists.

        Called before the functions of ``transaction.on_commit()``. Must not raise errors, except
        those that are thrown into the thread, such as ``KeyboardInterrupt``.
        """

    def lost(self) -> None:
        """Called when nobody knows whether the transaction is committed, because the connection was
        lost during COMMIT, or at any time after :meth:`announce`.

        The announced writes may take effect later, or never.
        """


class WriteObserver(Protocol):
    """An object to which the compilers report each write of the ORM to a cached model."""

    def cached_model_of(self, model: Any) -> Any:
        """Return what :meth:`write` needs to know about ``model``; None if the model is not cached.

        Called for each write to any model, so this method must be cheap.
        """

    def write(
        self, cached_model: Any, compiler: Any, execute: Callable[[], Any], counted: bool
    ) -> Any:
        """Run the statement of ``compiler``, and return its result. Called while a transaction is
        open.

        :param cached_model: what :meth:`cached_model_of` has returned for the statement's model.
        :param execute: compiles ``compiler.query`` and sends the statement. So this method may
            first change the query.
        :param counted: whether the result of ``execute`` is the number of rows that the statement
            matched.
        """

    def table_flush(self, connection: Any) -> AbstractContextManager[object]:
        """Return a context manager around statements that empty whole tables, as ``manage.py
        flush`` does.

        Such statements are not the ORM's, so the cache learns of them only here. At the end of the
        block, they count as committed.
        """


_observer: WriteObserver | None = None


def provide_observer(observer: WriteObserver) -> None:
    """Set the :class:`WriteObserver` to which the functions of this module pass their calls.

    The package's Django app does so when the app is ready.
    """
    global _observer
    _observer = observer


def cached_model_of(model: Any) -> Any:
    """Return what the observer's :meth:`WriteObserver.cached_model_of` returns; None if no observer
    was set.
    """
    return None if _observer is None else _observer.cached_model_of(model)


def write(cached_model: Any, compiler: Any, execute: Callable[[], Any], counted: bool) -> Any:
    """Let the observer run the statement of a write (see :meth:`WriteObserver.write`). Return the
    result of the statement.

    Call this function only if an observer was set, that is, if :func:`cached_model_of` has returned
    ``cached_model``.
    """
    assert _observer is not None
    return _observer.write(cached_model, compiler, execute, counted)


def table_flush(connection: Any) -> AbstractContextManager[object]:
    """Return the context manager of the observer's :meth:`WriteObserver.table_flush`.

    If no observer was set, the context manager does nothing.
    """
    return nullcontext() if _observer is None else _observer.table_flush(connection)
