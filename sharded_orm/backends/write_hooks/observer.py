"""Hooks that report the ORM's writes and the ends of transactions to the cache.

The compilers report each write to a :class:`WriteObserver` (see
:mod:`sharded_orm.backends.write_hooks.compilers`). The connection object reports the end of a
transaction to a :class:`TransactionListener`. The observer belongs to a higher layer, so the app
provides it (:func:`provide_observer`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class TransactionListener(Protocol):
    """An object to which a connection object reports how one transaction ends.

    While the transaction is open, it is the connection object's ``transaction_writes``. All methods are
    called in the thread that owns the connection object. After :meth:`over` or :meth:`lost`, no method
    is called any more.
    """

    @property
    def is_announced(self) -> bool:
        """Whether :meth:`announce` has succeeded: the cache has received the announcement."""

    def announce(self) -> None:
        """Announce the transaction's writes to the cache, because they may be committed now.

        Called immediately before COMMIT, and before each statement that may commit implicitly,
        after which the transaction may continue. If this method raises an error, COMMIT or the
        statement is not sent.
        """

    def over(self) -> None:
        """Called when the transaction was committed or rolled back, or its session no longer exists.

        Called before any ``on_commit`` function runs. Must not raise errors, except for exceptions that
        are thrown into the thread, such as ``KeyboardInterrupt``.
        """

    def lost(self) -> None:
        """Called when the connection was lost during COMMIT, or at any time after :meth:`announce`.

        The announced writes may take effect at any later time, or never.
        """


class WriteObserver(Protocol):
    """An object to which the compilers report each write of the ORM to a cached model."""

    def cached_model_of(self, model: Any) -> Any:
        """Return what :meth:`write` needs to know about ``model``; None if the model is not cached.

        Called for each write to any model, so it must be cheap.
        """

    def write(
        self, cached_model: Any, compiler: Any, execute: Callable[[], Any], counted: bool
    ) -> Any:
        """Run the statement of ``compiler``, and return its result. Called while a transaction is open.

        :param cached_model: what :meth:`cached_model_of` returned for the statement's model.
        :param execute: function that runs the statement. It compiles ``compiler.query``, so this method
            may change the query first.
        :param counted: whether the result is the number of rows that matched.
        """

    def table_flush(self, connection: Any) -> AbstractContextManager[object]:
        """Return a context manager for statements that empty whole tables, as Django's flush does.

        At the end of the block, the writes count as committed.
        """


_observer: WriteObserver | None = None


def provide_observer(observer: WriteObserver) -> None:
    """Provide the :class:`WriteObserver` that the functions of this module call.

    This package's Django app calls this function when the app is ready.
    """
    global _observer
    _observer = observer


def cached_model_of(model: Any) -> Any:
    """Call :meth:`WriteObserver.cached_model_of`, and return its result; None if the app has
    provided no observer.
    """
    return None if _observer is None else _observer.cached_model_of(model)


def write(cached_model: Any, compiler: Any, execute: Callable[[], Any], counted: bool) -> Any:
    """Call :meth:`WriteObserver.write`, which runs the statement of a write, and return its result.

    Call this function only if an observer was provided.
    """
    assert _observer is not None
    return _observer.write(cached_model, compiler, execute, counted)


def table_flush(connection: Any) -> AbstractContextManager[object]:
    """Return the context manager of :meth:`WriteObserver.table_flush`.

    Return a context manager that does nothing if no observer was provided.
    """
    return nullcontext() if _observer is None else _observer.table_flush(connection)
