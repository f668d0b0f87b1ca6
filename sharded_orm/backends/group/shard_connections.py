"""Keeps, limits and closes the connection objects (wrappers) of one group's shards in one thread.

Django never drops connection objects, and closes only those of the aliases over which
``django.db.connections`` iterates. It does not iterate over shards, because there may be thousands.
So the group keeps a limited number of the shards' wrappers, and closes their connections.
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

# If a new wrapper (connection object of a shard) exceeds the limit, idle ones are dropped. To find
# them, look at only this many others. For example, in a transaction over thousands of shards, none
# is idle. To look at all of them for each new one would cost the square of their number.
_EVICTION_CHECKS = 8
# Connections older than CONN_MAX_AGE are searched for at most once in this many seconds.
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
        # The wrappers that were used since the last close_obsolete(), keyed by id(). Only these can
        # have become unusable, by an error or by a change of autocommit. So close_obsolete() tests
        # only these.
        self.active: dict[int, GroupMember] = {}
        self._next_expiry = float("inf")
        self._last_walk = 0.0

    def __iter__(self) -> Iterator[GroupMember]:
        return iter(list(self.wrappers.values()))

    def add(self, wrapper: GroupMember) -> None:
        """Make ``wrapper`` the thread's connection object of its alias. Does nothing if the alias
        already has another one.

        If there are too many wrappers, idle ones are evicted: closed and dropped. A caller that has
        kept a reference to an evicted wrapper can go on using it. The wrapper is then added again,
        unless its alias has got another wrapper meanwhile.
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
        """Record that ``wrapper`` has connected.

        The connection expires at ``wrapper.close_at``, a moment of ``time.monotonic()``. After
        that, :meth:`close_obsolete` closes the connection as soon as it is idle.
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
        """Close connections that are broken or too old.

        Calls ``close_if_unusable_or_obsolete()`` of each wrapper that was used since the last call
        of this method. An unused wrapper cannot have broken, but can have become too old. The age
        of unused wrappers is tested only from time to time, so a usual call takes no longer if many
        wrappers are kept.
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
# Whether _GET is Django's own method. False if another package had replaced it before this module
# was imported.
_IS_KNOWN = module_of(_GET) == BaseConnectionHandler.__module__


def connection_of(alias: str) -> Any:
    """Return ``connections[alias]``. If the thread has this connection object already, this takes a
    fifth of the time.
    """
    # Without a running event loop, Django keeps the thread's connection objects in a
    # ``threading.local``. Read it directly. Django first asks for the event loop, and catches
    # Python's error that there is none, which takes most of its time.
    if _get_running_loop() is None and _IS_KNOWN and type(connections).__getitem__ is _GET:
        storage = getattr(connections._connections, "_storage", None)  # type: ignore[attr-defined]  # a private attribute of Django's handler
        if type(storage) is _LOCAL:
            wrapper = getattr(storage, alias, None)
            if wrapper is not None:
                return wrapper
    return connections[alias]


def thread_wrapper(alias: str) -> Any:
    """Return this thread's connection object of ``alias``; None if it has none yet. Unlike
    ``connections[alias]``, this does not create one.
    """
    return getattr(connections._connections, alias, None)  # type: ignore[attr-defined]  # a private attribute of Django's handler, because its public look-up creates a missing connection
