"""The contract of a cache server, and of the servers behind one alias of ``CACHES``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: A server's permission to fill an entry; void once the entry was deleted.
Lease = Any

#: Bytes of the longest value that is stored: the limit of memcached, less name and header.
MAX_VALUE = 1_000_000
#: Seconds for which a lease keeps others from filling; then it is lost.
LEASE_SECONDS = 5


class ServerDown(Exception):
    """A cache server did not answer in time, or answered nonsense, or is left alone for a while.

    Internal: readers turn to the database, writers do what the policy says.
    """


class FoundEntry(NamedTuple):
    """An entry as it was read. ``value`` is None if it is missing, or leased to another reader.

    A missing object is leased to one reader, which fills it; the other readers query the
    database and fill nothing. If that reader dies, nobody fills for :data:`LEASE_SECONDS` at
    most. A present entry may be useless to the reader (of another generation): with its lease
    the reader may replace it.
    """

    value: bytes | None
    lease: Lease | None = None


class CacheEntry(NamedTuple):
    """An entry to store. Without a lease (lists) it is stored unconditionally.

    ``value`` is not empty, and does not begin with a NUL byte, as the stores' placeholders for
    leased entries do.
    """

    name: str
    value: bytes
    lease: Lease | None = None


class CacheServer(ABC):
    """One cache server. Thread-safe; survives a fork.

    A call costs one round trip; more only if hundreds of names are read at once, or where a method
    says so.

    Every method raises :exc:`ServerDown`. Its effect is then unknown: none, all or a part of it,
    possibly late. An effect may also come twice: if a kept connection turns out to be dead, the
    call is repeated on a new one. A round trip ends within the timeout of the server. After a
    failure the server rests: calls fail at once, until after a while one of them tries again.

    Names are those of :mod:`sharded_orm.cache.keys`: printable ASCII without spaces.
    """

    #: For messages and logs; holds no credentials.
    name: str
    #: Exchanges with the server since the start of the process.
    round_trips: int = 0

    @abstractmethod
    def read(
        self, names: Sequence[str], objects: Sequence[str] = (), again: Sequence[str] = ()
    ) -> tuple[list[bytes | None], list[FoundEntry], list[bytes | None]]:
        """Read ``names``, then ``objects``, then ``again``, in this order.

        Stores that lease on reading return the ``objects`` with leases.
        """

    @abstractmethod
    def lease(self, objects: Sequence[str], entries: Sequence[FoundEntry]) -> list[Lease | None]:
        """Leases to fill ``objects``, which :meth:`read` returned as ``entries``.

        None for each that is leased to another reader. No round trip if :meth:`read` returned
        the leases.
        """

    @abstractmethod
    def fill(
        self, entries: Sequence[CacheEntry], ttl: float, again: Sequence[str] = ()
    ) -> tuple[list[bool], list[bytes | None]]:
        """Store entries for ``ttl`` seconds, then read the guards ``again``.

        The guards live twice as long from now on, so they outlive the entries.

        :returns: for each entry whether it was stored: its lease is valid, and its value not too
            large for the server. And the values of the guards.
        """

    @abstractmethod
    def mark(self, records: Sequence[tuple[str, bytes]], header: bytes, ttl: float) -> list[int]:
        """Append each record to its guard, which is created from ``header`` if it is missing.

        A guard lives ``ttl`` seconds from its last use.

        :returns: the sizes of the guards in bytes.
        """

    @abstractmethod
    def finish(self, objects: Sequence[str], records: Sequence[tuple[str, bytes]]) -> None:
        """Delete ``objects`` and void their leases; then append each record to its guard.

        A missing guard stays missing.
        """

    @abstractmethod
    def add(self, guards: Sequence[tuple[str, bytes]], ttl: float) -> list[bytes]:
        """Create the missing ones of ``guards``. Returns the values of all afterwards."""

    @abstractmethod
    def replace(self, name: str, seen: bytes, new: bytes, ttl: float) -> bool:
        """Replace the value ``seen`` by ``new``; False if another value stands there.

        Two round trips at most.
        """

    @abstractmethod
    def count(self, deltas: Mapping[str, int]) -> None:
        """Add to counters, which start at 0."""

    @abstractmethod
    def counters(self, names: Sequence[str]) -> list[int]:
        """The values of counters; 0 for a missing one."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """The statistics of the server (version, bytes, evictions, items …), under its own names."""

    @abstractmethod
    def close(self) -> None:
        """Close idle connections. The next call opens new ones."""
