"""The markers of a transaction: opened in the cache before COMMIT, closed after it.

A *guard* is the cache entry that stands for the rows of a scope (a table on a shard, a shard key,
an isolate key); an open *marker* in it says that a write to these rows is under way. Marking
costs two round trips per transaction and cache server, whatever the transaction wrote. A write
that cannot be marked is refused, or goes on (``ON_CACHE_FAILURE``). If a server fails between
the two round trips, closing the markers is queued in the process; until then readers bypass the
cache for these rows.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, NoReturn, Protocol

from sharded_orm.cache import request_cache
from sharded_orm.cache.client import CacheClient
from sharded_orm.cache.guards import MAX_LISTED, Marker, Writer, closing, header, new_token, opening
from sharded_orm.cache.keys import CachedType, Scope
from sharded_orm.cache.repair import compact_marked
from sharded_orm.cache.stores.base import CacheServer, ServerDown
from sharded_orm.exceptions import CacheUnavailable

logger = logging.getLogger("sharded_orm.cache")

#: Attempts to mark within COMMIT_WITHIN before the transaction is refused.
_ATTEMPTS = 3

Records = list[tuple[str, bytes]]


class MarkedConnection(Protocol):
    """The part of a database connection that markers use."""

    alias: str

    def session_id(self) -> tuple[str, str, int]: ...
    def discard_session(self) -> None: ...


class TouchedRows:
    """The rows that were written under one shard key, or in one global table.

    :param scope: of the shard key or table.
    """

    __slots__ = ("isolates", "pks", "scope", "wide")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        #: Tokens of rows whose objects may be cached; None for all rows.
        self.pks: set[str] | None = set()
        #: Their isolate keys before and after the write, by token.
        self.isolates: dict[str, Scope] = {}
        #: Whether rows of unknown isolate keys were written.
        self.wide = False

    def add(self, pks: Iterable[str] | None, isolates: Iterable[Scope], wide: bool) -> None:
        for scope in isolates:
            self.isolates[str(scope.isolate)] = scope
        self.wide = self.wide or wide or len(self.isolates) > MAX_LISTED
        if pks is None:
            self.pks = None
        elif self.pks is not None:
            self.pks.update(pks)
            if len(self.pks) > MAX_LISTED:
                self.pks = None

    def updates(self) -> Iterator[GuardUpdate]:
        """The guards to mark, each once."""
        pks = None if self.pks is None else frozenset(self.pks)
        # The last of a scope's guards is its own.
        yield GuardUpdate(self.scope, self.scope.guards[-1], pks, self.wide, at_home=True)
        if not self.wide:
            for scope in self.isolates.values():
                yield GuardUpdate(scope, scope.guards[-1], frozenset(), False, at_home=False)


class GuardUpdate(NamedTuple):
    """A write, as one guard must know it.

    :param guard: the name of the guard.
    :param pks: tokens of the rows whose objects may be cached; None for all.
    :param wide: whether rows of every narrower scope may be affected.
    :param at_home: whether the guard stands for objects, too, and not for lists alone.
    """

    scope: Scope
    guard: str
    pks: frozenset[str] | None
    wide: bool
    at_home: bool


class PlacedMarker(NamedTuple):
    """A marker of this transaction that is, or may be, in a guard.

    :param holds_objects: whether the server may have the objects of the rows.
    """

    update: GuardUpdate
    server: CacheServer
    marker: Marker
    holds_objects: bool


class TransactionMarkers:
    """The rows of cached models that one transaction wrote, and its markers. Not thread-safe.

    It is the ``transaction_writes`` of a connection, which calls it as
    :class:`~sharded_orm.backends.write_hooks.observer.TransactionListener` says.
    """

    def __init__(self, cache: CacheClient, connection: MarkedConnection) -> None:
        self._cache = cache
        self._connection = connection
        # By type and place, then by the token of the shard key. None is the key of a whole
        # table, and includes all other keys of a sharded type.
        self._touched: dict[tuple[CachedType, str], dict[str | None, TouchedRows]] = {}
        self._placed: list[PlacedMarker] = []
        # Servers that are down, while the transaction goes on all the same.
        self._unmarked: set[CacheServer] = set()
        self._sizes: dict[CacheServer, dict[str, int]] = {}
        # When all touched rows were last marked, monotonic; None: some are not.
        self._marked_at: float | None = None

    def touch(
        self,
        scope: Scope,
        pks: Iterable[str] | None,
        *,
        isolates: Iterable[Scope] = (),
        wide: bool = False,
    ) -> None:
        """Note rows that were, or will be, written. No round trip.

        :param scope: of their shard key; of the table if the key is unknown or the model global.
        :param pks: tokens of the rows whose objects may be cached; None for all.
        :param isolates: scopes of their isolate keys, before and after the write; ``scope`` may
            be one itself.
        :param wide: whether rows of other isolate keys may be affected, too.
        """
        self._marked_at = None
        type, place, key = scope.type, scope.place, scope.key
        if scope.isolate is not None:
            isolates = (*isolates, scope)
            scope = Scope(type, place, key)
        request_cache.forget(_home(scope))
        keys = self._touched.setdefault((type, place), {})
        if type.sharded and None in keys:
            return
        if type.sharded and (key is None or (key not in keys and len(keys) >= MAX_LISTED)):
            keys.clear()
            rows = keys[None] = TouchedRows(scope if key is None else Scope(type, place))
            rows.add(None, (), True)
            return
        if key not in keys:
            keys[key] = TouchedRows(scope)
        keys[key].add(pks, isolates, wide)

    def _all(self) -> Iterator[TouchedRows]:
        for keys in self._touched.values():
            yield from keys.values()

    def _updates(self) -> Iterator[GuardUpdate]:
        for rows in self._all():
            yield from rows.updates()

    def _types(self) -> set[str]:
        return {type.name for type, _ in self._touched}

    def _forget(self) -> None:
        for rows in self._all():
            request_cache.forget(_home(rows.scope))

    @property
    def is_announced(self) -> bool:
        """Whether a marker may be in the cache."""
        return bool(self._placed)

    def announce(self) -> None:
        """Mark the guards of all touched rows.

        One round trip per cache server; none if they were marked within COMMIT_WITHIN.

        :raises CacheUnavailable: a cache server does not answer and the policy is to refuse, or
            marking takes longer than COMMIT_WITHIN. Markers stay open until :meth:`over`.
        """
        within = self._cache.options.commit_within
        for _ in range(_ATTEMPTS):
            if self._marked_at is not None and time.monotonic() <= self._marked_at + within:
                return
            self._mark()
            if self._unmarked:
                return
        if self._marked_at is not None and time.monotonic() <= self._marked_at + within:
            return
        self._refuse(f"marking took longer than COMMIT_WITHIN ({within:g} s), {_ATTEMPTS} times")

    def _mark(self) -> None:
        started, now = time.monotonic(), time.time()
        writer = Writer(*self._connection.session_id())
        token = new_token()
        records: dict[CacheServer, Records] = {}
        for update in self._updates():
            marker = Marker(token, now, update.wide, writer, update.pks)
            line = opening(marker)
            for server, holds_objects in self._servers(update):
                records.setdefault(server, []).append((update.guard, line))
                # Noted before it is sent: even a failed call may place it.
                self._placed.append(PlacedMarker(update, server, marker, holds_objects))
        first_line, ttl = header(now), self._cache.guard_ttl
        for server, lines in records.items():
            try:
                unfinished.flush(server)
                sizes = server.mark(lines, first_line, ttl)
            except ServerDown as exc:
                self._failed(server, exc)
                continue
            self._sizes[server] = {name: size for (name, _), size in zip(lines, sizes, strict=True)}
        self._marked_at = started

    def _servers(self, update: GuardUpdate) -> Iterator[tuple[CacheServer, bool]]:
        for holder in self._cache.holders(update.scope.place):
            if update.at_home or holder.lists:
                yield holder.server, holder.objects and update.at_home

    def _failed(self, server: CacheServer, exc: ServerDown) -> None:
        if self._cache.options.on_failure == "refuse":
            self._refuse(f"cache server {server.name} does not answer ({exc})", exc)
        self._unmarked.add(server)
        for name in self._types():
            self._cache.statistics.add(name, proceeded=1)
        logger.warning(
            "Cache server %s does not answer (%s); the transaction on %r goes on, as"
            " ON_CACHE_FAILURE says: what it wrote may be stale in the cache until the server is"
            " back, for %g s at most.",
            server.name, exc, self._connection.alias, self._cache.options.ttl,
        )  # fmt: skip

    def _refuse(self, why: str, cause: Exception | None = None) -> NoReturn:
        for name in self._types():
            self._cache.statistics.add(name, refusals=1)
        raise CacheUnavailable(
            f"The transaction on {self._connection.alias!r} was rolled back, since the cache could"
            f" not be told of it: {why}. Try again; if the cache server stays away, start it, or"
            " set ON_CACHE_FAILURE to 'proceed' and accept stale entries."
        ) from cause

    def over(self) -> None:
        """Delete the objects and close the markers.

        One round trip per cache server. If a server does not answer, closing is queued and the
        database session is discarded, so that readers see that the transaction is over.
        """
        markers, self._placed = self._placed, []
        try:
            if markers:
                self._finish(markers)
        finally:
            # Reads between the write and COMMIT may have kept the old rows.
            self._forget()

    def _finish(self, markers: list[PlacedMarker]) -> None:
        late = self._marked_at is None or (
            time.monotonic() > self._marked_at + self._cache.options.commit_within
        )
        closings = self._closings(markers, late=late)
        done: set[CacheServer] = set()
        try:
            for server, markers_end in closings.items():
                if self._close(markers_end):
                    done.add(server)
        finally:
            pending = [end for server, end in closings.items() if server not in done]
            if pending:
                for markers_end in pending:
                    unfinished.add(markers_end)
                self._connection.discard_session()

    def _closings(
        self, markers: list[PlacedMarker], *, late: bool
    ) -> dict[CacheServer, Unfinished]:
        """The ends of the markers, by server.

        :param late: whether the COMMIT may have come after COMMIT_WITHIN.
        """
        closings: dict[CacheServer, Unfinished] = {}
        for update, server, marker, holds_objects in markers:
            if (end := closings.get(server)) is None:
                end = closings[server] = Unfinished(server)
            if holds_objects and update.pks:
                end.objects.update(map(update.scope.object_name, update.pks))
            void = late or server in self._unmarked or marker.voids
            end.records.append((update.guard, closing(marker.token, void=void)))
        return closings

    def _close(self, end: Unfinished) -> bool:
        """Close the markers on one server. Returns whether it answered."""
        server = end.server
        try:
            unfinished.flush(server)
            server.finish(list(end.objects), end.records)
        except ServerDown as exc:
            logger.warning(
                "Cache server %s does not answer (%s) after the end of a transaction on %r: what"
                " it wrote is not cached until the server is told.",
                server.name, exc, self._connection.alias,
            )  # fmt: skip
            return False
        except Exception:  # Logged: a committed transaction must not seem to have failed.
            logger.exception("closing markers on %s", server.name)
            return False
        try:
            if sizes := self._sizes.get(server):
                compact_marked(server, sizes, self._cache.guard_ttl)
        except ServerDown:
            logger.debug("compacting guards on %s", server.name, exc_info=True)
        return True

    def lost(self) -> None:
        """Leave the markers open: readers ask the database what became of the transaction."""
        markers, self._placed = self._placed, []
        # A server without markers has nothing that lets readers ask.
        unmarked = [marker for marker in markers if marker.server in self._unmarked]
        for end in self._closings(unmarked, late=True).values():
            unfinished.add(end)
        self._forget()


def _home(scope: Scope) -> str | None:
    """The guard by which the request's cache keeps rows of ``scope``; None for several guards."""
    return scope.guards[scope.home] if scope.home < len(scope.guards) else None


