"""The first level: what one request or task has read already (Yupoo, Y13).

It lives from ``request_started`` to ``request_finished``, or for a ``with cache_scope():``
block of a command or a task, and outside of these there is none. What is asked twice is
answered without a round trip; it is as old as the first answer. A request sees its own
writes: whoever writes calls :func:`forget`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from asgiref.sync import SyncToAsync

#: Rows and lists; a level that is full begins anew.
MAX_ENTRIES = 10_000


class RequestCache:
    """What one request or block has read. Its threads and tasks share it.

    Entries are kept by the name of their home guard, so that all that a write may concern
    is dropped together. Whoever reads takes the dict of a guard *before* it reads, and puts
    what it found there: if a write has dropped the dict meanwhile, nobody looks at it again.
    """

    __slots__ = ("_entries", "_homes", "is_closed", "is_request", "outer")

    def __init__(self, outer: RequestCache | None = None, *, is_request: bool = False) -> None:
        self._homes: dict[str, dict[str, Any]] = {}
        self._entries = 0
        self.is_closed = False
        self.is_request = is_request
        #: The block in which this one was begun.
        self.outer = outer

    def home(self, guard: str) -> dict[str, Any]:
        """The entries of the rows that ``guard`` stands for, by name."""
        found = self._homes.get(guard)
        if found is None:
            # Counted, as it may stay empty.
            self.count(1)
            found = self._homes.setdefault(guard, {})
        return found

    def count(self, entries: int) -> None:
        """Tell that so many entries were put somewhere."""
        self._entries += entries
        if self._entries > MAX_ENTRIES:
            self.clear()

    def forget(self, guard: str | None) -> None:
        if guard is None:
            self.clear()
        else:
            self._homes.pop(guard, None)

    def clear(self) -> None:
        # A new dict: what others have taken from the old one is not looked at again.
        self._homes = {}
        self._entries = 0

    def close(self) -> None:
        """A task that outlives the request finds it off."""
        self.is_closed = True
        self.clear()


_current: ContextVar[RequestCache | None] = ContextVar("sharded_orm_level1", default=None)
# Under ASGI Django sends its signals in tasks of their own, whose context variables end with
# them. What a whole request shares is this object of asgiref.
_of_request: WeakKeyDictionary[Any, RequestCache] = WeakKeyDictionary()


def current() -> RequestCache | None:
    """The level of this request or block; None outside."""
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
    """A first level for the block: for commands, tasks of a queue, tests.

    What is read twice inside is asked once. A block inside another one begins anew.
    """
    level = RequestCache(_current.get())
    token = _current.set(level)
    try:
        yield
    finally:
        level.close()
        _current.reset(token)


def begin_request(**kwargs: Any) -> None:
    """Receiver of ``request_started``: always begins anew, whatever an earlier one left."""
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
    """Receiver of ``request_finished``."""
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
    """Drop what this request has read of the rows that ``home_guard`` stands for; None: all.

    For whoever writes: at each write, and when its transaction has ended.
    """
    context = SyncToAsync.thread_sensitive_context.get(None)
    _forget(_of_request.get(context) if context is not None else None, home_guard)
    _forget(_current.get(), home_guard)


def _forget(level: RequestCache | None, guard: str | None) -> None:
    # What is written in a block is written in the one around it, too.
    while level is not None:
        level.forget(guard)
        level = level.outer


_uncached: ContextVar[bool] = ContextVar("sharded_orm_uncached", default=False)


@contextmanager
def uncached() -> Iterator[None]:
    """All reads in the block ask the database, and fill nothing."""
    token = _uncached.set(True)
    try:
        yield
    finally:
        _uncached.reset(token)


is_uncached = _uncached.get
