"""What a process remembers of what it has read from the cache. Never believed by itself.

Lists and revisions save a round trip, :class:`Decoded` saves the work of reading entries. A
guard that is read now tells whether what is remembered is still right.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar
from weakref import WeakSet

from sharded_orm.cache.values import Row

# Longer lists (rows) are not remembered.
_LONGEST_LIST = 100


class Listed:
    """The ids of a list under a revision, with the names of the objects; or a scalar."""

    __slots__ = ("names", "pks", "revision", "value")

    def __init__(
        self, revision: str, pks: tuple[str, ...], names: tuple[str, ...], value: int | None
    ) -> None:
        self.revision = revision
        self.pks = pks
        self.names = names
        self.value = value


class ProcessCache:
    """What a process remembers of lists and guards it has seen. Thread-safe.

    It is never believed by itself: a guard that is read now tells whether it is still
    right. The oldest entries are dropped beyond ``limit``.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._lists: dict[tuple[str, str], Listed] = {}
        self._revisions: dict[str, str] = {}

    def listed(self, guard: str, query: str) -> Listed | None:
        return self._lists.get((guard, query))

    def revision(self, guard: str) -> str | None:
        return self._revisions.get(guard)

    def note(self, guard: str, query: str, listed: Listed) -> None:
        if len(listed.pks) <= _LONGEST_LIST:
            with self._lock:
                _put(self._lists, (guard, query), listed, self._limit)

    def note_revision(self, guard: str, revision: str) -> None:
        if self._revisions.get(guard) != revision:
            with self._lock:
                _put(self._revisions, guard, revision, self._limit)


def _put(kept: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    kept.pop(key, None)
    if len(kept) >= limit:
        del kept[next(iter(kept))]
    kept[key] = value


class Decoded:
    """What entries that were read before have turned out to be, by their bytes. Thread-safe.

    Reading an entry takes longer than asking for it. Equal bytes under the same name and
    stamp are the same row, so nothing here can be out of date.
    """

    #: Bytes of entries that a process remembers, of all kinds; beyond it begins anew.
    LIMIT = 4 << 20
    #: Longer entries are not remembered.
    LONGEST = 1 << 14

    _all: ClassVar[WeakSet[Decoded]] = WeakSet()
    _total: ClassVar[int] = 0

    def __init__(self) -> None:
        self.known: dict[bytes | None, tuple[str, str, Row]] = {}
        self._all.add(self)

    def note(self, raw: bytes, stamp: str, name: str, row: Row) -> None:
        if len(raw) > self.LONGEST:
            return
        # Threads may count at the same time and lose a little; the limit is a rough one.
        Decoded._total += len(raw)
        if Decoded._total > self.LIMIT:
            for each in list(self._all):
                each.known = {}
            Decoded._total = len(raw)
        self.known[raw] = (stamp, name, row)
