"""The hook between the backends and the cache: writes of the ORM, and ends of transactions.

Every write of the ORM is compiled by one of three compilers, which come here first (see
:mod:`sharded_orm.backends.write_hooks.compilers`), and every end of a transaction passes the connection
object. What is to happen then is above this layer, and is provided by the app when it is
ready.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class TransactionListener(Protocol):
    """What a connection keeps in ``transaction_writes``; belongs to one transaction.

    The connection calls it in its own thread, and drops it after :meth:`over` or
    :meth:`lost`.
    """

    @property
    def is_announced(self) -> bool:
        """Whether :meth:`announce` has told anybody anything."""

    def announce(self) -> None:
        """Called immediately before COMMIT, and before what may commit by itself, in which case
        the transaction may go on. What it raises stops either."""

    def over(self) -> None:
        """The transaction was committed or rolled back, or its session is gone for good.

        Called before any hook of ``on_commit``. Raises nothing but what is thrown into the
        thread (``KeyboardInterrupt``).
        """

    def lost(self) -> None:
        """The connection was lost in COMMIT, or after :meth:`announce`: what was announced may
        take effect at any time, or never."""


class WriteObserver(Protocol):
    """Who wants to know of writes."""

    def cached_model_of(self, model: Any) -> Any:
        """What :meth:`write` needs to know of ``model``; None if its writes are of no interest.

        Asked for each write of every model: it is cheap.
        """

    def write(
        self, cached_model: Any, compiler: Any, execute: Callable[[], Any], counted: bool
    ) -> Any:
        """Run the statement of ``compiler``, inside a transaction; its result.

        :param execute: runs it as ``compiler.query`` is then. Its result is the number of rows
            that matched if ``counted``.
        """

    def emptied(self, connection: Any) -> AbstractContextManager[object]:
        """A block that empties tables of ``connection`` outside of any transaction."""


_observer: WriteObserver | None = None


def provide_observer(observer: WriteObserver) -> None:
    """Tell who wants to know of writes. The app does so when it is ready."""
    global _observer
    _observer = observer


def cached_model_of(model: Any) -> Any:
    """See :meth:`WriteObserver.cached_model_of`."""
    return None if _observer is None else _observer.cached_model_of(model)


def write(cached_model: Any, compiler: Any, execute: Callable[[], Any], counted: bool) -> Any:
    """See :meth:`WriteObserver.write`."""
    assert _observer is not None
    return _observer.write(cached_model, compiler, execute, counted)


def emptied(connection: Any) -> AbstractContextManager[object]:
    """See :meth:`WriteObserver.emptied`."""
    return nullcontext() if _observer is None else _observer.emptied(connection)
