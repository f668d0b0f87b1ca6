"""The shard connections of one group in one thread: bounded, closed together.

Django keeps a thread's connection objects in ``django.db.connections`` for ever and
closes those of the aliases it iterates over. Shards are many and are not iterated, so
their group does both for them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, cast

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from sharded_orm.backends.group.contract import GroupMember

# How many wrappers an overflow looks at. A transaction over thousands of shards makes
# all of them unevictable; looking at each of them for each new one would be quadratic.
_EVICTION_LOOKS = 8
# Seconds between two walks for connections that outlived CONN_MAX_AGE while not in use.
_EXPIRY_INTERVAL = 1.0


class ShardRegistry:
    """The shard wrappers of a thread, least recently used first.

    Not thread-safe: it belongs to a group wrapper, and that belongs to a thread.

    :param limit: idle wrappers that may be kept; None keeps all (test runs).
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.wrappers: OrderedDict[str, GroupMember] = OrderedDict()
        # Used since Django last asked to close what is obsolete: only these can have
        # errors, a changed autocommit or a health check to repeat.
        self.active: dict[int, GroupMember] = {}
        self._next_expiry = float("inf")
        self._last_walk = 0.0

    def __iter__(self) -> Iterator[GroupMember]:
        return iter(list(self.wrappers.values()))

    def adopt(self, wrapper: GroupMember) -> None:
        """Count ``wrapper`` among those of the thread; evict others above the limit.

        A wrapper that was evicted while somebody held it comes back this way when it
        is used again, unless its alias has another wrapper by now: then it stays a
        connection of its own, like ``connection.copy()``.
        """
        alias = wrapper.alias
        current = _known(alias)
        if current is not None and current is not wrapper:
            return
        connections[alias] = cast("BaseDatabaseWrapper", wrapper)
        self.wrappers[alias] = wrapper
        if self.limit is not None and len(self.wrappers) > self.limit:
            self._evict(self.limit, keep=wrapper)

    def opened(self, wrapper: GroupMember) -> None:
        """``wrapper`` has connected; it may have to be closed at its ``close_at``."""
        if wrapper.close_at is not None and wrapper.close_at < self._next_expiry:
            self._next_expiry = wrapper.close_at

    def used(self, wrapper: GroupMember) -> None:
        """``wrapper`` is used for the first time since :meth:`close_obsolete`."""
        wrapper.is_active = True
        self.active[id(wrapper)] = wrapper

    def _evict(self, limit: int, keep: GroupMember) -> None:
        for _ in range(_EVICTION_LOOKS):
            if len(self.wrappers) <= limit:
                return
            alias, wrapper = next(iter(self.wrappers.items()))
            if wrapper is keep or not wrapper.is_evictable():
                self.wrappers.move_to_end(alias)
                continue
            self.forget(wrapper)
            wrapper.close()

    def forget(self, wrapper: GroupMember) -> None:
        """Drop ``wrapper`` from the thread; whoever holds it may go on using it."""
        alias = wrapper.alias
        wrapper.is_active = False
        self.active.pop(id(wrapper), None)
        if self.wrappers.get(alias) is wrapper:
            del self.wrappers[alias]
        if _known(alias) is wrapper:
            del connections[alias]

    def close_obsolete(self) -> None:
        """Django's ``close_if_unusable_or_obsolete`` for the shards.

        Costs as much as shards were used since the last time, however many are kept.
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
                self.opened(wrapper)


def _known(alias: str) -> Any:
    """The thread's wrapper of ``alias``; None where ``connections[alias]`` would make one."""
    return getattr(connections._connections, alias, None)  # type: ignore[attr-defined]  # private: the public look-up would make one
