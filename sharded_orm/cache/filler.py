"""Fills the cache: after a cache miss, stores the rows that the database has returned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

from sharded_orm.cache import values
from sharded_orm.cache.decoder import Counters, EntryDecoder, listed_rows
from sharded_orm.cache.process_cache import Listed, ProcessCache, kept_for
from sharded_orm.cache.requests import CacheRequest, GuardState, ListRequest, ObjectRequest
from sharded_orm.cache.stores.base import (
    MAX_VALUE,
    CacheEntry,
    CacheServer,
    FoundEntry,
    Lease,
    ServerDown,
)
from sharded_orm.cache.values import Row

#: A list with more rows is not cached, because reading it from the database is as fast.
MAX_ROWS = 1000

_Packets = dict[CacheServer, list[tuple[CacheRequest, CacheEntry]]]


class ReaderOptions(Protocol):
    """The cache settings that readers use. Each is a number of seconds."""

    @property
    def ttl(self) -> float: ...
    @property
    def quarantine(self) -> float: ...


class CacheServers(Protocol):
    """The interface of :class:`sharded_orm.cache.client.CacheClient` that readers use."""

    @property
    def options(self) -> ReaderOptions: ...
    @property
    def statistics(self) -> Counters: ...
    @property
    def shares_store(self) -> bool: ...
    @property
    def guard_ttl(self) -> float: ...
    def objects(self, place: str) -> CacheServer: ...
    def lists(self, place: str) -> CacheServer: ...


def forbid_fill(request: CacheRequest) -> None:
    """Mark ``request`` so that its result is not stored in the cache."""
    request.state = request.object_state = None


class Filler:
    """Stores in the cache what the database has returned after a cache miss.

    To store an object (a cached row), a reader needs a *lease*, the server's permission. The reader
    takes it before the SQL query, or after the query if only the query shows which objects are
    needed. The lease becomes void if a writer deletes the entry meanwhile, so no old row is stored.
    Unused leases are given back (:meth:`release`).

    The threads of a process share one instance. No public method raises an error if a cache server
    is down.
    """

    def __init__(self, cache: CacheServers, memory: ProcessCache, decoder: EntryDecoder) -> None:
        self._cache = cache
        self._memory = memory
        self._decoder = decoder
        # For how many seconds the cache server keeps each entry.
        self._seconds = cache.options.ttl - kept_for(cache.options.ttl)

    def lease(self, requests: Iterable[CacheRequest], now: float) -> None:
        """Take leases (the server's permissions) to store the objects that ``requests`` have not
        found. Costs at most one round trip per cache server.

        If a server is down, or if a guard is younger than QUARANTINE seconds, mark the requests
        concerned so that nothing is stored for them. A young guard may replace an older one that
        the server has evicted, and that announced a write which is still under way.

        :param now: the time in seconds since 1970.
        """
        oldest = now - self._cache.options.quarantine
        by_server: dict[CacheServer, list[tuple[CacheRequest, dict[str, FoundEntry]]]] = {}
        for request in requests:
            if any(
                state is not None and state.created > oldest
                for state in (request.state, request.object_state)
            ):
                # A guard is young. The server may have evicted an older one, in which a transaction
                # had announced a write that is not committed yet. So it is not safe to store
                # anything.
                forbid_fill(request)
                continue
            missing = {name: entry for name, entry in request.fillable.items() if entry is not None}
            if missing:
                server = self._cache.objects(request.scope.place)
                by_server.setdefault(server, []).append((request, missing))
        for server, of_server in by_server.items():
            names = [name for _, missing in of_server for name in missing]
            entries = [entry for _, missing in of_server for entry in missing.values()]
            try:
                leases = iter(server.lease(names, entries))
            except ServerDown:
                for request, _ in of_server:
                    forbid_fill(request)
                continue
            for request, missing in of_server:
                _note_leases(request, missing, list(islice(leases, len(missing))))

    def release(self, requests: Iterable[CacheRequest]) -> None:
        """Give back the leases (permissions to store) that ``requests`` have not used."""
        entries: dict[CacheServer, dict[str, FoundEntry]] = {}
        for request in requests:
            if request.looks and (unused := request.unused_leases()):
                server = self._cache.objects(request.scope.place)
                entries.setdefault(server, {}).update(unused)
                request.looks = ()
        for server, unused in entries.items():
            try:
                server.release(unused)
            except ServerDown:
                continue

    def fill(self, misses: Iterable[tuple[CacheRequest, Sequence[str], Sequence[Row]]]) -> None:
        """Store in the cache what the database has returned for ``misses``, the requests that the
        cache could not answer. See :meth:`Reader.fill`.
        """
        packets: _Packets = {}
        for request, pks, rows in misses:
            if request.state is None or len(rows) > MAX_ROWS:
                continue
            try:
                self._add_entries(packets, request, pks, rows)
            except ServerDown:
                continue
        for server, entries in packets.items():
            # The guards on which the new entries depend. server.fill() prolongs their lives, so
            # that they outlive the entries.
            names = dict.fromkeys(name for request, _ in entries for name in request.scope.guards)
            try:
                stored, _ = server.fill([entry for _, entry in entries], self._seconds, list(names))
            except ServerDown:
                continue
            for (request, entry), is_stored in zip(entries, stored, strict=True):
                if not is_stored:
                    # Nothing was stored. If the reason is that the value is too large, the lease is
                    # still taken. So remove the entry from request.stored: release() then gives the
                    # lease back.
                    request.stored.discard(entry.name)
            self._count(entries, stored)

    def _count(
        self, entries: Sequence[tuple[CacheRequest, CacheEntry]], stored: Sequence[bool]
    ) -> None:
        counts: dict[tuple[str, str], int] = {}
        for (request, entry), is_stored in zip(entries, stored, strict=True):
            if is_stored:
                counter = "fills"
            else:
                counter = "too_large" if len(entry.value) > MAX_VALUE else "fills_lost"
            key = request.scope.type.name, counter
            counts[key] = counts.get(key, 0) + 1
        for (type_name, counter), count in counts.items():
            self._cache.statistics.add(type_name, **{counter: count})

    def _add_entries(
        self, packets: _Packets, request: CacheRequest, pks: Sequence[str], rows: Sequence[Row]
    ) -> None:
        scope, state = request.scope, request.state
        assert state is not None
        if isinstance(request, ObjectRequest):
            if list(pks) == [request.pk]:
                self._add_object(packets, request, request.name, rows[0], state.stamp)
            return
        assert isinstance(request, ListRequest)
        server = self._cache.lists(scope.place)
        name = scope.list_name(request.query, state.revision)
        fingerprint = request.format.fingerprint
        if request.scalar or request.numbers:
            listed = Listed(state.revision, (), (), request.value)
            numbers = request.value if isinstance(request.value, tuple) else (request.value,)
            value = values.pack_list(name, fingerprint, numbers)
        else:
            if len(pks) != len(rows):
                return
            listed = listed_rows(request, state.revision, pks)
            request.object_names = listed.names
            value = values.pack_list(name, fingerprint, pks)
        if value is None:
            return
        if not request.is_listed:
            packets.setdefault(server, []).append((request, CacheEntry(name, value)))
        self._memory.note(scope.guards[-1], request.query, listed)
        if request.object_state is None:
            return
        if self._cache.shares_store:
            self._lease_unknown(request, server, listed.names, state)
        covers, stamp = request.object_state.covers, request.object_state.stamp
        for pk, object_name, row in zip(pks, listed.names, rows, strict=True):
            if covers is None or not covers(pk):
                self._add_object(packets, request, object_name, row, stamp)

    def _lease_unknown(
        self, request: ListRequest, server: CacheServer, names: Iterable[str], state: GuardState
    ) -> None:
        """Take leases (permissions to store) for the objects of a list whose ids only the SQL query
        has shown.

        The query has read the rows before these leases are taken. A write in between would not make
        the leases void. So read the guards again, which change with each write. If they differ from
        ``state``, keep no lease, and store no objects.

        :param server: the server that holds both the lists and the objects.
        :param names: the names of all objects of the list.
        :param state: the guards as they were before the SQL query.
        """
        unknown = [name for name in names if name not in request.fillable]
        if not unknown:
            return
        guards = request.scope.guards
        _, entries, guards_after = server.read((), unknown, guards)
        request.looks += ((unknown, entries),)
        if tuple(guards_after) != state.raws:
            return
        if self._decoder.rows(request, unknown, entries, state.stamp) is not None:
            return
        missing = {name: entry for name in unknown if (entry := request.fillable[name]) is not None}
        leases = server.lease(list(missing), list(missing.values()))
        _note_leases(request, missing, leases)
        if any(
            lease is not entry.lease for lease, entry in zip(leases, missing.values(), strict=True)
        ):
            # A server of this kind (Redis) has not given the leases in read(), but only now in
            # lease(), after the guards were read. A write may have come in between, so read the
            # guards once more.
            guards_after, _, _ = server.read(guards)
            if tuple(guards_after) != state.raws:
                request.fillable.update(dict.fromkeys(missing))

    def _add_object(
        self, packets: _Packets, request: CacheRequest, name: str, row: Row, stamp: str
    ) -> None:
        leased = request.fillable.get(name)
        if leased is None or leased.lease is None:
            return
        value = values.pack_object(name, request.format.fingerprint, stamp, row)
        if value is None:
            # A value of the row would not be exactly the same after packing and unpacking, so do
            # not store the row.
            return
        request.stored.add(name)
        server = self._cache.objects(request.scope.place)
        packets.setdefault(server, []).append((request, CacheEntry(name, value, leased.lease)))


def _note_leases(
    request: CacheRequest, missing: dict[str, FoundEntry], leases: Sequence[Lease | None]
) -> None:
    """Note in ``request`` the leases of the ``missing`` objects. None stands for a lease that the
    server has refused.
    """
    for name, lease in zip(missing, leases, strict=True):
        request.fillable[name] = None if lease is None else FoundEntry(None, lease)
    entries = [
        FoundEntry(entry.value, lease)
        for entry, lease in zip(missing.values(), leases, strict=True)
    ]
    request.looks += ((tuple(missing), entries),)
