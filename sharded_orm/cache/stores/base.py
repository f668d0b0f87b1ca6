"""The contract of a cache server, and of the servers behind one alias of ``CACHES``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: What a store gives to whoever may fill an entry; void once the entry was deleted.
Lease = Any


class ServerDown(Exception):
    """A cache server did not answer in time, or answered nonsense, or is left alone for a while.

    Internal: readers turn to the database, writers do what the policy says.
    """


class Found(NamedTuple):
    """What stands under a name. ``value`` is None for nothing (a lease is nothing, too)."""

    value: bytes | None
    lease: Lease | None = None


class Entry(NamedTuple):
    """What to store under a name. Without a lease it is stored in any case (lists)."""

    name: str
    value: bytes
    lease: Lease | None = None


class Server(ABC):
    """One cache server. Thread-safe; survives a fork; one round trip per call.

    Every method raises :exc:`ServerDown`, and then its effect is unknown: it may be
    none, all or a part, and may come late.
    """

    #: For messages and logs; holds no credentials.
    name: str
    #: Exchanges with the server since the start of the process, for tests.
    round_trips: int = 0

    @abstractmethod
    def read(
        self, names: Sequence[str], objects: Sequence[str] = (), again: Sequence[str] = ()
    ) -> tuple[list[bytes | None], list[Found], list[bytes | None]]:
        """Read ``names``, then ``objects`` with a lease where the store leases on reading, then
        ``again``, in this order."""

    @abstractmethod
    def lease(self, objects: Sequence[str], found: Sequence[Found]) -> list[Lease | None]:
        """Leases to fill ``objects``, which :meth:`read` gave as ``found``; None where
        somebody else has one. No round trip where :meth:`read` gave them already."""

    @abstractmethod
    def fill(
        self, entries: Sequence[Entry], ttl: float, again: Sequence[str] = ()
    ) -> tuple[list[bool], list[bytes | None]]:
        """Store entries whose lease still holds (True), for ``ttl`` seconds; then read ``again``.
        A value that is too large for the server is not stored."""

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
