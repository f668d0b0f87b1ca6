"""Keep, limit and close the connection objects (wrappers) of one group's shards in one thread.

Django never drops connection objects, and closes only those of the aliases over which
``django.db.connections`` iterates. Shards, of which there may be thousands, are not among these. So
the group keeps a limited number of the shards' wrappers, and closes their connections.
"""

from __future__ import annotations

import threading
import time
from asyncio import _get_running_loop
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, cast

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.utils import ConnectionHandler
from django.utils.connection import BaseConnectionHandler

from sharded_orm.backends.group.contract import GroupMember
from sharded_orm.method_origin import module_of

# If a new wrapper (connection object of a shard) exceeds the limit, at most this many others are
# checked, and dropped if they are idle. In a transaction over thousands of shards, none is idle,
# and checking all for each new one would cost the square of their number.
_EVICTION_CHECKS = 8
# Minimum seconds between two searches for idle connections older than CONN_MAX_AGE.
_EXPIRY_INTERVAL = 1.0


class ShardConnections:
    """The connection objects (wrappers) of a group's shards in one thread. Not thread-safe.

    ``wrappers`` is ordered by use, the least recently used wrapper first.

    :param limit: the largest number of wrappers to keep. Above the limit, idle wrappers are
        dropped. None to keep all, as in test runs.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.wrappers: OrderedDict[str, GroupMember] = OrderedDict()
        # Wrappers used since the last close_obsolete(), keyed by id(). Only these must be checked,
        # because an unused wrapper cannot have had an error or a change of autocommit.
        self.active: dict[int, GroupMember] = {}
        self._next_expiry = float("inf")
        self._last_walk = 0.0

    def __iter__(self) -> Iterator[GroupMember]:
        return iter(list(self.wrappers.values()))

    def add(self, wrapper: GroupMember) -> None:
        """Make ``wrapper`` the thread's connection object of its alias. Does nothing if the alias
        has another wrapper.

        If there are too many wrappers, idle ones are evicted: closed and dropped. A caller that
        still has an evicted wrapper may use it: it is then added again. If its alias has another
        wrapper by then, it stays separate, like ``connection.copy()``.
        """
        alias = wrapper.alias
        current = thread_wrapper(alias)
        if current is not None and current is not wrapper:
            return
        connections[alias] = cast("BaseDatabaseWrapper", wrapper)
        self.wrappers[alias] = wrapper
        if self.limit is not None and len(self.wrappers) > self.limit:
            self._evict(self.limit, keep=wrapper)

    def record_connect(self, wrapper: GroupMember) -> None:
        """Record that ``wrapper`` has connected. The connection is closed when the moment
        ``wrapper.close_at`` (of ``time.monotonic()``) has come.
        """
        if wrapper.close_at is not None and wrapper.close_at < self._next_expiry:
            self._next_expiry = wrapper.close_at

    def record_use(self, wrapper: GroupMember) -> None:
        """Record that ``wrapper`` was used since the last :meth:`close_obsolete`."""
        wrapper.is_active = True
        self.active[id(wrapper)] = wrapper

    def _evict(self, limit: int, keep: GroupMember) -> None:
        for _ in range(_EVICTION_CHECKS):
            if len(self.wrappers) <= limit:
                return
            alias, wrapper = next(iter(self.wrappers.items()))
            if wrapper is keep or not wrapper.is_evictable():
                self.wrappers.move_to_end(alias)
                continue
            self.forget(wrapper)
            wrapper.close()

    def forget(self, wrapper: GroupMember) -> None:
        """Drop ``wrapper`` from the thread's connections. Callers that refer to it may still use it."""
        alias = wrapper.alias
        wrapper.is_active = False
        self.active.pop(id(wrapper), None)
        if self.wrappers.get(alias) is wrapper:
            del self.wrappers[alias]
        if thread_wrapper(alias) is wrapper:
            del connections[alias]

    def close_obsolete(self) -> None:
        """Close the unusable and expired connections of wrappers.

        Calls ``close_if_unusable_or_obsolete()`` of each wrapper that was used since this method
        was last called. From time to time, all wrappers are searched for connections that have
        expired. Apart from that, the cost does not depend on how many wrappers are kept.
        """
        active, self.active = self.active, {}
        for wrapper in active.values():
            wrapper.is_active = False
            wrapper.close_if_unusable_or_obsolete()
        now = time.monotonic()
        if now >= self._next_expiry and now - self._last_walk >= _EXPIRY_INTERVAL:
            self._last_walk = now
            self._close_expired(now)

    def _close_expired(self, now: float) -> None:
        self._next_expiry = float("inf")
        for wrapper in self:
            if wrapper.connection is None or wrapper.close_at is None:
                continue
            if wrapper.close_at <= now and wrapper.is_idle():
                wrapper.close_if_unusable_or_obsolete()
            else:
                self.record_connect(wrapper)


_GET, _LOCAL = ConnectionHandler.__getitem__, threading.local
# Another package may have replaced the method before this module was imported.
_IS_KNOWN = module_of(_GET) == BaseConnectionHandler.__module__


def connection_of(alias: str) -> Any:
    """Return ``connections[alias]``, in a fifth of the time if the thread has the connection object."""
    # Outside of event loops, Django's handler keeps the objects of a thread in an object of ``threading.local``. It
    # finds out that there is no event loop by an error of Python's, which takes longer than the rest.
    if _get_running_loop() is None and _IS_KNOWN and type(connections).__getitem__ is _GET:
        storage = getattr(connections._connections, "_storage", None)  # type: ignore[attr-defined]  # a private attribute of Django's handler
        if type(storage) is _LOCAL:
            wrapper = getattr(storage, alias, None)
            if wrapper is not None:
                return wrapper
    return connections[alias]


def thread_wrapper(alias: str) -> Any:
    """Return this thread's connection object of ``alias``, or None. Unlike Django's look-up, creates
    nothing.
    """
    return getattr(connections._connections, alias, None)  # type: ignore[attr-defined]  # a private attribute of Django's handler, because its public look-up creates a missing connection
