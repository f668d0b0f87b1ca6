"""What a process remembers of the entries that it has read from the cache server.

A *guard* is the entry that says whether other entries are still valid. A *revision* is a digest of
the guards of a list, and a part of the list's name. The guards are read from the server each time.
A remembered value is used only if the guards are still the same as when the value was read.

A remembered list saves a round trip. A remembered revision also saves one: the list can be read in
the same packet as the guards, because its name is known already. A remembered row
(:class:`Decoded`) saves decoding the entry again.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar
from weakref import WeakSet

from sharded_orm.cache.values import Row

# The largest number of rows in a list that is remembered.
_LONGEST_LIST = 100


class Listed:
    """The result of a query as the cache stores it: the primary keys of a list, or one number.

    :param revision: the digest that the guards (entries that say whether others are valid) had when
        the result was stored.
    :param pks: tokens (the form in names of entries) of the rows' primary keys, in the order of the
        list; empty for a number.
    :param names: the names of the rows' objects in the cache, in the same order.
    :param value: the number, for ``count()`` and ``exists()``; None for a list.
    """

    __slots__ = ("names", "pks", "revision", "value")

    def __init__(
        self, revision: str, pks: tuple[str, ...], names: tuple[str, ...], value: int | None
    ) -> None:
        self.revision = revision
        self.pks = pks
        self.names = names
        self.value = value


class ProcessCache:
    """The latest lists, and revisions (digests of the entries that say whether lists are valid),
    that a process has read. Thread-safe.

    :param limit: the most lists that are kept. As many revisions are kept at most. Beyond the
        limit, the oldest list or revision is dropped.
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
    """The decoded rows of entries that were read before, keyed by the entries' bytes. Thread-safe.

    The rows are kept, because decoding an entry takes longer than fetching it. A kept row is used
    only for an entry with the same bytes, name and stamp (the generations of the guards), so it is
    never outdated.
    """

    #: The most bytes of entries that all instances of this class in a process remember together.
    #: If there are more, all instances are emptied.
    LIMIT = 4 << 20
    #: The largest size in bytes of an entry that is remembered.
    LONGEST = 1 << 14

    _all: ClassVar[WeakSet[Decoded]] = WeakSet()
    _total: ClassVar[int] = 0

    def __init__(self) -> None:
        self.known: dict[bytes | None, tuple[str, str, Row]] = {}
        self._all.add(self)

    def note(self, raw: bytes, stamp: str, name: str, row: Row) -> None:
        if len(raw) > self.LONGEST:
            return
        # No lock is used. So threads may lose each other's additions to _total. This does no harm,
        # because LIMIT need not be kept exactly.
        Decoded._total += len(raw)
        if Decoded._total > self.LIMIT:
            for decoded in list(self._all):
                decoded.known = {}
            Decoded._total = len(raw)
        self.known[raw] = (stamp, name, row)
