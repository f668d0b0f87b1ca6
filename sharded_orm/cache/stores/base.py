"""The interface of a cache server. The classes for memcached, Redis and local memory implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

#: A server's permission to store an entry. It becomes void when the entry is deleted, so that a
#: reader cannot store an old row after a write.
Lease = Any

#: The largest size in bytes of a stored value. memcached allows 1 MiB, which includes the entry's
#: name and header.
MAX_VALUE = 1_000_000
#: A lease (a reader's permission to store an entry) expires after this many seconds. Until then, no
#: other reader can store the entry.
LEASE_SECONDS = 5


class ServerDown(Exception):
    """A cache server has given no valid answer in time. Or it was not called, because an earlier
    call has just failed.

    The library handles this error. Readers query the database instead. Whether a writer commits or
    rolls back is decided by the setting ``ON_CACHE_FAILURE``.
    """


class FoundEntry(NamedTuple):
    """An entry of a cache server, as a reader has found it.

    If an object (a cached row) is missing, one reader gets the lease, the permission to store it.
    Meanwhile, other readers query the database and store nothing. A reader that does not use its
    lease gives it back (:meth:`CacheServer.release`). If the reader dies, the lease ends after
    :data:`LEASE_SECONDS`. With a lease, a reader may also replace an entry that is no longer valid.

    :param value: the bytes of the entry; None if the entry is missing or leased to another reader.
    :param lease: the permission to store this entry; None (the default) if the reader has none.
    """

    value: bytes | None
    lease: Lease | None = None


#: The result of :meth:`CacheServer.read`: the values of the entries that were read first, the
#: objects, and the values of the entries that were read last.
Reply = tuple[list[bytes | None], list[FoundEntry], list[bytes | None]]


class CacheEntry(NamedTuple):
    """An entry to store.

    :param value: the bytes of the entry, at least one. The first byte must not be NUL, because a
        leased entry has a placeholder that begins with NUL.
    :param lease: the permission to store an object. None (the default) for a list, which needs no
        permission.
    """

    name: str
    value: bytes
    lease: Lease | None = None


class CacheServer(ABC):
    """One cache server. Thread-safe; a forked child may go on using the object, too.

    A call costs one round trip, unless its method says otherwise or hundreds of names are read at
    once. A round trip ends within the timeout of the server.

    Every method except :meth:`close` may raise :exc:`ServerDown`. After this error, it is unknown
    whether the server has executed all of the call, a part of it or nothing. It may even execute
    the call later. For some seconds after a failure, all calls raise this error at once without
    being sent. Then one call is sent as a trial.

    Any call may be executed twice: if an idle connection turns out to be dead, the call is sent
    again on a new connection.

    The names of entries are those of :mod:`sharded_orm.cache.keys`: printable ASCII without spaces.
    """

    #: The name of the server for messages and logs, without credentials.
    name: str
    #: How many round trips this object has made to the server.
    round_trips: int = 0

    @abstractmethod
    def read(
        self, names: Sequence[str], objects: Sequence[str] = (), again: Sequence[str] = ()
    ) -> Reply:
        """Read cache entries in three steps, in this order: ``names``, ``objects``, ``again``.

        Usually ``names`` and ``again`` are guards. If they have the same values before and after
        the objects, nothing was written in between. Some servers (memcached) give leases
        (permissions to store) when objects are read: one for each object that no other reader has
        leased.

        :param names: names of the entries to read first.
        :param objects: names of objects (cached rows), which are read second.
        :param again: names of the entries to read last. They may repeat some of ``names``.
        :returns: the values of ``names``, the entries of ``objects``, and the values of ``again``.
            The value of a missing entry is None.
        """

    def read_again(
        self, names: Sequence[str], name: str, values: tuple[bytes, ...], value: bytes
    ) -> Reply | None:
        """Read a few entries and one object, which the caller expects to have the values of an
        earlier read.

        Return None if all of them still have these values; otherwise return what :meth:`read`
        returns. None is the usual case, and saves parsing the answer.

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

        On some servers (memcached), :meth:`read` has taken the leases already. There, this method
        returns them without a round trip.

        :param objects: the names of the objects.
        :param entries: what :meth:`read` has returned for these objects.
        :returns: a lease for each object; None if another reader has leased the object, or if the
            object has changed since it was read.
        """

    @abstractmethod
    def release(self, objects: Mapping[str, FoundEntry]) -> None:
        """Give back leases (permissions to store) that were not used, so that others can take them.

        A lease that has become void is ignored. If the call fails, the lease ends after
        :data:`LEASE_SECONDS`. This method may return before the server has answered.

        :param objects: maps the name of each object to the entry that :meth:`read` has returned for
            it. The entry contains the lease that :meth:`lease` has returned.
        """

    @abstractmethod
    def fill(
        self, entries: Sequence[CacheEntry], ttl: float, again: Sequence[str] = ()
    ) -> tuple[list[bool], list[bytes | None]]:
        """Store ``entries`` for ``ttl`` seconds, then read the guards on which the entries depend.

        A *guard* is an entry that says whether other entries are valid. Reading prolongs the life
        of these guards to ``2 * ttl`` seconds from now on, so that they outlive the stored entries.

        :param again: the names of the guards to read.
        :returns: two lists. The first one says for each of ``entries`` whether it was stored. The
            second one has the values of the guards. An entry is not stored if its lease is void, or
            if its value is too large for the server.
        """

    @abstractmethod
    def mark(self, records: Sequence[tuple[str, bytes]], header: bytes, ttl: float) -> list[int]:
        """Append a line to each of several guards. (A guard is an entry that says whether other
        entries are valid.)

        A guard that is missing is first created, with ``header`` as its value.

        :param records: pairs (name of a guard, line to append).
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

        Deleting an object also makes the leases (permissions to store) void that readers have for
        it.

        :param objects: the names of the objects.
        :param records: pairs (name of a guard, line to append). A guard that is missing is not
            created.
        :param lost: if given, this method may return before the server has answered. The answer is
            then read before the next packet of the same connection. If it does not confirm the
            whole call, ``lost`` is called, perhaps in another thread. The function must not raise
            errors. It is not called if this method itself raises an error. Default: wait for the
            answer.
        """

    @abstractmethod
    def add(self, guards: Sequence[tuple[str, bytes]], ttl: float) -> list[bytes]:
        """Create the guards that are missing. Existing guards keep their values.

        A *guard* is an entry that says whether other entries are valid.

        :param guards: pairs (name of a guard, value with which to create it).
        :param ttl: seconds that each guard lives from now on.
        :returns: the value that each guard has afterwards, in the order of ``guards``.
        """

    @abstractmethod
    def replace(self, name: str, seen: bytes, new: bytes, ttl: float) -> bool:
        """Replace the value of an entry, unless somebody else has changed it since it was read.

        Costs at most two round trips.

        :param seen: the value that was read. Only if the entry still has it, the value is replaced.
        :param new: the new value.
        :param ttl: seconds that the new value lives.
        :returns: True if the value was replaced; False if the entry has another value or is
            missing.
        """

    @abstractmethod
    def count(self, deltas: Mapping[str, int]) -> None:
        """Add numbers to counters. A missing counter counts as 0.

        :param deltas: maps the name of each counter to the number to add.
        """

    @abstractmethod
    def counters(self, names: Sequence[str]) -> list[int]:
        """Return the value of each counter in ``names``; 0 for a counter that is missing."""

    def reset_counters(self, names: Sequence[str]) -> None:
        """Set counters to 0, by deleting them."""
        self.finish(names, ())

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return the server's statistics (version, bytes, evictions, …), under the server's own
        names.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the idle connections to the server. The next call opens a new one."""
