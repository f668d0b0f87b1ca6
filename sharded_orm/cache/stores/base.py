"""The contract of a cache server, and of the servers behind one alias of ``CACHES``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: What a store gives to whoever may fill an entry; void once the entry was deleted.
Lease = Any

#: Longer values (bytes) are not stored: what memcached takes, less name and header.
MAX_VALUE = 1_000_000
#: Seconds for which a lease keeps others from filling. Who needs longer has lost it.
LEASE_SECONDS = 5


class ServerDown(Exception):
    """A cache server did not answer in time, or answered nonsense, or is left alone for a while.

    Internal: readers turn to the database, writers do what the policy says.
    """


class FoundEntry(NamedTuple):
    """What stands under a name. ``value`` is None for nothing (a lease is nothing, too).

    A missing object is leased to one reader, who fills it; the others read the database and do
    not. When that reader dies, nobody fills for :data:`LEASE_SECONDS` at most. An entry that is
    there may be of no use to the reader (of another generation): its lease is to replace it.
    """

    value: bytes | None
    lease: Lease | None = None


class CacheEntry(NamedTuple):
    """What to store under a name. Without a lease it is stored in any case (lists).

    ``value`` is not empty, and no list or object begins with a NUL byte: so do the stores'
    placeholders for what is leased.
    """

    name: str
    value: bytes
    lease: Lease | None = None


class CacheServer(ABC):
    """One cache server. Thread-safe; survives a fork; one round trip per call, more only when
    hundreds of names are read at once, or where a method says so.

    Every method raises :exc:`ServerDown`, and then its effect is unknown: it may be
    none, all or a part, and may come late. It may also come twice: when a connection
    that was kept from an earlier call turns out to be dead, a new one is asked again.
    A round trip ends within the timeout the server was made with. After a failure the
    server rests: calls fail at once, until after a while one of them tries again.

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
        """Read ``names``, then ``objects`` with a lease where the store leases on reading, then
        ``again``, in this order."""

    @abstractmethod
    def lease(self, objects: Sequence[str], found: Sequence[FoundEntry]) -> list[Lease | None]:
        """Leases to fill ``objects``, which :meth:`read` gave as ``found``; None where
        somebody else has one. No round trip where :meth:`read` gave them already."""

    @abstractmethod
    def fill(
        self, entries: Sequence[CacheEntry], ttl: float, again: Sequence[str] = ()
    ) -> tuple[list[bool], list[bytes | None]]:
        """Store entries whose lease still holds (True), for ``ttl`` seconds; then read ``again``,
        the guards, which live twice as long from now on (so they outlive the entries).

        A value that is too large for the server is not stored (False)."""

    @abstractmethod
    def mark(self, records: Sequence[tuple[str, bytes]], header: bytes, ttl: float) -> list[int]:
        """Append each record to its guard, which is created from ``header`` if it is missing.
        Returns the guards' sizes. A guard lives ``ttl`` seconds from its last use."""

    @abstractmethod
    def finish(self, objects: Sequence[str], records: Sequence[tuple[str, bytes]]) -> None:
        """Delete ``objects`` (and so void their leases), then append each record to its guard if
        that exists. The order counts."""

    @abstractmethod
    def add(self, guards: Sequence[tuple[str, bytes]], ttl: float) -> list[bytes]:
        """Create the guards that are missing; what stands there afterwards."""

    @abstractmethod
    def replace(self, name: str, seen: bytes, new: bytes, ttl: float) -> bool:
        """Put ``new`` in the place of ``seen`` if that still stands there. Two round trips at most."""

    @abstractmethod
    def count(self, deltas: Mapping[str, int]) -> None:
        """Add to counters, which begin at 0."""

    @abstractmethod
    def counters(self, names: Sequence[str]) -> list[int]:
        """Read counters."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """What the server tells of itself: version, bytes, evictions, items … as it names them."""

    @abstractmethod
    def close(self) -> None:
        """Close idle connections. The next call opens new ones."""
