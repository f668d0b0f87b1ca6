"""The memory of a process for entries that it has read from the cache.

It is never believed alone: a guard that is read now says whether it is still right. Lists and
revisions save a round trip, and :class:`Decoded` saves the work of decoding entries.
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
    """The last lists and revisions that a process has seen. Thread-safe.

    :param limit: the number of lists, and of revisions; the oldest are dropped beyond it.
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


def _put(memory: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    memory.pop(key, None)
    if len(memory) >= limit:
        del memory[next(iter(memory))]
    memory[key] = value


class Decoded:
    """The decoded rows of entries that were read before, by their bytes. Thread-safe.

    Decoding an entry takes longer than fetching it. Equal bytes under the same name and stamp
    are the same row, so no row here can be out of date.
    """

    #: Bytes of entries that a process remembers in all objects of this class; beyond the limit
    #: it forgets them all.
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
            for decoded in list(self._all):
                decoded.known = {}
            Decoded._total = len(raw)
        self.known[raw] = (stamp, name, row)
