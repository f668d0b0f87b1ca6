"""The first level of the cache, which keeps what one HTTP request or task has read (Yupoo, Y13).

If the code of a request reads a row a second time, the row comes from the memory of the process,
without a query. A first level lives from ``request_started`` to ``request_finished``, or for
a ``with cache_scope():`` block of a command or task. Code outside of both has no first level. A
request sees its own writes, because every write calls :func:`forget`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from asgiref.sync import SyncToAsync

#: How many rows and lists one first level may have. If there are more, all of them are dropped.
MAX_ENTRIES = 10_000


class RequestCache:
    """A first level of the cache: what one request, or one ``cache_scope()`` block, has read.

    The threads and tasks of the request share it. It has one dict of entries for each shard key and
    each global table. The dict is stored under the name of the *home guard* of the key or table,
    the cache entry that says whether other entries are valid. A write drops each dict whose rows it
    may change.

    A reader gets the dict *before* it queries the database, and puts the rows into it afterwards.
    If a write has dropped the dict meanwhile, no later reader finds these rows, which may be old.
    """

    __slots__ = ("_entries", "_homes", "is_closed", "is_request", "outer")

    def __init__(self, outer: RequestCache | None = None, *, is_request: bool = False) -> None:
        self._homes: dict[str, dict[str, Any]] = {}
        self._entries = 0
        self.is_closed = False
        self.is_request = is_request
        #: The first level of the enclosing request or block, which was in use when this one began;
        #: None if there was none.
        self.outer = outer

    def home(self, guard: str) -> dict[str, Any]:
        """Return the dict of the entries of one shard key or global table, keyed by entry name.

        The dict is not a copy: the caller adds the rows that it has read.

        :param guard: the name of the guard (the entry that says whether others are valid) of the
            shard key or table.
        """
        entries = self._homes.get(guard)
        if entries is None:
            # The new dict counts as an entry, so that many empty dicts cannot fill the memory.
            self.count(1)
            entries = self._homes.setdefault(guard, {})
        return entries

    def count(self, entries: int) -> None:
        """Count ``entries``, the number of entries that the caller has added. If there are now more
        than MAX_ENTRIES, drop all.
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
        # Start a new dict, and do not empty the old one: readers that have got the old one may
        # still add rows to it. Later readers must not find these rows.
        self._homes = {}
        self._entries = 0

    def close(self) -> None:
        """Drop all entries. Tasks that outlive the request or block then use no first level."""
        self.is_closed = True
        self.clear()


_current: ContextVar[RequestCache | None] = ContextVar("sharded_orm_level1", default=None)
# Maps each ASGI request to its first level. The key is an object of asgiref that all code of one
# request shares. A context variable would not work, because under ASGI, Django sends
# request_started in a task of its own, and a variable that is set in a task is lost when the task
# ends.
_of_request: WeakKeyDictionary[Any, RequestCache] = WeakKeyDictionary()


def current() -> RequestCache | None:
    """Return the first level of the current request or ``cache_scope()`` block; None outside of
    both.
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
    """Context manager that gives its block a first level of the cache: a second read of the same
    row needs no round trip.

    Use it in commands, queued tasks and tests, where no request has a first level. A nested block
    starts with an empty one.
    """
    level = RequestCache(_current.get())
    token = _current.set(level)
    try:
        yield
    finally:
        level.close()
        _current.reset(token)


def begin_request(**kwargs: Any) -> None:
    """Start an empty first level of the cache for a request. Receiver of ``request_started``.

    If an earlier request in this context has left its first level open, close that one.
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
    """Close the first level of the request. Receiver of ``request_finished``."""
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
    """Drop entries from the first level of the cache, and from those of enclosing ``with
    cache_scope():`` blocks.

    Called at each write, and again at the end of the write's transaction.

    :param home_guard: the name of the guard (the entry that says whether others are valid) of a
        shard key or global table. The entries of this key or table are dropped. None (the default)
        drops all entries.
    """
    context = SyncToAsync.thread_sensitive_context.get(None)
    of_request = None if context is None else _of_request.get(context)
    for level in (of_request, _current.get()):
        # Also drop the entries in the first levels of enclosing blocks. They may have the written
        # rows, too.
        while level is not None:
            level.forget(home_guard)
            level = level.outer


_uncached: ContextVar[bool] = ContextVar("sharded_orm_uncached", default=False)


@contextmanager
def uncached() -> Iterator[None]:
    """Context manager in whose block all reads query the database, without looking into the cache.

    What they read is not stored in the cache, either.
    """
    token = _uncached.set(True)
    try:
        yield
    finally:
        _uncached.reset(token)


is_uncached = _uncached.get