class Unfinished:
    """The end of markers on one server: objects to delete, then lines to append to guards."""

    __slots__ = ("objects", "records", "server")

    def __init__(self, server: CacheServer) -> None:
        self.server = server
        self.objects: set[str] = set()
        self.records: Records = []


class Queue:
    """Ends of markers that cache servers must get before anything else.

    One per process; thread-safe; bounded. If it is full, the oldest end is dropped: its markers
    stay open until readers repair them. A forked child starts with an empty queue, as its
    parent keeps the entries.
    """

    MAXIMUM = 1000  # transactions per server
    _AT_ONCE = 50

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        #: Whether the queue has entries: readers look here before each exchange.
        self.waiting = False
        # By name: when settings change, a server gets a new object.
        self._ends: dict[str, deque[Unfinished]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._ends.values()))

    def add(self, end: Unfinished) -> None:
        with self._lock:
            ends = self._ends.setdefault(end.server.name, deque(maxlen=self.MAXIMUM))
            if len(ends) == self.MAXIMUM:
                logger.warning("More than %d ends of writes wait for cache server %s; the oldest"
                               " is left to its readers.", self.MAXIMUM, end.server.name)  # fmt: skip
            ends.append(end)
            self.waiting = True

    def flush(self, server: CacheServer) -> None:
        """Send ``server`` the ends that wait for it. No round trip if there are none.

        :raises ServerDown: the server does not answer; the ends stay in the queue.
        """
        while self.waiting:
            with self._lock:
                ends = self._ends.get(server.name)
                if not ends:
                    self._ends.pop(server.name, None)
                    self.waiting = bool(self._ends)
                    return
                batch = [ends.popleft() for _ in range(min(len(ends), self._AT_ONCE))]
            objects: dict[str, None] = {}
            records: Records = []
            for end in batch:
                objects.update(dict.fromkeys(end.objects))
                records += end.records
            try:
                server.finish(list(objects), records)
            except BaseException:
                with self._lock:
                    self._ends.setdefault(server.name, deque(maxlen=self.MAXIMUM)).extendleft(
                        reversed(batch)
                    )
                    self.waiting = True
                raise


#: The queue of this process.
unfinished = Queue()
