"""A cache server in the memory of this process: for the demo and for tests."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharded_orm import forks
from sharded_orm.cache.stores.base import (
    LEASE_SECONDS,
    MAX_VALUE,
    CacheEntry,
    CacheServer,
    FoundEntry,
    Lease,
    Reply,
)


@dataclass(slots=True)
class _Item:
    # The bytes of the entry. Empty bytes mean that the entry is missing, and that a reader has the
    # lease (the permission) to store it.
    value: bytes
    version: int
    expires: float


class LocalServer(CacheServer):
    """A cache server in the memory of this process. Thread-safe.

    A forked child starts without entries.
    """

    def __init__(
        self,
        name: str,
        max_entries: int = 300,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        :param name: the name of the server in messages.
        :param max_entries: the largest number of entries. When more are stored, the least recently
            used entries are removed.
        :param clock: returns monotonic time in seconds, for the expiry of entries.
        """
        self.name = f"memory {name}"
        self.max_entries = max_entries
        self._clock = clock
        self._versions = itertools.count(1)
        self._items: OrderedDict[str, _Item] = OrderedDict()
        self._lock = threading.Lock()
        self._process = forks.identity()
        self._evicted = 0

    def _locked(self) -> threading.Lock:
        if forks.identity() != self._process:
            # This is a forked child. A thread of the parent may have held the lock at the fork,
            # with half of the items changed, and nobody would release it here. So start with a new
            # lock, without items.
            self._lock = threading.Lock()
            self._items = OrderedDict()
            self._process = forks.identity()
        self.round_trips += 1
        return self._lock

    def _find(self, name: str) -> _Item | None:
        item = self._items.get(name)
        if item is None:
            return None
        if item.expires <= self._clock():
            del self._items[name]
            return None
        self._items.move_to_end(name)
        return item

    def _put(self, name: str, value: bytes, ttl: float) -> _Item:
        item = _Item(value, next(self._versions), self._clock() + ttl)
        self._items[name] = item
        self._items.move_to_end(name)
        while len(self._items) > self.max_entries:
            self._items.popitem(last=False)
            self._evicted += 1
        return item

    def _value(self, name: str) -> bytes | None:
        item = self._find(name)
        return item.value or None if item else None

    def _lease_or_value(self, name: str) -> FoundEntry:
        item = self._find(name)
        if item is None:
            return FoundEntry(None, self._put(name, b"", LEASE_SECONDS).version)
        return FoundEntry(item.value, item.version) if item.value else FoundEntry(None)

    # ##### The methods of CacheServer #####

    def read(
        self, names: Sequence[str], objects: Sequence[str] = (), again: Sequence[str] = ()
    ) -> Reply:
        with self._locked():
            return (
                list(map(self._value, names)),
                list(map(self._lease_or_value, objects)),
                list(map(self._value, again)),
            )

    def lease(self, objects: Sequence[str], entries: Sequence[FoundEntry]) -> list[Lease | None]:
        return [entry.lease for entry in entries]

    def release(self, objects: Mapping[str, FoundEntry]) -> None:
        # Give back only the leases (permissions to store) of missing objects: these keep other
        # readers from storing the object. The lease of an object that was found is only the
        # object's version number.
        leases = {name: lease for name, (value, lease) in objects.items() if value is None}
        if not leases:
            return
        with self._locked():
            for name, lease in leases.items():
                item = self._find(name)
                if item is not None and item.version == lease:
                    del self._items[name]

    def fill(
        self, entries: Sequence[CacheEntry], ttl: float, again: Sequence[str] = ()
    ) -> tuple[list[bool], list[bytes | None]]:
        stored = []
        with self._locked():
            for name, value, lease in entries:
                item = self._find(name)
                holds = lease is None or (item is not None and item.version == lease)
                fits = 0 < len(value) <= MAX_VALUE
                if holds and fits:
                    self._put(name, value, ttl)
                stored.append(holds and fits)
            for name in again:
                if item := self._find(name):
                    item.expires = self._clock() + 2 * ttl
            return stored, list(map(self._value, again))

    def mark(self, records: Sequence[tuple[str, bytes]], header: bytes, ttl: float) -> list[int]:
        sizes = []
        with self._locked():
            for name, record in records:
                raw = (self._value(name) or header) + record
                self._put(name, raw, ttl)
                sizes.append(len(raw))
        return sizes

    def finish(
        self,
        objects: Sequence[str],
        records: Sequence[tuple[str, bytes]],
        lost: Callable[[], object] | None = None,
    ) -> None:
        with self._locked():
            for name in objects:
                self._items.pop(name, None)
            for name, record in records:
                if item := self._find(name):
                    self._put(name, item.value + record, item.expires - self._clock())

    def add(self, guards: Sequence[tuple[str, bytes]], ttl: float) -> list[bytes]:
        there = []
        with self._locked():
            for name, record in guards:
                raw = self._value(name) or record
                self._put(name, raw, ttl)
                there.append(raw)
        return there

    def replace(self, name: str, seen: bytes, new: bytes, ttl: float) -> bool:
        with self._locked():
            if self._value(name) != seen:
                return False
            self._put(name, new, ttl)
            return True

    def count(self, deltas: Mapping[str, int]) -> None:
        with self._locked():
            for name, delta in deltas.items():
                self._put(name, b"%d" % (int(self._value(name) or 0) + delta), float("inf"))

    def counters(self, names: Sequence[str]) -> list[int]:
        with self._locked():
            return [
                int(value) if value and value.isdigit() else 0 for value in map(self._value, names)
            ]

    def info(self) -> dict[str, Any]:
        with self._locked():
            return {
                "entries": len(self._items),
                "max_entries": self.max_entries,
                "bytes": sum(len(item.value) for item in self._items.values()),
                "evictions": self._evicted,
            }

    def close(self) -> None:
        """Do nothing: there are no connections to close, and the entries are kept."""
