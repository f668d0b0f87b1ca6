"""Reads through the cache: which entries are valid, which are missing. Knows no ORM.

A read has one or more *requests*, for objects and lists. :meth:`Reader.read` looks for all of
them together, in one packet per cache server and phase. Each request then has an outcome:

- :data:`HIT`: ``request.rows`` (``request.value`` of a scalar) is the answer.
- :data:`MISS`: query the database, then hand the result to :meth:`Reader.fill`.
- :data:`BYPASS`: query the database and fill nothing. A write is under way, or a cache server
  is down.

A list of 20 rows costs one round trip in a process that remembers the list's ids, as the
revision of its guard says that they are still right. It costs two if only the revision is
remembered, and three at first use. Objects cost one.

All that one request returns is one state of the database: its guards are read before and after
its objects and must be equal, and a digest of guards never comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast

from sharded_orm.cache import guards
from sharded_orm.cache.batching import Reply, Steps, drive, read_leased, read_unleased
from sharded_orm.cache.decoder import EntryDecoder
from sharded_orm.cache.filler import CacheServers, Filler, forbid_fill
from sharded_orm.cache.guards import BrokenGuard
from sharded_orm.cache.process_cache import ProcessCache
from sharded_orm.cache.repair import Repairer
from sharded_orm.cache.requests import (
    BYPASS,
    HIT,
    MISS,
    CacheRequest,
    GuardState,
    ListRequest,
    ObjectRequest,
    judge,
)
from sharded_orm.cache.stores.base import CacheServer, ServerDown
from sharded_orm.cache.values import Row


class Reader:
    """Reads and fills the cache. One for all threads of the process.

    :param now: seconds since 1970.
    """

    def __init__(self, cache: CacheServers, now: Callable[[], float] = time.time) -> None:
        self.cache = cache
        self.memory = ProcessCache()
        self.repairer = Repairer(cache.options.quarantine)
        self._decoder = EntryDecoder(cache.statistics)
        self._filler = Filler(cache, self.memory, self._decoder)
        self._now = now

    def read(self, requests: Sequence[CacheRequest], *, to_fill: bool = True) -> None:
        """Look for all ``requests``; each then has its outcome. Raises no error of the cache.

        :param to_fill: whether misses will be filled: their leases are taken.
        """
        exchange = read_leased if to_fill else read_unleased
        first = requests[0] if len(requests) == 1 else None
        if isinstance(first, ObjectRequest):
            # The most frequent read: as _object(), but without drive().
            server = self.cache.objects(first.scope.place)
            try:
                reply = exchange(server, first.scope.guards, (first.name,), ())
            except ServerDown:
                pass  # It bypasses the cache.
            else:
                self._decide(first, server, reply)
        else:
            steps = [
                self._object(request) if isinstance(request, ObjectRequest) else self._list(request)  # type: ignore[arg-type]  # a request is for an object or for a list
                for request in requests
            ]
            drive(steps, exchange)
        for request in requests:
            if request.outcome == MISS:
                if to_fill:
                    self._filler.lease(request, self._now())
                else:
                    forbid_fill(request)
        self._count_read(requests)

    def _object(self, request: ObjectRequest) -> Steps:
        scope = request.scope
        server = self.cache.objects(scope.place)
        self._decide(request, server, (yield server, scope.guards, (request.name,), ()))

    def _decide(self, request: ObjectRequest, server: CacheServer, reply: Reply) -> None:
        scope = request.scope
        raws, entries, _ = reply
        state = self._guard_state(server, scope.guards, scope.home, tuple(raws))
        if state is None:
            return
        if state.open:
            self._repair(request, server, state)
            if state.is_open or (state.covers is not None and state.covers(request.pk)):
                return
        rows = self._decoder.rows(request, (request.name,), entries, state.stamp)
        if rows is not None:
            request.rows = rows
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

        # The memory of the process says which objects, or which list, to read right away.
        remembered = memory.listed(own_guard, query)
        object_names: tuple[str, ...] = ()
        name: str | None = None
        if remembered is not None:
            object_names = remembered.names if shares_store else ()
        elif (revision := memory.revision(own_guard)) is not None:
            name = scope.list_name(query, revision)
        values, objects, guards_after = yield (
            server,
            guard_names if name is None else (*guard_names, name),
            object_names,
            guard_names if object_names else (),
        )
        entry = values.pop() if name is not None else None
        raws = tuple(values)
        state = self._guard_state(server, guard_names, scope.home, raws)
        if state is None:
            return
        if state.open:
            self._repair(request, server, state)
            if state.lists_open:
                return
        memory.note_revision(own_guard, state.revision)
        if object_names and tuple(guards_after) != raws:
            return

        # The ids.
        listed = remembered
        if listed is None or listed.revision != state.revision:
            current_name = scope.list_name(query, state.revision)
            if name != current_name:
                (entry,), _, guards_after = yield server, (current_name,), (), guard_names
                if tuple(guards_after) != raws:
                    return
            listed = self._decoder.listed(request, current_name, entry, state.revision)
            if listed is not None:
                memory.note(own_guard, query, listed)
        if listed is not None and request.scalar:
            request.value = listed.value
            request.outcome = HIT
            return
        if listed is None and not shares_store:
            # Without the ids, the server of the objects was not asked.
            request.state = state
            request.outcome = MISS
            return

        # The objects.
        object_state = state
        if listed is not None and not listed.names:
            object_names, objects = (), []
        elif listed is not None and listed.names != object_names:
            if shares_store:
                _, objects, guards_after = yield server, (), listed.names, guard_names
                if tuple(guards_after) != raws:
                    return
            else:
                home_guards = guard_names[: scope.home + 1]
                object_server = self.cache.objects(scope.place)
                values, objects, guards_after = yield (
                    object_server, home_guards, listed.names, home_guards
                )  # fmt: skip
                home_state = self._guard_state(
                    object_server, home_guards, scope.home, tuple(values)
                )
                if home_state is None:
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
            return
        if rows is not None:
            request.fillable = dict.fromkeys(object_names)
        request.is_listed = listed is not None
        request.state = state
        request.object_state = object_state
        request.outcome = MISS

    def _guard_state(
        self, server: CacheServer, names: Sequence[str], home: int, raws: tuple[bytes | None, ...]
    ) -> GuardState | None:
        """The state of the guards; None if a guard was missing or broken, which is then replaced."""
        try:
            if None not in raws:
                return judge(cast("tuple[bytes, ...]", raws), home)
        except BrokenGuard:
            pass
        header = guards.header(self._now())
        ttl = self.cache.guard_ttl
        missing = []
        try:
            for name, raw in zip(names, raws, strict=True):
                if raw is None:
                    missing.append((name, guards.header(self._now())))
                    continue
                try:
                    guards.parse(raw)
                except BrokenGuard:
                    server.replace(name, raw, header, ttl)
            if missing:
                server.add(missing, ttl)
        except ServerDown:
            pass  # The next reader will do it.
        return None

    def _repair(self, request: CacheRequest, server: CacheServer, state: GuardState) -> None:
        """Close the markers that dead writers left open. Later reads profit, this one does not."""
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
        """Store what the database returned for requests that missed. Raises no error of the cache.

        One round trip per cache server; for lists on the store of the objects up to three more.

        :param misses: each request with the tokens of its rows' primary keys (empty for rows
            that must not be stored as objects) and the rows; no rows for a scalar, whose
            ``request.value`` is stored.
        """
        self._filler.fill(misses)

    def _count_read(self, requests: Sequence[CacheRequest]) -> None:
        for request in requests:
            kind = "object" if isinstance(request, ObjectRequest) else "list"
            self.cache.statistics.add(request.scope.type.name, **_DELTAS[kind, request.outcome])


_DELTAS: dict[tuple[str, int], dict[str, int]] = {
    ("object", HIT): {"object_hits": 1},
    ("object", MISS): {"object_misses": 1},
    ("object", BYPASS): {"bypasses": 1},
    ("list", HIT): {"list_hits": 1},
    ("list", MISS): {"list_misses": 1},
    ("list", BYPASS): {"bypasses": 1},
}
