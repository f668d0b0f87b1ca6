"""What a transaction tells the cache: markers before COMMIT, and their end after it.

Two round trips per transaction and cache server, whatever it wrote. A write that the cache
cannot be told of is refused, or goes on (``ON_CACHE_FAILURE``). What cannot be undone in the
cache any more, because a server fails between the two, is queued in the process; meanwhile
readers bypass the cache for it.
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

#: Marks of one transaction before it is given up: each came later than COMMIT_WITHIN allows.
_MARKS = 3

Records = list[tuple[str, bytes]]


class MarkedConnection(Protocol):
    """What is asked of a database connection."""

    alias: str

    def session_id(self) -> tuple[str, str, int]: ...
    def discard_session(self) -> None: ...


class Touched:
    """What was written under one shard key, or in one global table.

    :param scope: all of that.
    """

    __slots__ = ("isolates", "pks", "scope", "wide")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        #: Tokens of rows whose objects may be cached, None for all of them.
        self.pks: set[str] | None = set()
        #: What was and is their isolate key.
        self.isolates: dict[str, Scope] = {}
        #: Rows of isolate keys that are not known.
        self.wide = False

    def add(self, pks: Iterable[str] | None, isolates: Iterable[Scope], wide: bool) -> None:
        for narrow in isolates:
            self.isolates[str(narrow.isolate)] = narrow
        self.wide = self.wide or wide or len(self.isolates) > MAX_LISTED
        if pks is None:
            self.pks = None
        elif self.pks is not None:
            self.pks.update(pks)
            if len(self.pks) > MAX_LISTED:
                self.pks = None

    def notes(self) -> Iterator[GuardUpdate]:
        """What each guard must be told."""
        pks = None if self.pks is None else frozenset(self.pks)
        # The last of a scope's guards is its own.
        yield GuardUpdate(self.scope, self.scope.guards[-1], pks, self.wide, at_home=True)
        if not self.wide:
            for narrow in self.isolates.values():
                yield GuardUpdate(narrow, narrow.guards[-1], frozenset(), False, at_home=False)


class GuardUpdate(NamedTuple):
    """What one guard must be told.

    :param at_home: it is also a guard of objects, not of lists alone.
    """

    scope: Scope
    guard: str
    pks: frozenset[str] | None
    wide: bool
    at_home: bool


class PlacedMarker(NamedTuple):
    """A marker of this transaction that is in a guard, or may be."""

    note: GuardUpdate
    server: CacheServer
    marker: Marker
    holds_objects: bool


class TransactionMarkers:
    """What one transaction wrote to cached models, and the markers of it.

    It is the ``transaction_writes`` of a connection: see
    :class:`sharded_orm.backends.write_hooks.observer.TransactionListener` for when it is called. Not thread-safe.
    """

    def __init__(self, cache: CacheClient, connection: MarkedConnection) -> None:
        self._cache = cache
        self._connection = connection
        # By type and place, then by the token of the key. None is the key of a whole table,
        # beside which others of a sharded type need not be told.
        self._touched: dict[tuple[CachedType, str], dict[str | None, Touched]] = {}
        self._told: list[PlacedMarker] = []
        # Servers that could not be told, and the transaction goes on all the same.
        self._missed: set[CacheServer] = set()
        self._sizes: dict[CacheServer, dict[str, int]] = {}
        # When all that was touched was last marked, monotonic; None: it is not.
        self._marked_at: float | None = None

    def touch(
        self,
        scope: Scope,
        pks: Iterable[str] | None,
        *,
        isolates: Iterable[Scope] = (),
        wide: bool = False,
    ) -> None:
        """Rows were, or will be, written.

        :param scope: their shard key; the whole table if that is unknown, and of a global type.
        :param pks: tokens of those whose objects may be in the cache; None for all.
        :param isolates: their isolate keys, before and after; ``scope`` may be one itself.
        :param wide: those are not all that may be concerned.
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
            touched = keys[None] = Touched(scope if key is None else Scope(type, place))
            touched.add(None, (), True)
            return
        if (found := keys.get(key)) is None:
            found = keys[key] = Touched(scope)
        found.add(pks, isolates, wide)

    def _all(self) -> Iterator[Touched]:
        for keys in self._touched.values():
            yield from keys.values()

    def _notes(self) -> Iterator[GuardUpdate]:
        for touched in self._all():
            yield from touched.notes()

    def _types(self) -> set[str]:
        return {type.name for type, _ in self._touched}

    def _forget(self) -> None:
        for touched in self._all():
            request_cache.forget(_home(touched.scope))

    @property
    def is_announced(self) -> bool:
        return bool(self._told)

    def announce(self) -> None:
        """Mark every guard in scope; no round trip if that was done just now.

        :raises CacheUnavailable: a cache server does not answer and the policy is to refuse, or
            marking takes longer than COMMIT_WITHIN. What was marked stays so until :meth:`over`.
        """
        within = self._cache.options.commit_within
        for _ in range(_MARKS):
            if self._marked_at is not None and time.monotonic() <= self._marked_at + within:
                return
            self._mark()
            if self._missed:
                return
        if self._marked_at is not None and time.monotonic() <= self._marked_at + within:
            return
        self._refuse(f"marking took longer than COMMIT_WITHIN ({within:g} s), {_MARKS} times")

    def _mark(self) -> None:
        started, now = time.monotonic(), time.time()
        writer = Writer(*self._connection.session_id())
        token = new_token()
        records: dict[CacheServer, Records] = {}
        for note in self._notes():
            marker = Marker(token, now, note.wide, writer, note.pks)
            line = opening(marker)
            for server, holds_objects in self._servers(note):
                records.setdefault(server, []).append((note.guard, line))
                # Before it is sent: it may arrive whatever becomes of this process.
                self._told.append(PlacedMarker(note, server, marker, holds_objects))
        first, ttl = header(now), self._cache.guard_ttl
        for server, lines in records.items():
            try:
                unfinished.flush(server)
                sizes = server.mark(lines, first, ttl)
            except ServerDown as exc:
                self._failed(server, exc)
                continue
            self._sizes[server] = {name: size for (name, _), size in zip(lines, sizes, strict=True)}
        self._marked_at = started

    def _servers(self, note: GuardUpdate) -> Iterator[tuple[CacheServer, bool]]:
        for holder in self._cache.holders(note.scope.place):
            if note.at_home or holder.lists:
                yield holder.server, holder.objects and note.at_home

    def _failed(self, server: CacheServer, exc: ServerDown) -> None:
        if self._cache.options.on_failure == "refuse":
            self._refuse(f"cache server {server.name} does not answer ({exc})", exc)
        self._missed.add(server)
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

        If a cache server does not answer, its part is queued and the database session is
        discarded: then readers see that the transaction is over.
        """
        told, self._told = self._told, []
        try:
            if told:
                self._finish(told)
        finally:
            # What was read in between is of before.
            self._forget()

    def _finish(self, told: list[PlacedMarker]) -> None:
        late = self._marked_at is None or (
            time.monotonic() > self._marked_at + self._cache.options.commit_within
        )
        work = self._ends(told, late=late)
        done: set[CacheServer] = set()
        try:
            for server, part in work.items():
                if self._close(part):
                    done.add(server)
        finally:
            left = [part for server, part in work.items() if server not in done]
            if left:
                for part in left:
                    unfinished.add(part)
                self._connection.discard_session()

    def _ends(self, told: list[PlacedMarker], *, late: bool) -> dict[CacheServer, Unfinished]:
        work: dict[CacheServer, Unfinished] = {}
        for note, server, marker, holds_objects in told:
            if (part := work.get(server)) is None:
                part = work[server] = Unfinished(server)
            if holds_objects and note.pks:
                part.objects.update(map(note.scope.object_name, note.pks))
            void = late or server in self._missed or marker.voids
            part.records.append((note.guard, closing(marker.token, void=void)))
        return work

    def _close(self, part: Unfinished) -> bool:
        server = part.server
        try:
            unfinished.flush(server)
            server.finish(list(part.objects), part.records)
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
        """Leave the markers open: only the database can tell, and readers will ask it."""
        told, self._told = self._told, []
        # Where there are no markers, there is nobody to ask.
        for part in self._ends(
            [one for one in told if one.server in self._missed], late=True
        ).values():
            unfinished.add(part)
        self._forget()


def _home(scope: Scope) -> str | None:
    """The guard under which the first level keeps rows of ``scope``; None: of several."""
    return scope.guards[scope.home] if scope.home < len(scope.guards) else None


class Unfinished:
    """What a cache server is still to be told: objects to delete, then lines of guards."""

    __slots__ = ("objects", "records", "server")

    def __init__(self, server: CacheServer) -> None:
        self.server = server
        self.objects: set[str] = set()
        self.records: Records = []


class Queue:
    """What cache servers could not be told, to be told before anything else.

    Of this process; thread-safe; bounded. What does not fit is dropped: its markers stay open,
    and readers repair them. A forked child begins with nothing: its parent has it.
    """

    MAXIMUM = 1000  # transactions per server
    _AT_ONCE = 50

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        #: Whether there is anything: readers look at this before each exchange.
        self.waiting = False
        # By name: when settings change, a server gets a new object.
        self._parts: dict[str, deque[Unfinished]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._parts.values()))

    def add(self, part: Unfinished) -> None:
        """Put in what is to be told to ``part.server``."""
        with self._lock:
            parts = self._parts.setdefault(part.server.name, deque(maxlen=self.MAXIMUM))
            if len(parts) == self.MAXIMUM:
                logger.warning("More than %d ends of writes wait for cache server %s; the oldest"
                               " is left to its readers.", self.MAXIMUM, part.server.name)  # fmt: skip
            parts.append(part)
            self.waiting = True

    def flush(self, server: CacheServer) -> None:
        """Tell ``server`` what waits for it; no round trip if nothing does.

        :raises ServerDown: it does not answer; what was not told waits on.
        """
        while self.waiting:
            with self._lock:
                parts = self._parts.get(server.name)
                if not parts:
                    self._parts.pop(server.name, None)
                    self.waiting = bool(self._parts)
                    return
                some = [parts.popleft() for _ in range(min(len(parts), self._AT_ONCE))]
            objects: dict[str, None] = {}
            records: Records = []
            for part in some:
                objects.update(dict.fromkeys(part.objects))
                records += part.records
            try:
                server.finish(list(objects), records)
            except BaseException:
                with self._lock:
                    self._parts.setdefault(server.name, deque(maxlen=self.MAXIMUM)).extendleft(
                        reversed(some)
                    )
                    self.waiting = True
                raise


#: What cache servers are still to be told by this process.
unfinished = Queue()
