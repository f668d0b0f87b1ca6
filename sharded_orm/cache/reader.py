"""Reads through the cache: what may be believed, what is missing, what may be filled. No ORM.

A read is one or more *wants*, objects and lists. :meth:`Reader.read` asks for all of them
together, one packet per cache server and phase, and leaves with each want what came of it:

- :data:`HIT`: ``want.rows`` (``want.value`` of a scalar) is the answer;
- :data:`MISS`: ask the database, then give what it said to :meth:`Reader.fill`;
- :data:`BYPASS`: ask the database and fill nothing: a write is under way, or the cache is.

A list of 20 rows costs one round trip in a process that remembers the list's ids, and its
guard's revision tells that they are still right; two when only the revision is remembered;
three at first use. Objects cost one.

Everything that one want tells is one state of the database: its guards are read before and
after its objects and were equal, and digests of guards never come back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, cast

from sharded_orm.cache import guards, values
from sharded_orm.cache.batching import Reply, Steps, drive, read_leased, read_unleased
from sharded_orm.cache.guards import BrokenGuard
from sharded_orm.cache.process_cache import Listed, ProcessCache
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
from sharded_orm.cache.stores.base import MAX_VALUE, CacheEntry, CacheServer, FoundEntry, ServerDown
from sharded_orm.cache.values import Row, Unusable

#: Longer lists are not cached: a multi-get of so many objects is no faster than the query.
MAX_ROWS = 1000


class ReaderOptions(Protocol):
    """What of the settings counts here; all in seconds."""

    @property
    def ttl(self) -> float: ...
    @property
    def quarantine(self) -> float: ...


class ReadCounters(Protocol):
    def add(self, type_name: str, **deltas: int) -> None: ...


class CacheServers(Protocol):
    """What a reader needs of :class:`sharded_orm.cache.client.CacheClient`."""

    @property
    def options(self) -> ReaderOptions: ...
    @property
    def statistics(self) -> ReadCounters: ...
    @property
    def shares_store(self) -> bool: ...
    @property
    def guard_ttl(self) -> float: ...
    def objects(self, place: str) -> CacheServer: ...
    def lists(self, place: str) -> CacheServer: ...


class Reader:
    """Reads and fills, for all threads of the process.

    :param now: seconds since 1970.
    """

    def __init__(self, cache: CacheServers, now: Callable[[], float] = time.time) -> None:
        self.cache = cache
        self.memory = ProcessCache()
        self.repairer = Repairer(cache.options.quarantine)
        self._now = now

    # -- Reading -----------------------------------------------------------------

    def read(self, wants: Sequence[CacheRequest], *, to_fill: bool = True) -> None:
        """Look for all of ``wants``; each then has its outcome. Never raises for the cache.

        :param to_fill: what is missing will be filled: leases are taken.
        """
        exchange = read_leased if to_fill else read_unleased
        first = wants[0] if len(wants) == 1 else None
        if isinstance(first, ObjectRequest):
            # The commonest read of all: what _object() does, without drive().
            server = self.cache.objects(first.scope.place)
            try:
                reply = exchange(server, first.scope.guards, (first.name,), ())
            except ServerDown:
                pass  # It bypasses the cache.
            else:
                self._decide(first, server, reply)
        else:
            steps = [
                self._object(want) if isinstance(want, ObjectRequest) else self._list(want)  # type: ignore[arg-type]  # a request is for an object or for a list
                for want in wants
            ]
            drive(steps, exchange)
        for want in wants:
            if want.outcome == MISS:
                self._prepare(want) if to_fill else self._forbid(want)
        self._count_read(wants)

    def _object(self, want: ObjectRequest) -> Steps:
        scope = want.scope
        server = self.cache.objects(scope.place)
        self._decide(want, server, (yield server, scope.guards, (want.name,), ()))

    def _decide(self, want: ObjectRequest, server: CacheServer, reply: Reply) -> None:
        scope = want.scope
        raws, found, _ = reply
        state = self._state(server, scope.guards, scope.home, tuple(raws))
        if state is None:
            return
        if state.open:
            self._met(want, server, state)
            if state.is_open or (state.covers is not None and state.covers(want.pk)):
                return
        rows = self._rows(want, (want.name,), found, state.stamp)
        if rows is not None:
            want.rows = rows
            want.outcome = HIT
            return
        want.state = want.stamped = state
        want.outcome = MISS

    def _list(self, want: ListRequest) -> Steps:
        scope, query = want.scope, want.query
        names, own = scope.guards, scope.guards[-1]
        server = self.cache.lists(scope.place)
        together = self.cache.shares_store
        memory = self.memory

        # What is remembered says which objects, or which list, to ask for right away.
        remembered = memory.listed(own, query)
        asked: tuple[str, ...] = ()
        name: str | None = None
        if remembered is not None:
            asked = remembered.names if together else ()
        elif (revision := memory.revision(own)) is not None:
            name = scope.list_name(query, revision)
        first = names if name is None else (*names, name)
        read, found, again = yield server, first, asked, names if asked else ()
        entry = read.pop() if name is not None else None
        raws = tuple(read)
        state = self._state(server, names, scope.home, raws)
        if state is None:
            return
        if state.open:
            self._met(want, server, state)
            if state.lists_open:
                return
        memory.note_revision(own, state.revision)
        if asked and tuple(again) != raws:
            return

        # Which ids?
        listed = remembered
        if listed is None or listed.revision != state.revision:
            right = scope.list_name(query, state.revision)
            if name != right:
                (entry,), _, again = yield server, (right,), (), names
                if tuple(again) != raws:
                    return
            listed = self._listed(want, right, entry, state.revision)
            if listed is not None:
                memory.note(own, query, listed)
        if listed is not None and want.scalar:
            want.value = listed.value
            want.outcome = HIT
            return
        if listed is None and not together:
            # Nothing was asked of the server of the objects: it is not known which.
            want.state = state
            want.outcome = MISS
            return

        # The objects.
        stamps = state
        if listed is not None and not listed.names:
            asked, found = (), []
        elif listed is not None and listed.names != asked:
            if together:
                _, found, again = yield server, (), listed.names, names
                if tuple(again) != raws:
                    return
            else:
                home = names[: scope.home + 1]
                objects = self.cache.objects(scope.place)
                read, found, again = yield objects, home, listed.names, home
                theirs = self._state(objects, home, scope.home, tuple(read))
                if theirs is None:
                    return
                if theirs.open:
                    self._met(want, objects, theirs)
                if theirs.is_open or tuple(again) != theirs.raws:
                    return
                stamps = theirs
                again, _, _ = yield server, names, (), ()
                if tuple(again) != raws:
                    return
            asked = listed.names
        if listed is not None and stamps.covers is not None and any(map(stamps.covers, listed.pks)):
            return
        rows = self._rows(want, asked, found, stamps.stamp)
        if listed is not None and rows is not None:
            want.names = listed.names
            want.rows = rows
            want.outcome = HIT
            return
        if rows is not None:
            want.found = dict.fromkeys(asked)
        want.is_listed = listed is not None
        want.state = state
        want.stamped = stamps
        want.outcome = MISS

    def _state(
        self, server: CacheServer, names: Sequence[str], home: int, raws: tuple[bytes | None, ...]
    ) -> GuardState | None:
        """What the guards say; None when one was missing or broken, and has been made anew."""
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
            pass  # The next reader will.
        return None

    def _met(self, want: CacheRequest, server: CacheServer, state: GuardState) -> None:
        """Repair what dead writers have left. This read is not helped by it."""
        if want.sessions is None:
            return
        scope = want.scope
        for index, guard in state.open:
            try:
                closed = self.repairer.repair(
                    server, scope, index, guard, want.sessions, self._now()
                )
            except ServerDown:
                return
            if closed:
                self.cache.statistics.add(scope.type.name, repairs=closed)

    def _rows(
        self, want: CacheRequest, names: Sequence[str], found: Sequence[FoundEntry], stamp: str
    ) -> list[Row] | None:
        """The objects' rows; None when one is missing, and then ``want.found`` tells which."""
        form = want.format
        decoded = form.decoded
        if decoded is None:
            return self._unpacked(want, names, found, stamp)
        known = decoded.known
        rows: list[Row | None] = []
        unread = []
        for index, (name, each) in enumerate(zip(names, found, strict=True)):
            seen = known.get(each.value)
            if seen is not None and seen[0] == stamp and seen[1] == name:
                rows.append(seen[2])
            else:
                rows.append(None)
                unread.append(index)
        if not unread:
            return cast("list[Row]", rows)
        missing = [found[index] for index in unread]
        missing_names = [names[index] for index in unread]
        unpacked = self._unpacked(want, missing_names, missing, stamp)
        if unpacked is None:
            want.found |= {name: None for name in names if name not in want.found}
            return None
        made = form.values(unpacked)
        for index, each, name, row in zip(unread, missing, missing_names, made, strict=True):
            rows[index] = row
            if each.value is not None:
                decoded.note(each.value, stamp, name, row)
        return cast("list[Row]", rows)

    def _unpacked(
        self, want: CacheRequest, names: Sequence[str], found: Sequence[FoundEntry], stamp: str
    ) -> list[Row] | None:
        rows = values.unpack_objects(
            [each.value for each in found], names, want.format.fingerprint, stamp, want.format.width
        )
        if Unusable.MISS not in rows and Unusable.BROKEN not in rows:
            return cast("list[Row]", rows)
        for name, each, row in zip(names, found, rows, strict=True):
            want.found[name] = each if isinstance(row, Unusable) else None
            if row is Unusable.BROKEN:
                self._count_broken(want)
        return None

    def _count_broken(self, want: CacheRequest) -> None:
        self.cache.statistics.add(want.scope.type.name, broken=1)

    def _listed(
        self, want: ListRequest, name: str, raw: bytes | None, revision: str
    ) -> Listed | None:
        found = values.unpack_list(raw, name, want.format.fingerprint)
        if isinstance(found, Unusable):
            if found is Unusable.BROKEN:
                self._count_broken(want)
            return None
        if want.scalar:
            if len(found) == 1 and type(found[0]) is int:
                return Listed(revision, (), (), found[0])
        elif all(type(pk) is str for pk in found) and _TOKENS.fullmatch(",".join(found)):
            # They become names, and who knows who wrote them.
            return _listed(want, revision, found)
        self._count_broken(want)
        return None

    # -- Filling -----------------------------------------------------------------

    def _prepare(self, want: CacheRequest) -> None:
        """Take the leases that ``want`` needs to be filled."""
        youngest = max(state.created for state in (want.state, want.stamped) if state is not None)
        if self._now() < youngest + self.cache.options.quarantine:
            # So young that a marker may have been lost with its predecessor.
            self._forbid(want)
            return
        states = {name: found for name, found in want.found.items() if found is not None}
        if not states:
            return
        server = self.cache.objects(want.scope.place)
        try:
            leases = server.lease(list(states), list(states.values()))
        except ServerDown:
            self._forbid(want)
            return
        for name, lease in zip(states, leases, strict=True):
            want.found[name] = None if lease is None else FoundEntry(None, lease)

    def _forbid(self, want: CacheRequest) -> None:
        want.state = want.stamped = None

    def fill(self, filled: Sequence[tuple[CacheRequest, Sequence[str], Sequence[Row]]]) -> None:
        """Store what the database gave for wants that were missing. Never raises for the cache.

        :param filled: each want with the tokens of its rows' primary keys (empty for those
            that must not be stored as objects) and the rows, or its value and no rows.
        """
        packets: dict[CacheServer, list[tuple[CacheRequest, CacheEntry]]] = {}
        for want, pks, rows in filled:
            if want.state is None or len(rows) > MAX_ROWS:
                continue
            try:
                self._add_entries(packets, want, pks, rows)
            except ServerDown:
                continue
        ttl = self.cache.options.ttl
        for server, entries in packets.items():
            # Reading the guards lets them live longer than what is filled.
            names = dict.fromkeys(name for want, _ in entries for name in want.scope.guards)
            try:
                stored, _ = server.fill([entry for _, entry in entries], ttl, list(names))
            except ServerDown:
                continue
            counts: dict[tuple[str, str], int] = {}
            for (want, entry), ok in zip(entries, stored, strict=True):
                what = "fills" if ok else _why_not(entry)
                key = want.scope.type.name, what
                counts[key] = counts.get(key, 0) + 1
            for (type_name, what), count in counts.items():
                self.cache.statistics.add(type_name, **{what: count})

    def _add_entries(
        self,
        packets: dict[CacheServer, list[tuple[CacheRequest, CacheEntry]]],
        want: CacheRequest,
        pks: Sequence[str],
        rows: Sequence[Row],
    ) -> None:
        scope, state = want.scope, want.state
        assert state is not None
        if isinstance(want, ObjectRequest):
            if list(pks) == [want.pk]:
                self._add_object(packets, want, want.name, rows[0], state.stamp)
            return
        assert isinstance(want, ListRequest)
        server = self.cache.lists(scope.place)
        name, fingerprint = scope.list_name(want.query, state.revision), want.format.fingerprint
        if want.scalar:
            listed = Listed(state.revision, (), (), want.value)
            raw = values.pack_list(name, fingerprint, [want.value])
        else:
            if len(pks) != len(rows):
                return
            listed = _listed(want, state.revision, pks)
            want.names = listed.names
            raw = values.pack_list(name, fingerprint, pks)
        if raw is None:
            return
        if not want.is_listed:
            packets.setdefault(server, []).append((want, CacheEntry(name, raw)))
        self.memory.note(scope.guards[-1], want.query, listed)
        if want.stamped is None:
            return
        if self.cache.shares_store:
            self._lease_unknown(want, server, listed.names, state)
        covers, stamp = want.stamped.covers, want.stamped.stamp
        for pk, object_name, row in zip(pks, listed.names, rows, strict=True):
            if covers is None or not covers(pk):
                self._add_object(packets, want, object_name, row, stamp)

    def _lease_unknown(
        self, want: ListRequest, server: CacheServer, names: Iterable[str], state: GuardState
    ) -> None:
        """Leases for rows of the result that nobody thought of before.

        They come after the SQL; the guards, read once more after them, tell that nothing
        was written in between.
        """
        unknown = [name for name in names if name not in want.found]
        if not unknown:
            return
        guards_of = want.scope.guards
        _, found, again = server.read((), unknown, guards_of)
        if tuple(again) != state.raws or self._rows(want, unknown, found, state.stamp) is not None:
            return
        names = [name for name in unknown if want.found[name] is not None]
        left = [one for name in names if (one := want.found[name]) is not None]
        leases = server.lease(names, left)
        if any(lease is not one.lease for lease, one in zip(leases, left, strict=True)):
            # Where reading gives no leases, they are younger than what the guards said.
            again, _, _ = server.read(guards_of)
            if tuple(again) != state.raws:
                leases = [None] * len(names)
        for name, lease in zip(names, leases, strict=True):
            want.found[name] = None if lease is None else FoundEntry(None, lease)

    def _add_object(
        self,
        packets: dict[CacheServer, list[tuple[CacheRequest, CacheEntry]]],
        want: CacheRequest,
        name: str,
        row: Row,
        stamp: str,
    ) -> None:
        found = want.found.get(name)
        if found is None or found.lease is None:
            return
        raw = values.pack_object(name, want.format.fingerprint, stamp, row)
        if raw is None:
            return  # A value of a kind that the format does not know.
        server = self.cache.objects(want.scope.place)
        packets.setdefault(server, []).append((want, CacheEntry(name, raw, found.lease)))

    # -- Statistics --------------------------------------------------------------

    def _count_read(self, wants: Sequence[CacheRequest]) -> None:
        for want in wants:
            kind = "object" if isinstance(want, ObjectRequest) else "list"
            self.cache.statistics.add(want.scope.type.name, **_DELTAS[kind, want.outcome])


_DELTAS: dict[tuple[str, int], dict[str, int]] = {
    ("object", HIT): {"object_hits": 1},
    ("object", MISS): {"object_misses": 1},
    ("object", BYPASS): {"bypasses": 1},
    ("list", HIT): {"list_hits": 1},
    ("list", MISS): {"list_misses": 1},
    ("list", BYPASS): {"bypasses": 1},
}

_TOKENS = re.compile(r"(?:[0-9A-Za-z_.%~]{1,64}(?:,|\Z))*")


def _why_not(entry: CacheEntry) -> str:
    return "too_large" if len(entry.value) > MAX_VALUE else "fills_lost"


def _listed(want: ListRequest, revision: str, pks: Iterable[str]) -> Listed:
    found = tuple(pks)
    return Listed(revision, found, tuple(map(want.scope.object_name, found)), None)
