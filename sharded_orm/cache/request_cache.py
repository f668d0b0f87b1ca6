"""The first level of the cache: what one HTTP request or task has read (Yupoo, Y13).

A request that reads rows a second time gets the rows of the first time, from the memory of the
process. A first level lives from ``request_started`` to ``request_finished``, or for a ``with
cache_scope():`` block of a command or task; other code has none. A request sees its own writes,
because every write calls :func:`forget`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from asgiref.sync import SyncToAsync

#: The most rows and lists in one first-level cache. A cache with more of them is emptied.
MAX_ENTRIES = 10_000


class RequestCache:
    """A first level: what one request, or one ``cache_scope()`` block, has read.

    The threads and tasks of the request share the first level. It has one dict of entries for each
    shard key or global table, stored under the name of that key's or table's *home guard*, the
    cache entry that says whether the others are valid. A write drops each dict that it may affect.

    A reader gets the dict *before* it queries the database, and later puts the rows into this dict.
    If a write has dropped the dict meanwhile, no later reader finds the rows.
    """

    __slots__ = ("_entries", "_homes", "is_closed", "is_request", "outer")

    def __init__(self, outer: RequestCache | None = None, *, is_request: bool = False) -> None:
        self._homes: dict[str, dict[str, Any]] = {}
        self._entries = 0
        self.is_closed = False
        self.is_request = is_request
        #: The enclosing first-level cache, which was in use when this cache was made; None if there
        #: was none.
        self.outer = outer

    def home(self, guard: str) -> dict[str, Any]:
        """Return the dict of the entries of one shard key or global table, keyed by entry name.

        The dict is not a copy: the caller may add entries to it.

        :param guard: the name of the guard (the entry that says whether others are valid) of the
            shard key or table.
        """
        entries = self._homes.get(guard)
        if entries is None:
            # The new dict itself counts as an entry: even many empty dicts must not fill the
            # memory.
            self.count(1)
            entries = self._homes.setdefault(guard, {})
        return entries

    def count(self, entries: int) -> None:
        """Count added entries. Drop all entries if there are now more than MAX_ENTRIES.

        :param entries: the number of entries that the caller has added.
        """
        self._entries += entries
        if self._entries > MAX_ENTRIES:
            self.clear()

    def forget(self, guard: str | None) -> None:
        if guard is None:
            self.clear()
        else:
            self._homes.pop(guard, None)

    def clear(self) -> None:
        # Make a new dict instead of emptying the old one: readers may still add rows to the old
        # dict, where no later reader finds them.
        self._homes = {}
        self._entries = 0

    def close(self) -> None:
        """Drop all entries, and turn the cache off for tasks that outlive the request or block."""
        self.is_closed = True
        self.clear()


_current: ContextVar[RequestCache | None] = ContextVar("sharded_orm_level1", default=None)
# The first-level cache of each request under ASGI. The key is an object of asgiref that all code of
# one request shares. A context variable would not work: under ASGI, Django sends request_started in
# a separate task, and a variable that is set in a task ends with the task.
_of_request: WeakKeyDictionary[Any, RequestCache] = WeakKeyDictionary()


def current() -> RequestCache | None:
    """Return the first-level cache of the current request or ``cache_scope()`` block.

    Return None outside of requests and such blocks.
    """
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
    """Context manager that gives the block a first level of the cache.

    Inside the block, a second read of the same rows needs no round trip. A nested block starts with
    an empty first level. Use it in commands, queued tasks and tests.
    """
    level = RequestCache(_current.get())
    token = _current.set(level)
    try:
        yield
    finally:
        level.close()
        _current.reset(token)


def begin_request(**kwargs: Any) -> None:
    """Start an empty first-level cache for a request. Receiver of ``request_started``.

    If an earlier request in this context has left its first-level cache open, close that cache.
    """
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
    """Close the first-level cache of the request. Receiver of ``request_finished``."""
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
    """Drop entries from the request's first-level cache, and from those of enclosing blocks.

    An enclosing block is a ``with cache_scope():`` block around the running code.

    Called at each write, and again when the write's transaction has ended.

    :param home_guard: the name of the cache entry that guards a shard key or global table. The
        entries of that key or table are dropped. None (the default) drops all entries.
    """
    context = SyncToAsync.thread_sensitive_context.get(None)
    _forget(_of_request.get(context) if context is not None else None, home_guard)
    _forget(_current.get(), home_guard)


def _forget(level: RequestCache | None, guard: str | None) -> None:
    # Also drop the entries from the first-level caches of enclosing blocks, which may hold the
    # written rows.
    while level is not None:
        level.forget(guard)
        level = level.outer


_uncached: ContextVar[bool] = ContextVar("sharded_orm_uncached", default=False)


@contextmanager
def uncached() -> Iterator[None]:
    """Context manager in whose block reads query the database and do not use the cache.

    The rows that they read are not stored in the cache either.
    """
    token = _uncached.set(True)
    try:
        yield
    finally:
        _uncached.reset(token)


is_uncached = _uncached.get
