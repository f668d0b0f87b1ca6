"""Reads through the cache, and decides which entries are valid. Does not depend on Django's ORM.

:meth:`Reader.read` looks for several *requests* together, each for an object or a list. Commands to
the same cache server are sent in one packet. Afterwards each request has an outcome:

- :data:`HIT`: the answer is ``request.rows``, or ``request.value`` for a number.
- :data:`MISS`: the caller must query the database and pass the result to :meth:`Reader.fill`.
- :data:`BYPASS`: the caller must query the database and not call :meth:`Reader.fill`. The reason is
  a write that is under way or came in between, a missing guard (see below), or a cache server that
  is down.

A *guard* is the cache entry that says whether the objects and lists of a set of rows are valid. A
*revision* is a digest of the guards of a list, and a part of the list's name.

Reading an object costs one round trip. Reading a list with its rows costs:

- three round trips at first use: for the guards, the ids and the objects;
- two if the process remembers the revision;
- one if the process also remembers the ids. The guards are read in the same packet, and say whether
  these ids are still valid. If the process remembers the rows, too, it reads the guards only.

All rows of one request belong to the same state of the database. To ensure this, the guards are
read before and after the objects. If they are equal, nothing was written in between, because a
guard never has the same bytes again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

from sharded_orm.cache.batch_reader import BatchReader
from sharded_orm.cache.batching import Steps, drive, read_leased, read_unleased
from sharded_orm.cache.closings import closing_queue
from sharded_orm.cache.decoder import EntryDecoder
from sharded_orm.cache.filler import CacheServers, Filler, forbid_fill
from sharded_orm.cache.guards import BrokenGuard
from sharded_orm.cache.keys import Scope
from sharded_orm.cache.process_cache import ListedRows, ProcessCache, kept_for
from sharded_orm.cache.repair import Repairer, Sessions, make_guards
from sharded_orm.cache.requests import (
    HIT,
    MISS,
    CacheRequest,
    Format,
    GuardState,
    ListRequest,
    ObjectRequest,
    RowBatch,
    judge,
)
from sharded_orm.cache.stores.base import CacheServer, FoundEntry, Reply, ServerDown
from sharded_orm.cache.values import Row


class Reader:
    """Reads from the cache, and stores rows in it. The threads of a process share one instance.

    :param now: returns the time in seconds since 1970.
    :param monotonic: returns the time of a monotonic clock in seconds.
    """

    def __init__(
        self,
        cache: CacheServers,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self.memory = ProcessCache()
        self.repairer = Repairer(cache.options.quarantine)
        self._decoder = EntryDecoder(cache.statistics)
        self._filler = Filler(cache, self.memory, self._decoder)
        self._now = now
        self._monotonic = monotonic
        self._kept_for = kept_for(cache.options.ttl)
        self._batches = BatchReader(self._decide, self._make_guards, monotonic, self._kept_for)

    def read(
        self, requests: Sequence[ObjectRequest | ListRequest], *, to_fill: bool = True
    ) -> None:
        """Look for all ``requests`` in the cache, and set their outcomes.

        Does not raise an error if a cache server is down.

        :param to_fill: whether the caller will pass misses to :meth:`fill` (default: True). If
            True, the reader takes leases, the server's permissions to store missing objects. If
            False, nothing can be stored for the requests.
        """
        exchange = read_leased if to_fill else read_unleased
        if len(requests) == 1 and isinstance(requests[0], ObjectRequest):
            # The most frequent case is one object. There are no other queries to join with its
            # query, so do not use drive().
            self._object(requests[0], exchange)
            self._end(requests, to_fill)
            return
        steps: list[Steps] = []
        objects: dict[CacheServer, list[ObjectRequest]] = {}
        for request in requests:
            if isinstance(request, ObjectRequest):
                objects.setdefault(self.cache.objects(request.scope.place), []).append(request)
            else:
                steps.append(self._list(request))
        steps += [self._objects(server, of_server) for server, of_server in objects.items()]
        drive(steps, exchange)
        self._end(requests, to_fill)

    def read_object(
        self,
        scope: Scope,
        format: Format,
        sessions: Sessions | None,
        pk: str,
        *,
        to_fill: bool = True,
    ) -> Row | ObjectRequest:
        """Look for one object. Return its row if the process remembers the row, and the server
        confirms that the row is valid. Otherwise return a request with its outcome set, as
        :meth:`read` does.

        This makes the most frequent read, of a row that the process has read before, cheaper than
        :meth:`read`. Does not raise an error if the cache server is down.

        :param scope, format, sessions, pk: see :class:`ObjectRequest`.
        :param to_fill: see :meth:`read`.
        """
        server, name = self.cache.objects(scope.place), scope.object_name(pk)
        seen = format.decoded.known.get(name)
        reply: Reply | None = None
        try:
            if seen is not None and seen.guards and to_fill:
                if closing_queue.waiting:
                    closing_queue.flush(server)
                reply = server.read_again(scope.guards, name, seen.guards, seen.value)
                if reply is None:
                    # The server still has the same bytes of the entry and of its guards. The
                    # process has found before that the row is valid with these bytes.
                    self.cache.statistics.add(scope.type.name, object_hits=1)
                    return seen.row
            else:
                exchange = read_leased if to_fill else read_unleased
                reply = exchange(server, scope.guards, (name,), ())
        except ServerDown:
            pass
        request = ObjectRequest(scope, format, sessions, pk)
        if reply is not None:
            raws, (entry,), _ = reply
            self._judge(server, [(request, tuple(raws), entry)])
        self._end([request], to_fill)
        return request

    def _end(self, requests: Sequence[CacheRequest], to_fill: bool) -> None:
        """Take leases (permissions to store) for the requests that have missed. Count the outcomes
        of all requests.
        """
        missed = [request for request in requests if request.outcome == MISS]
        if missed and to_fill:
            self._filler.lease(missed, self._now())
        elif missed:
            for request in missed:
                forbid_fill(request)
        if len(requests) == 1:
            # The most frequent case is one request. Do not use a Counter here, because this would
            # take longer than all other work of this method.
            (request,) = requests
            name = request.counters[request.outcome]
            self.cache.statistics.add(request.scope.type.name, **{name: 1})
            return
        counts = Counter(
            (request.scope.type.name, request.counters[request.outcome]) for request in requests
        )
        for (type_name, name), count in counts.items():
            self.cache.statistics.add(type_name, **{name: count})

    def _object(self, request: ObjectRequest, exchange: Callable[..., Reply]) -> None:
        server, names = self.cache.objects(request.scope.place), request.scope.guards
        try:
            raws, (entry,), _ = exchange(server, names, (request.name,), ())
        except ServerDown:
            return
        self._judge(server, [(request, tuple(raws), entry)])

    def read_rows(self, batches: Sequence[RowBatch], *, to_fill: bool = True) -> None:
        """Look for the rows of all ``batches`` in the cache. Set ``rows`` and ``requests`` of each
        batch.

        This is a faster :meth:`read` for many rows, see :class:`BatchReader`. A row that the
        process remembers takes a third of the time of an :class:`ObjectRequest`. The leases
        (permissions to store) for all rows that are missing cost at most one round trip per cache
        server. Does not raise an error if a cache server is down.

        :param to_fill: see :meth:`read`.
        """
        by_server: dict[CacheServer, list[RowBatch]] = {}
        for batch in batches:
            by_server.setdefault(self.cache.objects(batch.place), []).append(batch)
        exchange = read_leased if to_fill else read_unleased
        drive([self._batches.steps(server, part) for server, part in by_server.items()], exchange)
        hits: Counter[str] = Counter()
        missed: list[ObjectRequest] = []
        for batch in batches:
            rows, requests = batch.rows, batch.requests
            if len(rows) < len(batch.addresses):
                for address in batch.addresses.values():
                    if address.name not in rows and address.name not in requests:
                        # The server is down. A new request has the outcome BYPASS: the caller
                        # queries the database, and stores nothing in the cache.
                        requests[address.name] = batch.request(address)
                missed += requests.values()
            if rows:
                hits[next(iter(batch.addresses.values())).scope.type.name] += len(rows)
        if missed:
            self._end(missed, to_fill)
        for type_name, count in hits.items():
            self.cache.statistics.add(type_name, object_hits=count)

    def _objects(self, server: CacheServer, requests: Sequence[ObjectRequest]) -> Steps:
        # Read each guard only once. Many objects have the same guards, such as that of the table.
        names = list(dict.fromkeys(n for request in requests for n in request.scope.guards))
        raws, entries, _ = yield server, names, [request.name for request in requests], ()
        guard_of = dict(zip(names, raws, strict=True)).__getitem__
        raws_of = [tuple(map(guard_of, request.scope.guards)) for request in requests]
        self._judge(server, zip(requests, raws_of, entries, strict=True))

    def _judge(
        self,
        server: CacheServer,
        found: Iterable[tuple[ObjectRequest, tuple[bytes | None, ...], FoundEntry]],
    ) -> None:
        """Set the outcomes of requests, judging by the bytes of their guards and entries."""
        unusable: dict[str, bytes | None] = {}
        for request, guards_read, entry in found:
            seen = request.format.decoded.known.get(request.name)
            if seen is not None and seen.guards == guards_read and seen.value == entry.value:
                # The process has read the same bytes of the entry and of its guards before, and has
                # found that the row was valid. So it still is.
                request.rows = [seen.row]
                request.outcome = HIT
            else:
                self._decide(request, server, guards_read, entry, unusable)
        if unusable:
            self._make_guards(server, unusable)

    def _decide(
        self,
        request: ObjectRequest,
        server: CacheServer,
        raws: tuple[bytes | None, ...],
        entry: FoundEntry,
        unusable: dict[str, bytes | None],
    ) -> None:
        """Set the outcome of ``request``. If one of its guards is missing or broken, add all its
        guards to ``unusable``.
        """
        scope = request.scope
        request.looks = (((request.name,), (entry,)),)
        state = _guard_state(raws, scope.home)
        if state is None:
            unusable.update(zip(scope.guards, raws, strict=True))
            return
        if state.open:
            self._repair(request, server, state)
            if state.is_open or (state.covers is not None and state.covers(request.pk)):
                return
        row = self._decoder.row(request, entry, state.stamp, () if state.open else state.raws)
        if row is not None:
            request.rows = [row]
            request.outcome = HIT
            return
        request.state = request.object_state = state
        request.outcome = MISS

    def _list(self, request: ListRequest) -> Steps:
        scope, query = request.scope, request.query
        guard_names, own_guard = scope.guards, scope.guards[-1]
        server = self.cache.lists(scope.place)
        shares_store = self.cache.shares_store
        memory = self.memory

        # The first packet always reads the guards. What else it reads depends on what the process
        # remembers:
        #
        # - If it remembers the rows, the packet reads nothing else.
        # - If it remembers the ids of the list, the packet also reads the objects, provided that
        #   they are on the same server.
        # - If it remembers only the revision, which is a part of the list's name, the packet also
        #   reads the list.
        began = self._monotonic()
        known = memory.rows(own_guard, query, request.format.decoded, began)
        remembered = memory.listed(own_guard, query)
        object_names: tuple[str, ...] = ()
        name: str | None = None
        if known is None and remembered is not None:
            object_names = remembered.names if shares_store else ()
        elif known is None and (revision := memory.revision(own_guard)) is not None:
            name = scope.list_name(query, revision)
        values, objects, guards_after = yield (
            server,
            guard_names if name is None else (*guard_names, name),
            object_names,
            guard_names if object_names else (),
        )
        entry = values.pop() if name is not None else None
        raws = tuple(values)
        if known is not None:
            if known.guards == raws:
                request.object_names, request.rows = known.names, [*known.rows]
                request.outcome = HIT
                return
            memory.forget_rows(own_guard, query, known)
        if object_names:
            request.looks = ((object_names, objects),)
        state = _guard_state(raws, scope.home)
        if state is None:
            self._make_guards(server, dict(zip(guard_names, raws, strict=True)))
            return
        if state.open:
            self._repair(request, server, state)
            if state.lists_open:
                return
        memory.note_revision(own_guard, state.revision)
        if object_names and tuple(guards_after) != raws:
            return

        # The second packet reads the list of ids, and the objects that the first packet has left
        # out. It is not needed if the remembered ids are valid, or if the first packet has read the
        # list.
        listed = remembered
        if listed is None or listed.revision != state.revision:
            current_name = scope.list_name(query, state.revision)
            if name != current_name:
                left_out = () if known is None else known.names
                (entry,), found, guards_after = yield (
                    server, (current_name,), left_out, guard_names
                )  # fmt: skip
                if left_out:
                    object_names, objects = left_out, found
                    request.looks = ((object_names, objects),)
                if tuple(guards_after) != raws:
                    return
            listed = self._decoder.listed(request, current_name, entry, state.revision)
            if listed is not None:
                memory.note(own_guard, query, listed)
        if listed is not None and (request.scalar or request.numbers):
            request.value = listed.value
            request.outcome = HIT
            return
        if listed is None and not shares_store:
            # Without the list, the ids are not known, so the server of the objects cannot be asked
            # for them.
            request.state = state
            request.outcome = MISS
            return

        # The third packet reads the objects. It is not needed if all objects of the list were read
        # already.
        object_state = state
        if listed is not None and not listed.names:
            object_names, objects = (), []
        elif listed is not None and listed.names != object_names:
            if shares_store:
                _, objects, guards_after = yield server, (), listed.names, guard_names
                request.looks += ((listed.names, objects),)
                if tuple(guards_after) != raws:
                    return
            else:
                home_guards = guard_names[: scope.home + 1]
                object_server = self.cache.objects(scope.place)
                values, objects, guards_after = yield (
                    object_server, home_guards, listed.names, home_guards
                )  # fmt: skip
                request.looks += ((listed.names, objects),)
                home_state = _guard_state(tuple(values), scope.home)
                if home_state is None:
                    self._make_guards(object_server, dict(zip(home_guards, values, strict=True)))
                    return
                if home_state.open:
                    self._repair(request, object_server, home_state)
                if home_state.is_open or tuple(guards_after) != home_state.raws:
                    return
                object_state = home_state
                guards_after, _, _ = yield server, guard_names, (), ()
                if tuple(guards_after) != raws:
                    return
            object_names = listed.names
        covers = object_state.covers
        if listed is not None and covers is not None and any(map(covers, listed.pks)):
            return
        rows = self._decoder.rows(request, object_names, objects, object_state.stamp)
        if listed is not None and rows is not None:
            request.object_names = listed.names
            request.rows = rows
            request.outcome = HIT
            if shares_store and not state.open and self._kept_for:
                # The guards were the same before and after the objects were read, so the process
                # may remember the rows. Count the time from `began`, when no entry had expired.
                size = sum([len(raw or b"") for raw in (*raws, *[value for value, _ in objects])])
                until, decoded = began + self._kept_for, request.format.decoded
                kept = ListedRows(state.raws, decoded, listed.names, tuple(rows), size, until)
                memory.note_rows(own_guard, query, kept, is_divided=scope.isolate is not None)
            return
        if rows is not None:
            request.fillable = dict.fromkeys(object_names)
        elif len(request.looks) > 1:
            # Two packets have asked for the objects. A server gives the lease of an object only
            # once. So if the second packet was refused a lease, the first one may have got it.
            leased = request.unused_leases()
            request.fillable.update(
                {
                    name: leased[name]
                    for name, missing in request.fillable.items()
                    if missing is not None and name in leased
                }
            )
        request.is_listed = listed is not None
        request.state = state
        request.object_state = object_state
        request.outcome = MISS

    def _make_guards(self, server: CacheServer, found: Mapping[str, bytes | None]) -> None:
        make_guards(server, found, self.cache.guard_ttl, self._now)

    def _repair(self, request: CacheRequest, server: CacheServer, state: GuardState) -> None:
        """Close the markers that dead writers have left open in the guards. (A marker announces a
        write.)

        Only later reads profit from the repair. The current read still bypasses the cache for the
        rows of these markers, because it has read the guards before.

        :param state: the guards as the current read has found them.
        """
        if request.sessions is None:
            return
        scope = request.scope
        for index, guard in state.open:
            try:
                closed = self.repairer.repair(
                    server, scope, index, guard, request.sessions, self._now()
                )
            except ServerDown:
                return
            if closed:
                self.cache.statistics.add(scope.type.name, repairs=closed)

    def fill(self, misses: Sequence[tuple[CacheRequest, Sequence[str], Sequence[Row]]]) -> None:
        """Store in the cache what the database has returned for requests that the cache could not
        answer.

        Does not raise an error if a cache server is down. Costs one round trip per cache server. If
        lists and objects are on the same servers, each list costs up to three more, to take leases
        (permissions to store) for its objects.

        :param misses: tuples (request, tokens of the rows' primary keys, rows). A token is the form
            of a value in names of entries. If there are no tokens, the rows are not stored. For
            ``count()`` and ``exists()``, tokens and rows are empty, and the number is taken from
            ``request.value``.
        """
        self._filler.fill(misses)

    def release(self, requests: Iterable[CacheRequest]) -> None:
        """Give back the leases (permissions to store) that ``requests`` have not used.

        Each caller of :meth:`read` or :meth:`read_rows` must call this at the end, for the requests
        without a hit. Otherwise no reader could store these objects for
        :data:`~sharded_orm.cache.stores.base.LEASE_SECONDS`. Does not raise an error if a cache
        server is down. Sends one packet to each cache server that has given such a lease, and
        usually does not wait for the answer.
        """
        self._filler.release(requests)


def _guard_state(raws: tuple[bytes | None, ...], home: int) -> GuardState | None:
    """Return the state of all guards together; None if one of them is missing or broken.

    :param raws: the bytes of the guards as they were read, that of the widest set of rows first.
    :param home: the position of the guard that says whether objects are valid.
    """
    try:
        return None if None in raws else judge(cast("tuple[bytes, ...]", raws), home)
    except BrokenGuard:
        return None
