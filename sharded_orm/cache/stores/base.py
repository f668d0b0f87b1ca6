"""The interface of a cache server, which the classes for memcached, Redis and local memory share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

#: A server's permission to store an entry. It becomes void when the entry is deleted.
Lease = Any

#: The largest size in bytes of a stored value: memcached's limit (1 MiB), less some room for the
#: entry's name and header.
MAX_VALUE = 1_000_000
#: Seconds after which a lease (a reader's permission to store an entry) expires. Until then, no
#: other reader can store the entry.
LEASE_SECONDS = 5


class ServerDown(Exception):
    """A cache server gave no valid answer in time, or is not called because of an earlier failure.

    The library handles this error: readers query the database, and ``ON_CACHE_FAILURE`` decides
    what writers do.
    """


class FoundEntry(NamedTuple):
    """An entry of a cache server, as a reader found it.

    A missing object is leased to one reader, which stores it; meanwhile other readers query the
    database and store nothing. A reader that stores nothing gives the lease back
    (:meth:`CacheServer.release`). If it dies, the lease ends after :data:`LEASE_SECONDS`. The lease
    also allows the reader to replace an entry that is no longer valid.

    :param value: the bytes of the entry; None if the entry is missing or leased to another reader.
    :param lease: the permission to store this entry; None (the default) if the reader has none.
    """

    value: bytes | None
    lease: Lease | None = None


#: The result of :meth:`CacheServer.read`: the values of the guards, the objects, and the values of the
#: entries to be read again.
Reply = tuple[list[bytes | None], list[FoundEntry], list[bytes | None]]


class CacheEntry(NamedTuple):
    """An entry to store.

    :param value: the bytes of the entry, at least one. The first byte must not be NUL, because
        the placeholders of leased entries begin with NUL.
    :param lease: the permission to store an object; None (the default) for a list, which needs no
        permission.
    """

    name: str
    value: bytes
    lease: Lease | None = None


class CacheServer(ABC):
    """One cache server. Thread-safe; forked children may use the object, too.

    A call costs one round trip, except where a method says otherwise, or if hundreds of names are
    read at once. A round trip ends within the timeout of the server.

    Every method except :meth:`close` may raise :exc:`ServerDown`. The server may then have executed
    all, a part or nothing of the call, and may still execute it later. For some seconds after a
    failure, calls raise this error at once without being sent. Then one call is sent as a trial.

    Any call may be executed twice: if an idle connection turns out to be dead, the call is repeated
    on a new connection.

    Names of entries are those of :mod:`sharded_orm.cache.keys`: printable ASCII without spaces.
    """

    #: The name of the server for messages and logs, without credentials.
    name: str
    #: The number of round trips to the server that were made with this object.
    round_trips: int = 0

    @abstractmethod
    def read(
        self, names: Sequence[str], objects: Sequence[str] = (), again: Sequence[str] = ()
    ) -> Reply:
        """Read cache entries in three groups, one group after the other.

        Some servers (memcached) give leases (permissions to store) when objects are read: one for
        each object that is not leased to another reader.

        :param names: names of the entries to read first.
        :param objects: names of objects (cached rows), which are read second.
        :param again: names of the entries to read last. They may repeat some of ``names``, to see
            whether these have changed meanwhile.
        :returns: the values of the first group, the entries of the objects, and the values of the
            last group. The value of a missing entry is None.
        """

    def read_again(
        self, names: Sequence[str], name: str, values: tuple[bytes, ...], value: bytes
    ) -> Reply | None:
        """Read a few entries and one object, whose values the caller knows from an earlier read.

        Return None if all of them still have these values; otherwise what :meth:`read` returns. So the
        answer need not be parsed in the usual case.

        :param names: names of the entries, one or two guards.
        :param name: the name of the object.
        :param values: the earlier values of the entries.
        :param value: the earlier value of the object.
        """
        reply = self.read(names, (name,))
        return None if tuple(reply[0]) == values and reply[1][0].value == value else reply

    @abstractmethod
    def lease(self, objects: Sequence[str], entries: Sequence[FoundEntry]) -> list[Lease | None]:
        """Take leases, the permissions to store objects.

        On some servers (memcached), :meth:`read` has taken the leases already. Then this method
        returns them without a round trip.

        :param objects: the names of the objects.
        :param entries: what :meth:`read` returned for these objects.
        :returns: a lease for each object; None if the object is leased to another reader, or has
            changed since it was read.
        """

    @abstractmethod
    def release(self, objects: Mapping[str, FoundEntry]) -> None:
        """Give leases back that were not used to store an object, so that other readers can take
        them.

        A lease that is void by now is left alone. If the call fails, the lease ends after
        :data:`LEASE_SECONDS`. This method may return before the server has answered.

        :param objects: what :meth:`read` returned for an object, with the lease of :meth:`lease`,
            by the object's name.
        """

    @abstractmethod
    def fill(
        self, entries: Sequence[CacheEntry], ttl: float, again: Sequence[str] = ()
    ) -> tuple[list[bool], list[bytes | None]]:
        """Store ``entries`` for ``ttl`` seconds, then read guards.

        A *guard* is an entry that says whether other entries are valid. The guards that are read
        live for another ``2 * ttl`` seconds, so that they outlive the stored entries.

        :param again: the names of the guards to read.
        :returns: two lists. The first one says for each of ``entries`` whether it was stored. The
            second one has the values of the guards. An entry is not stored if its lease is void,
            or if its value is too large for the server.
        """

    @abstractmethod
    def mark(self, records: Sequence[tuple[str, bytes]], header: bytes, ttl: float) -> list[int]:
        """Append a line to each of several guards: entries that say whether other entries are valid.

        First create guards that are missing, with ``header`` as their value.

        :param records: names of guards, each with the line to append.
        :param header: the first line of a guard that is created.
        :param ttl: seconds that each guard lives from now on.
        :returns: the size of each guard in bytes, in the order of ``records``.
        """

    @abstractmethod
    def finish(
        self,
        objects: Sequence[str],
        records: Sequence[tuple[str, bytes]],
        lost: Callable[[], object] | None = None,
    ) -> None:
        """Delete objects (cached rows), then append a line to each of several guards.

        The deletion of an object also makes void the leases (permissions to store) that readers
        have for it.

        :param objects: the names of the objects.
        :param records: names of guards, each with the line to append. A guard that is missing is
            not created.
        :param lost: if given, this method may return before the server has answered. The answer is
            then read before the next packet of the same connection. If the server has not confirmed
            the whole call, ``lost`` is called, perhaps in another thread. It must not raise errors.
            It is not called if this method itself raises an error. Default: wait for the answer.
        """

    @abstractmethod
    def add(self, guards: Sequence[tuple[str, bytes]], ttl: float) -> list[bytes]:
        """Create those of several guards that are missing. Existing guards keep their values.

        A *guard* is an entry that says whether other entries are valid.

        :param guards: the name of each guard, and the value to create it with if it is missing.
        :param ttl: seconds that each guard lives from now on.
        :returns: the value that each guard has afterwards, in the order of ``guards``.
        """

    @abstractmethod
    def replace(self, name: str, seen: bytes, new: bytes, ttl: float) -> bool:
        """Replace the value of an entry if no one else has changed it.

        Costs at most two round trips.

        :param seen: the value that the entry must still have.
        :param new: the new value.
        :param ttl: seconds that the new value lives.
        :returns: True if the value was replaced; False if the entry has a different value or is
            missing.
        """

    @abstractmethod
    def count(self, deltas: Mapping[str, int]) -> None:
        """Add numbers to counters. A missing counter counts as 0.

        :param deltas: the numbers to add, keyed by the counters' names.
        """

    @abstractmethod
    def counters(self, names: Sequence[str]) -> list[int]:
        """Return the values of the counters ``names``; 0 for a counter that is missing."""

    def reset_counters(self, names: Sequence[str]) -> None:
        """Set counters to 0, by deleting them."""
        self.finish(names, ())

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return statistics (version, bytes, evictions, …) under the names that the server uses."""

    @abstractmethod
    def close(self) -> None:
        """Close the idle connections to the server. The next call opens a new one."""
