"""The first level of the cache: the rows that one request or task has read (Yupoo, Y13).

It lives from ``request_started`` to ``request_finished``, or for a ``with cache_scope():``
block of a command or a task; there is none outside of these. The second time, a read is answered
without a round trip, with the rows of the first time. A request sees its own writes: every
write calls :func:`forget`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from asgiref.sync import SyncToAsync

#: The number of rows and lists at which a level is cleared.
MAX_ENTRIES = 10_000


class RequestCache:
    """The rows that one request or block has read. Its threads and tasks share it.

    Entries are kept by the name of their *home guard*, the guard of their shard key or global
    table, so that a write drops all entries that it may affect. A reader takes the dict of a guard
    *before* it reads, and puts the rows there: if a write has dropped the dict meanwhile, no
    reader uses it again.
    """

    __slots__ = ("_entries", "_homes", "is_closed", "is_request", "outer")

    def __init__(self, outer: RequestCache | None = None, *, is_request: bool = False) -> None:
        self._homes: dict[str, dict[str, Any]] = {}
        self._entries = 0
        self.is_closed = False
        self.is_request = is_request
        #: The level of the block around this one.
        self.outer = outer

    def home(self, guard: str) -> dict[str, Any]:
        """The entries of the rows that ``guard`` stands for, by name."""
        entries = self._homes.get(guard)
        if entries is None:
            # The dict counts as an entry, as it may stay empty.
            self.count(1)
            entries = self._homes.setdefault(guard, {})
        return entries

    def count(self, entries: int) -> None:
        """Note that a caller has added this number of entries. A full level is cleared."""
        self._entries += entries
        if self._entries > MAX_ENTRIES:
            self.clear()

    def forget(self, guard: str | None) -> None:
        if guard is None:
            self.clear()
        else:
            self._homes.pop(guard, None)

    def clear(self) -> None:
        # A new dict: readers may hold parts of the old one.
        self._homes = {}
        self._entries = 0

    def close(self) -> None:
        """Clear the level and turn it off for tasks that outlive the request."""
        self.is_closed = True
        self.clear()


_current: ContextVar[RequestCache | None] = ContextVar("sharded_orm_level1", default=None)
# Under ASGI Django sends its signals in tasks of their own, whose context variables end with
# them. This object of asgiref is shared by a whole request.
_of_request: WeakKeyDictionary[Any, RequestCache] = WeakKeyDictionary()


def current() -> RequestCache | None:
    """The level of this request or block; None outside of both."""
    level = _current.get()
    if level is None:
        context = SyncToAsync.thread_sensitive_context.get(None)
        if context is None:
            return None
        level = _of_request.get(context)
        if level is None:
            return None
    return None if level.is_closed else level


@contextmanager
def cache_scope() -> Iterator[None]:
    """A first level of the cache for the block: for commands, tasks of a queue, tests.

    A second read of the same rows inside needs no round trip. A block inside another one starts
    empty.
    """
    level = RequestCache(_current.get())
    token = _current.set(level)
    try:
        yield
    finally:
        level.close()
        _current.reset(token)


def begin_request(**kwargs: Any) -> None:
    """Receiver of ``request_started``: starts an empty level, even if an earlier one was left."""
    context = SyncToAsync.thread_sensitive_context.get(None)
    if context is not None:
        _of_request[context] = RequestCache(is_request=True)
        return
    outer = _current.get()
    if outer is not None and outer.is_request:
        outer.close()
        outer = outer.outer
    _current.set(RequestCache(outer, is_request=True))


def end_request(**kwargs: Any) -> None:
    """Receiver of ``request_finished``: closes the level of the request."""
    context = SyncToAsync.thread_sensitive_context.get(None)
    level = _of_request.pop(context, None) if context is not None else None
    if level is not None:
        level.close()
        return
    level = _current.get()
    if level is not None and level.is_request:
        level.close()
        _current.set(level.outer)


def forget(home_guard: str | None = None) -> None:
    """Drop the entries of the rows that ``home_guard`` stands for; None: all entries.

    Called at each write, and when its transaction has ended.
    """
    context = SyncToAsync.thread_sensitive_context.get(None)
    _forget(_of_request.get(context) if context is not None else None, home_guard)
    _forget(_current.get(), home_guard)


def _forget(level: RequestCache | None, guard: str | None) -> None:
    # A write in a block is also one in the block around it.
    while level is not None:
        level.forget(guard)
        level = level.outer


_uncached: ContextVar[bool] = ContextVar("sharded_orm_uncached", default=False)


@contextmanager
def uncached() -> Iterator[None]:
    """All reads in the block query the database and do not fill the cache."""
    token = _uncached.set(True)
    try:
        yield
    finally:
        _uncached.reset(token)


is_uncached = _uncached.get
