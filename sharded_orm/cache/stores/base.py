"""The interface that the library needs of a cache server, whether memcached, Redis or local."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: A server's permission to store an entry. It becomes void when the entry is deleted.
Lease = Any

#: Bytes of the longest value that is stored: memcached's limit less room for name and header.
MAX_VALUE = 1_000_000
#: Seconds for which a lease keeps other readers from storing the entry; then it expires.
LEASE_SECONDS = 5


class ServerDown(Exception):
    """A cache server did not answer in time, gave a wrong answer, or is not called after a failure.

    Internal: readers then ask the database, and writers do what ``ON_CACHE_FAILURE`` says.
    """


class FoundEntry(NamedTuple):
    """An entry as it was read.

    A missing object is leased to one reader, which stores it; meanwhile the other readers query
    the database and store nothing. If that reader dies, its lease ends after
    :data:`LEASE_SECONDS`. If an entry is there but of no use, for example of an earlier
    generation of its guards, the reader may replace it with the lease.

    :param value: the bytes of the entry; None if it is missing or leased to another reader.
    :param lease: the permission to store this entry; None if the reader has none.
    """

    value: bytes | None
    lease: Lease | None = None


class CacheEntry(NamedTuple):
    """An entry to store.

    :param value: the bytes of the entry: at least one byte, and the first is not NUL, with which
        the servers' placeholders for leased entries begin.
    :param lease: the permission to store an object; None for a list, which needs none.
    """

    name: str
    value: bytes
    lease: Lease | None = None


class CacheServer(ABC):
    """One cache server. Thread-safe; survives a fork.

    A call costs one round trip, except where a method says otherwise, or if hundreds of names
    are read at once.

    Every method except :meth:`close` may raise :exc:`ServerDown`. Then the call may have had all
    of its effect, a part or none, and the effect may still come later. The effect of any call may
    come twice: if an idle connection turns out to be dead, the call is repeated on a new one. A
    round trip ends within the timeout of the server. After a failure, calls fail at once without
    being sent, until one of them is let through as a trial.

    Names of entries are those of :mod:`sharded_orm.cache.keys`: printable ASCII without spaces.
    """

    #: The name of the server for messages and logs, without credentials.
    name: str
    #: The number of round trips to the server since the start of the process.
    round_trips: int = 0

    @abstractmethod
    def read(
        self, names: Sequence[str], objects: Sequence[str] = (), again: Sequence[str] = ()
    ) -> tuple[list[bytes | None], list[FoundEntry], list[bytes | None]]:
        """Read the entries ``names``, then ``objects``, then ``again``, in this order.

        Some servers (memcached) give a lease for each of ``objects`` on reading, if it is free.

        :returns: the values of ``names``, the entries of ``objects``, and the values of
            ``again``; a value is None for a missing entry.
        """

    @abstractmethod
    def lease(self, objects: Sequence[str], entries: Sequence[FoundEntry]) -> list[Lease | None]:
        """Take leases, the permissions to store objects.

        No round trip if :meth:`read` has already given the leases.

        :param objects: the names of the objects.
        :param entries: what :meth:`read` returned for these objects.
        :returns: a lease for each object; None if the object is leased to another reader, or has
            changed since it was read.
        """

    @abstractmethod
    def fill(
        self, entries: Sequence[CacheEntry], ttl: float, again: Sequence[str] = ()
    ) -> tuple[list[bool], list[bytes | None]]:
        """Store ``entries`` for ``ttl`` seconds, then read the guards ``again``.

        A *guard* is an entry that says whether other entries are valid. The guards that are read
        live for another ``2 * ttl`` seconds, so that they outlive the stored entries.

        :returns: whether each entry was stored, and the values of the guards. An entry is not
            stored if its lease is void, or its value is too large for the server.
        """

    @abstractmethod
    def mark(self, records: Sequence[tuple[str, bytes]], header: bytes, ttl: float) -> list[int]:
        """Append a line to each of several guards, entries that say whether others are valid.

        A missing guard is created from ``header`` first.

        :param records: names of guards, each with the line to append.
        :param header: the first line of a guard that is created.
        :param ttl: seconds that each guard lives from now on.
        :returns: the size of each guard in bytes, in the order of ``records``.
        """

    @abstractmethod
    def finish(self, objects: Sequence[str], records: Sequence[tuple[str, bytes]]) -> None:
        """Delete ``objects``, then append a line to each of several guards.

        The deletion also makes leases for these objects void.

        :param records: names of guards, each with the line to append. A guard that is missing is
            not created.
        """

    @abstractmethod
    def add(self, guards: Sequence[tuple[str, bytes]], ttl: float) -> list[bytes]:
        """Create those of ``guards`` that are missing; see :meth:`mark`.

        :param guards: names, each with the value of a new guard.
        :param ttl: seconds that each guard lives from now on.
        :returns: the values that all ``guards`` have afterwards.
        """

    @abstractmethod
    def replace(self, name: str, seen: bytes, new: bytes, ttl: float) -> bool:
        """Replace the value of an entry, if it is still ``seen``. Two round trips at most.

        :param ttl: seconds that the new value lives.
        :returns: whether the value was replaced; False if it is not ``seen`` any more.
        """

    @abstractmethod
    def count(self, deltas: Mapping[str, int]) -> None:
        """Add to counters. A missing counter counts as 0.

        :param deltas: the numbers to add, keyed by the counters' names.
        """

    @abstractmethod
    def counters(self, names: Sequence[str]) -> list[int]:
        """Return the values of counters; 0 for a missing one."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return statistics (version, bytes, evictions, …) under the names that the server uses."""

    @abstractmethod
    def close(self) -> None:
        """Close the idle connections to the server. The next call opens a new one."""
