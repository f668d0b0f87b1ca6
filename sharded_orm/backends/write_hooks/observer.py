"""The hook by which the cache learns of the ORM's writes and of the ends of transactions.

The compilers of all writes call it (see :mod:`sharded_orm.backends.write_hooks.compilers`), and the
connection object calls a :class:`TransactionListener` when a transaction ends. The observer is
above this layer: the app provides it when it is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class TransactionListener(Protocol):
    """Learns of the end of one transaction; a connection has it in ``transaction_writes``.

    The connection calls the listener in its own thread, and drops it after :meth:`over` or
    :meth:`lost`.
    """

    @property
    def is_announced(self) -> bool:
        """Whether :meth:`announce` has reached the cache."""

    def announce(self) -> None:
        """Called immediately before COMMIT, and before a statement that may commit implicitly.

        After such a statement the transaction may continue. An error of this method prevents both.
        """

    def over(self) -> None:
        """The transaction was committed or rolled back, or its session is gone for good.

        Called before any function of ``on_commit``. Raises nothing but exceptions that are thrown
        into the thread, such as ``KeyboardInterrupt``.
        """

    def lost(self) -> None:
        """The connection was lost in COMMIT, or after :meth:`announce`.

        The announced writes may take effect at any time, or never.
        """


class WriteObserver(Protocol):
    """Learns of the ORM's writes."""

    def cached_model_of(self, model: Any) -> Any:
        """Return what :meth:`write` needs to know of ``model``; None if it is not cached.

        Called for each write of every model, so it is cheap.
        """

    def write(
        self, cached_model: Any, compiler: Any, execute: Callable[[], Any], counted: bool
    ) -> Any:
        """Run the statement of ``compiler`` inside a transaction, and return its result.

        :param execute: runs the statement of ``compiler.query``, which may have been changed.
        :param counted: the result is the number of rows that matched.
        """

    def table_flush(self, connection: Any) -> AbstractContextManager[object]:
        """A context manager around statements that empty whole tables, outside of transactions."""


_observer: WriteObserver | None = None


def provide_observer(observer: WriteObserver) -> None:
    """Set the observer. The app calls this when it is ready."""
    global _observer
    _observer = observer


def cached_model_of(model: Any) -> Any:
    """See :meth:`WriteObserver.cached_model_of`."""
    return None if _observer is None else _observer.cached_model_of(model)


def write(cached_model: Any, compiler: Any, execute: Callable[[], Any], counted: bool) -> Any:
    """See :meth:`WriteObserver.write`."""
    assert _observer is not None
    return _observer.write(cached_model, compiler, execute, counted)


def table_flush(connection: Any) -> AbstractContextManager[object]:
    """See :meth:`WriteObserver.table_flush`."""
    return nullcontext() if _observer is None else _observer.table_flush(connection)
