"""What a process remembers of the entries that it has read from the cache server.

A *guard* is the entry that says whether other entries are still valid. A *revision* is a digest of
the guards of a list, and a part of the list's name. The guards are read from the server each time.
A remembered value is used only if the guards are the same as when it was read.

- A remembered list saves a round trip.
- A remembered revision saves one, too: the list's name is known, so the list and the guards are
  read in one packet.
- A remembered row (:class:`DecodedRow`) saves decoding the entry again. If it was valid twice with
  the same bytes, a batch of rows reads only its guards, for some seconds.
- If all rows of a list are remembered together (:class:`ListedRows`), only the guards are read, for
  some seconds.
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
# The most seconds for which the rows of a list or a batch are used without reading their entries. A
# server evicts entries that nobody reads for long.
_KEPT_FOR = 10.0


def kept_for(ttl: float) -> float:
    """Return the seconds for which a process may use the rows of a list or a batch without reading
    the entries.

    Entries are stored for so much less than ``ttl`` seconds. So no row is used for longer than
    ``ttl`` seconds, even if nothing tells the process of a write.

    :param ttl: the setting TTL, in seconds.
    """
    return min(_KEPT_FOR, ttl // 10)


class Listed:
    """The result of a query as the cache stores it: the primary keys of a list, or numbers.

    :param revision: the digest that the guards had when the result was stored.
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


class ListedRows(NamedTuple):
    """The rows of a list, as they were when no write to them was under way. Immutable.

    :param guards: the bytes of the list's guards, which were the same before and after the rows
        were read, without an open marker. Each write to the list or its rows changes them for good.
        So as long as the server has these bytes, the list and its rows are valid.
    :param decoded: the memory of decoded rows of the format in which the rows are decoded.
    :param names: the names of the rows' entries.
    :param rows: the decoded rows, in the same order.
    :param size: the size of the entries and the guards in bytes.
    :param until: the time on the monotonic clock from which the entries must be read again.
    """

    guards: tuple[bytes | None, ...]
    decoded: Decoded
    names: tuple[str, ...]
    rows: tuple[Row, ...]
    size: int
    until: float


class ProcessCache:
    """The lists, their rows, and the revisions that a process has read last. Thread-safe.

    A revision is a digest of guards, the entries that say whether lists are valid.

    :param limit: the largest number of lists, of lists with rows, and of revisions that are kept.
        Beyond the limit, the oldest is dropped.
    """

    #: The most bytes of entries of lists whose rows are kept. Beyond it, the oldest are dropped.
    MOST_BYTES = 8 << 20
    #: The largest size in bytes of the entries of one list whose rows are kept.
    LARGEST_LIST = 1 << 16

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._lists: dict[tuple[str, str], Listed] = {}
        self._revisions: dict[str, str] = {}
        self._rows: dict[tuple[str, str], ListedRows] = {}
        self._bytes = 0

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

    def rows(self, guard: str, query: str, decoded: Decoded, now: float) -> ListedRows | None:
        """Return the rows of a list; None if its entries must be read (again).

        The caller must compare the guards.

        :param guard: the name of the list's own guard.
        :param decoded: the memory of decoded rows of the caller's format.
        :param now: the time on the monotonic clock.
        """
        kept = self._rows.get((guard, query))
        return kept if kept is not None and now < kept.until and kept.decoded is decoded else None

    def note_rows(self, guard: str, query: str, kept: ListedRows, *, is_divided: bool) -> None:
        """Keep the rows of a list, unless they are large.

        :param is_divided: whether the list is one of an isolate key, which divides the rows of a
            shard key. Writes of other isolate keys change its guards, but not the list. If there
            are many, it is better to read the rows and the guards in one packet. So the rows are
            not used until the guards have been the same twice.
        """
        if kept.size > self.LARGEST_LIST or not 0 < len(kept.names) <= _LONGEST_LIST:
            return
        key = guard, query
        with self._lock:
            former = self._rows.get(key)
            if former is not None:
                self._drop(key)
            if is_divided and (former is None or former.guards != kept.guards):
                kept = kept._replace(until=0.0)
            most = self.MOST_BYTES - kept.size
            while self._rows and (len(self._rows) >= self._limit or self._bytes > most):
                self._drop(next(iter(self._rows)))
            self._rows[key] = kept
            self._bytes += kept.size

    def forget_rows(self, guard: str, query: str, kept: ListedRows) -> None:
        """Drop the rows of a list whose guards have changed, so that the next read asks for all."""
        with self._lock:
            if self._rows.get((guard, query)) is kept:
                self._drop((guard, query))

    def _drop(self, key: tuple[str, str]) -> None:
        self._bytes -= self._rows.pop(key).size


def _put(memory: dict[Any, Any], key: Any, value: Any, limit: int) -> None:
    memory.pop(key, None)
    if len(memory) >= limit:
        del memory[next(iter(memory))]
    memory[key] = value


class DecodedRow(NamedTuple):
    """The row of an entry as it was read last, and what its validity depends on.

    :param value: the bytes of the entry.
    :param stamp: the stamp that the entry carries: the generations of its guards.
    :param guards: the bytes of the guards with which the row was found to be valid while no write
        was under way; empty if they were not remembered. The row is valid while the guards and the
        entry have these bytes.
    :param until: the time on the monotonic clock until which a batch of rows reads the guards of the
        row only, and not its entry. 0 for a row that was not found with the same bytes twice.
    """

    value: bytes
    stamp: str
    row: Row
    guards: tuple[bytes, ...] = ()
    until: float = 0.0


class Decoded:
    """The decoded rows of entries that were read before, keyed by the entries' names. Thread-safe.

    The rows are kept, because decoding an entry takes longer than fetching it. A row is used only
    if one of these was read just before, so it is never outdated:

    - an entry of the same name with the same bytes, and guards that give its stamp. The stamp is a
      text that changes when a write makes the entry void;
    - guards with the same bytes as when the row was valid, until :attr:`DecodedRow.until`.
    """

    #: The most bytes of entries that all instances of this class in a process remember together.
    #: If there are more, all instances are emptied.
    LIMIT = 8 << 20
    #: The largest size in bytes of an entry that is remembered.
    LONGEST = 1 << 14
    #: The largest size in bytes of the guards that are remembered with an entry. They count for LIMIT
    #: with each entry. A guard is compacted when it is half as large.
    LONGEST_GUARDS = 1 << 12

    _all: ClassVar[WeakSet[Decoded]] = WeakSet()
    _total: ClassVar[int] = 0

    def __init__(self) -> None:
        self.known: dict[str, DecodedRow] = {}
        self._all.add(self)

    def note(
        self, name: str, value: bytes, stamp: str, row: Row, guards: tuple[bytes, ...] = ()
    ) -> None:
        """Keep the decoded row of the cache entry ``name`` in memory, unless the entry is large.

        For the other parameters see :class:`DecodedRow`.
        """
        if len(value) > self.LONGEST:
            return
        if sum(map(len, guards)) > self.LONGEST_GUARDS:
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
    return len(kept.value) + sum(map(len, kept.guards))
