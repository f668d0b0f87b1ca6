"""The connection objects of one group's shards in one thread: bounded, and closed together.

Django keeps a thread's connection objects in ``django.db.connections`` for ever, and closes those
of the aliases that it iterates over. Shards are many, and Django does not iterate over them, so
their group keeps and closes their connection objects (wrappers).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, cast

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from sharded_orm.backends.group.contract import GroupMember

# How many wrappers are checked when there are too many. In a transaction over thousands of shards
# none can be evicted; checking all of them for each new one would be quadratic.
_EVICTION_CHECKS = 8
# Seconds between two searches for idle connections that are older than CONN_MAX_AGE.
_EXPIRY_INTERVAL = 1.0


class ShardRegistry:
    """The wrappers of a group's shards in a thread, least recently used first. Not thread-safe.

    :param limit: the most idle wrappers to keep; None keeps all (test runs).
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.wrappers: OrderedDict[str, GroupMember] = OrderedDict()
        # By id, the wrappers used since the last close_obsolete(): only these can have errors, a
        # changed autocommit or a health check to repeat.
        self.active: dict[int, GroupMember] = {}
        self._next_expiry = float("inf")
        self._last_walk = 0.0

    def __iter__(self) -> Iterator[GroupMember]:
        return iter(list(self.wrappers.values()))

    def add(self, wrapper: GroupMember) -> None:
        """Make ``wrapper`` the thread's wrapper of its alias; evict others above the limit.

        A wrapper that was evicted while a caller held it comes back this way when it is used
        again. If its alias has another wrapper by then, it stays a separate connection, like
        ``connection.copy()``.
        """
        alias = wrapper.alias
        current = _thread_wrapper(alias)
        if current is not None and current is not wrapper:
            return
        connections[alias] = cast("BaseDatabaseWrapper", wrapper)
        self.wrappers[alias] = wrapper
        if self.limit is not None and len(self.wrappers) > self.limit:
            self._evict(self.limit, keep=wrapper)

    def record_connect(self, wrapper: GroupMember) -> None:
        """``wrapper`` has connected, and may have to be closed at its ``close_at``."""
        if wrapper.close_at is not None and wrapper.close_at < self._next_expiry:
            self._next_expiry = wrapper.close_at

    def record_use(self, wrapper: GroupMember) -> None:
        """``wrapper`` is used for the first time since :meth:`close_obsolete`."""
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
        """Drop ``wrapper`` from the thread. A caller that holds it may go on using it."""
        alias = wrapper.alias
        wrapper.is_active = False
        self.active.pop(id(wrapper), None)
        if self.wrappers.get(alias) is wrapper:
            del self.wrappers[alias]
        if _thread_wrapper(alias) is wrapper:
            del connections[alias]

    def close_obsolete(self) -> None:
        """Call ``close_if_unusable_or_obsolete()`` of the shards used since the last time.

        The cost does not depend on how many wrappers are kept.
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


def _thread_wrapper(alias: str) -> Any:
    """Return the thread's wrapper of ``alias``; None if it has none. Does not create one."""
    return getattr(connections._connections, alias, None)  # type: ignore[attr-defined]  # private: the public look-up would make one
