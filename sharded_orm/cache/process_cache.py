"""What a process remembers of the entries that it has read from the cache servers.

A *guard* is the entry that says whether other entries are still valid. A *revision* is a digest of
the guards of a list, and a part of the list's name. The process reads the guards from the server
each time. It uses a remembered value only if the guards are the same as when the value was read.

- A remembered list saves a round trip.
- A remembered revision saves a round trip, too, because the process knows the name of the list, and
  reads the list and the guards in one packet.
- A remembered row (:class:`DecodedRow`) saves decoding the entry again. If it was valid twice with
  the same bytes, a batch of rows reads only its guards, for some seconds.
- If the process remembers all rows of a list together (:class:`ListedRows`), it reads only the
  guards, for some seconds.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

from sharded_orm.cache.values import Row

# A list is remembered if it has at most this many rows.
_LONGEST_LIST = 100
# A query may have a tuple of numbers as its result. Such a result is remembered if it has at most
# this many numbers.
_MOST_NUMBERS = 500
# The most seconds for which the process uses remembered rows of a list or a batch without reading
# their entries. This time must be short, because a server evicts entries that nobody reads.
_KEPT_FOR = 10.0


def kept_for(ttl: float) -> float:
    """Return for how many seconds a process may use remembered rows without reading their entries.

    These are rows of a list or a batch. A process may read an entry just before it expires, and use
    the row for this time afterwards. So entries are stored for this many seconds less than ``ttl``.
    Then no row is used for longer than ``ttl`` seconds in all, even if the cache was not told of a
    write.

    :param ttl: the setting TTL, in seconds.
    """
    return min(_KEPT_FOR, ttl // 10)


class Listed:
    """The result of a query as the cache stores it: the primary keys of a list, or numbers.

    :param revision: the digest of the guards at the time when the result was stored.
    :param pks: tokens (the form in names of entries) of the rows' primary keys, in the order of the
        list; empty for a number.
    :param names: the names of the cache entries of the rows, in the same order.
    :param value: the number, for ``count()`` and ``exists()``; a tuple, if the result is several
        numbers; None for a list.
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
    """The rows of a list that were read while no write to them was under way. Immutable.

    :param guards: the bytes of the list's guards. They were the same before and after the rows were
        read, without an open marker. Each write to the list or its rows changes them, and they
        never have the same bytes again. So as long as the server has these bytes, the list and its
        rows are valid.
    :param decoded: the memory of decoded rows for the format of these rows.
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
    """The lists, the rows of lists, and the revisions that a process has read last. Thread-safe.

    A revision is a digest of the guards of a list (the entries that say whether it is valid).

    :param limit: how many lists, lists with rows, and revisions are kept at most, of each kind.
        Beyond the limit, the oldest is dropped.
    """

    #: How many bytes the entries of all lists with rows may have together. Beyond this, the oldest
    #: are dropped.
    MOST_BYTES = 8 << 20
    #: How many bytes the entries of one list may have, if its rows are to be kept.
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
        """Return the remembered rows of a list; None if its entries must be read from the server.

        The rows are valid only if the server still has the same guards. The caller must compare
        them.

        :param guard: the name of the list's own guard.
        :param decoded: the memory of decoded rows for the caller's format.
        :param now: the time on the monotonic clock.
        """
        kept = self._rows.get((guard, query))
        return kept if kept is not None and now < kept.until and kept.decoded is decoded else None

    def note_rows(self, guard: str, query: str, kept: ListedRows, *, is_divided: bool) -> None:
        """Remember the rows of a list, unless they are large.

        :param is_divided: whether the list has only the rows of one isolate key (a value of the
            field that divides the rows of a shard key). If so, the remembered rows are used only
            after the guards were the same twice. The reason is that writes to other isolate keys
            change a guard of this list, but not the list. If such writes are frequent, remembered
            rows seldom help, and it is faster to read the rows together with the guards.
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
        """Forget the rows of a list whose guards have changed. The next read then asks for the
        entries together with the guards.
        """
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
    """A decoded row as it was read last, and the bytes by which later reads see that it is still
    valid.

    :param value: the bytes of the entry.
    :param stamp: the stamp in the entry: the generations (random digests) of its guards.
    :param guards: the bytes of the guards, if the row was valid and no write was under way; empty
        if the guards were not remembered. The row is valid as long as the guards and the entry have
        these bytes.
    :param until: the time on the monotonic clock until which a batch of rows reads only the guards
        of the row, and not its entry. 0 if the row was not found twice with the same bytes.
    """

    value: bytes
    stamp: str
    row: Row
    guards: tuple[bytes, ...] = ()
    until: float = 0.0


class Decoded:
    """Remembers the decoded rows of entries, keyed by the entries' names. Thread-safe.

    It saves time, because decoding an entry takes longer than fetching it. A remembered row is
    never outdated, because it is used only if one of these was read just before:

    - An entry of the same name with the same bytes, and guards that give the stamp of the entry.
      The stamp is a text that changes when a write makes the entry void.
    - Guards with the same bytes as when the row was valid, until :attr:`DecodedRow.until`.
    """

    #: How many bytes of entries all instances of this class in a process remember together. If
    #: there are more, all instances are emptied.
    LIMIT = 8 << 20
    #: An entry with more bytes is not remembered.
    LONGEST = 1 << 14
    #: The guards of an entry are not remembered with it if they have more bytes than this together.
    #: Entries may share guards, which count towards LIMIT once for each entry. So long guards would
    #: use it up. Few are as long: a guard with half as many bytes may already be compacted.
    LONGEST_GUARDS = 1 << 12

    _all: ClassVar[WeakSet[Decoded]] = WeakSet()
    _total: ClassVar[int] = 0

    def __init__(self) -> None:
        self.known: dict[str, DecodedRow] = {}
        self._all.add(self)

    def note(
        self, name: str, value: bytes, stamp: str, row: Row, guards: tuple[bytes, ...] = ()
    ) -> None:
        """Remember the decoded row of the cache entry ``name``, unless the entry is large.

        For the other parameters see :class:`DecodedRow`.
        """
        if len(value) > self.LONGEST:
            return
        if sum(map(len, guards)) > self.LONGEST_GUARDS:
            guards = ()
        kept = DecodedRow(value, stamp, row, guards)
        former = self.known.get(name)
        # Threads change _total without a lock, so an addition may get lost. This does no harm,
        # because LIMIT need not be exact.
        Decoded._total += _size(kept) - (0 if former is None else _size(former))
        if Decoded._total > self.LIMIT:
            for decoded in list(self._all):
                decoded.known = {}
            Decoded._total = _size(kept)
        self.known[name] = kept


def _size(kept: DecodedRow) -> int:
    return len(kept.value) + sum(map(len, kept.guards))
