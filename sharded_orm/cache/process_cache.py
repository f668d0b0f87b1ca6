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
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

from sharded_orm.cache.values import Row

# The largest number of rows in a list that is remembered.
_LONGEST_LIST = 100
# If the result of a query for numbers has more numbers than this, it is not remembered.
_MOST_NUMBERS = 500


class Listed:
    """The result of a query as the cache stores it: the primary keys of a list, or numbers.

    :param revision: the digest that the guards (entries that say whether others are valid) had when
        the result was stored.
    :param pks: tokens (the form in names of entries) of the rows' primary keys, in the order of the
        list; empty for a number.
    :param names: the names of the rows' objects in the cache, in the same order.
    :param value: the number, for ``count()`` and ``exists()``; several numbers, if that is the
        result; None for a list.
    """

    __slots__ = ("names", "pks", "revision", "value")

    def __init__(
        self,
        revision: str,
        pks: tuple[str, ...],
        names: tuple[str, ...],
        value: int | tuple[int, ...] | None,
    ) -> None:
        self.revision = revision
        self.pks = pks
        self.names = names
        self.value = value


class ProcessCache:
    """The lists and revisions that a process has read last. Thread-safe.

    A revision is a digest of guards, the entries that say whether lists are valid.

    :param limit: the largest number of lists, and also of revisions, that are kept. Beyond the
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
        numbers = listed.value if isinstance(listed.value, tuple) else ()
        if len(listed.pks) <= _LONGEST_LIST and len(numbers) <= _MOST_NUMBERS:
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


class DecodedRow(NamedTuple):
    """The row of an entry as it was read last, and what its validity depends on.

    :param value: the bytes of the entry.
    :param stamp: the stamp that the entry carries: the generations of its guards, the entries that
        say whether others are valid.
    :param guards: the bytes of the guards with which the row was found to be valid while no write
        was under way; empty if they were not remembered. If the guards and the entry still have
        these bytes, the row is still valid.
    """

    value: bytes
    stamp: str
    row: Row
    guards: tuple[bytes | None, ...] = ()


class Decoded:
    """The decoded rows of entries that were read before, keyed by the entries' names. Thread-safe.

    The rows are kept, because decoding an entry takes longer than fetching it. A kept row is used
    only for an entry with the same bytes, name and stamp (a text that changes when a write makes
    the entry void), so it is never outdated.
    """

    #: The most bytes of entries that all instances of this class in a process remember together.
    #: If there are more, all instances are emptied.
    LIMIT = 8 << 20
    #: The largest size in bytes of an entry that is remembered.
    LONGEST = 1 << 14
    #: The largest size in bytes of the guards that are remembered with an entry.
    LONGEST_GUARDS = 1 << 10

    _all: ClassVar[WeakSet[Decoded]] = WeakSet()
    _total: ClassVar[int] = 0

    def __init__(self) -> None:
        self.known: dict[str, DecodedRow] = {}
        self._all.add(self)

    def note(
        self, name: str, value: bytes, stamp: str, row: Row, guards: tuple[bytes | None, ...] = ()
    ) -> None:
        """Keep the decoded row of the cache entry ``name`` in memory, unless the entry is large.

        For the other parameters see :class:`DecodedRow`.
        """
        if len(value) > self.LONGEST:
            return
        if sum(len(raw or b"") for raw in guards) > self.LONGEST_GUARDS:
            guards = ()
        kept = DecodedRow(value, stamp, row, guards)
        former = self.known.get(name)
        # No lock is used. So threads may lose each other's additions to _total. This does no harm,
        # because LIMIT need not be kept exactly.
        Decoded._total += _size(kept) - (0 if former is None else _size(former))
        if Decoded._total > self.LIMIT:
            for decoded in list(self._all):
                decoded.known = {}
            Decoded._total = _size(kept)
        self.known[name] = kept


def _size(kept: DecodedRow) -> int:
    return len(kept.value) + sum(len(raw or b"") for raw in kept.guards)
