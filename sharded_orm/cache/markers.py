"""The markers with which a transaction announces its writes to the cache.

A transaction opens its markers before COMMIT, and closes them afterwards.

Each *scope* (a set of rows, such as those of one shard key) has a *guard*, a cache entry that says
whether the other entries of the scope are valid. An open *marker* in a guard says that a write to
these rows is under way.

Opening the markers costs one round trip per transaction and cache server, however many rows were
written. Closing them costs one packet, whose answer is not waited for. If a server does not answer
when a marker must be opened, the setting ``ON_CACHE_FAILURE`` decides whether the transaction is
rolled back or goes on without the marker. If a server does not confirm that it has closed a marker,
the process queues the closing. Until then, readers bypass the cache for the written rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple, NoReturn, Protocol

from sharded_orm.cache import request_cache
from sharded_orm.cache.client import CacheClient
from sharded_orm.cache.closings import Closing, Records, closing_queue
from sharded_orm.cache.failure_log import failure_log
from sharded_orm.cache.guards import (
    COMPACT_FROM,
    MAX_LISTED,
    Marker,
    Writer,
    closing,
    header,
    new_token,
    opening,
)
from sharded_orm.cache.keys import Scope
from sharded_orm.cache.repair import compact_marked
from sharded_orm.cache.stores.base import CacheServer, ServerDown
from sharded_orm.exceptions import CacheUnavailable

logger = logging.getLogger("sharded_orm.cache")

#: How often a transaction tries to announce its writes to all cache servers. An attempt fails if it
#: takes longer than COMMIT_WITHIN seconds. If the last one fails, too, the transaction is rolled
#: back.
_ATTEMPTS = 3


class MarkedConnection(Protocol):
    """What :class:`TransactionMarkers` uses of a database connection."""

    alias: str

    def session_id(self) -> tuple[str, str, int]: ...
    def discard_session(self) -> None: ...


class TouchedRows:
    """The rows that a transaction has written under one shard key, or in one table.

    :param scope: the set of rows of this shard key or table.
    """

    __slots__ = ("isolates", "pks", "scope", "wide")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        #: Tokens (the form in names of entries) of the primary keys of the changed and deleted
        #: rows. None stands for all rows of the scope. New rows are left out, because they cannot
        #: be cached yet.
        self.pks: set[str] | None = set()
        #: The isolate keys that the rows had before or after the writes. Maps the token of each
        #: isolate key (a value of the field that divides the rows of a shard key) to its scope.
        self.isolates: dict[str, Scope] = {}
        #: Whether the write may concern every isolate key, because ``isolates`` is not complete or
        #: has more than MAX_LISTED items.
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

    def updates(self) -> list[GuardUpdate]:
        """Return a :class:`GuardUpdate` for each guard (the entry that says whether others are
        valid) in which the writes must be announced.
        """
        pks = None if self.pks is None else frozenset(self.pks)
        # The last of scope.guards is the scope's own guard. Those before it are the guards of wider
        # sets of rows, such as the table. They need no marker.
        updates = [GuardUpdate(self.scope, self.scope.guards[-1], pks, self.wide, True)]
        if not self.wide:
            for scope in self.isolates.values():
                updates.append(GuardUpdate(scope, scope.guards[-1], frozenset(), False, False))
        return updates


class GuardUpdate(NamedTuple):
    """A marker (the announcement of a write), and the guard to which it must be added.

    :param scope: the set of rows of the guard.
    :param guard: the name of the guard.
    :param pks: tokens (the form in names of entries) of the primary keys of those written rows that
        may be cached as objects; None for all rows of the scope.
    :param wide: whether the write may concern every isolate key in the scope.
    :param at_home: True for the guard of a shard key or table, on which objects and lists depend.
        False for the guard of an isolate key, on which only lists depend.
    """

    scope: Scope
    guard: str
    pks: frozenset[str] | None
    wide: bool
    at_home: bool


class PlacedMarker(NamedTuple):
    """A marker (announcement of a write) that was sent to a cache server. It is in the guard there,
    unless it was lost on the way.

    :param update: the guard that gets the marker, and what the marker says.
    :param server: the cache server that has the guard.
    :param holds_objects: whether the server may also have the objects of the written rows.
    """

    update: GuardUpdate
    server: CacheServer
    marker: Marker
    holds_objects: bool


class TransactionMarkers:
    """The rows of cached models that one transaction has written, and the markers that announce
    these writes to the cache.

    It is ``transaction_writes`` of the transaction's connection object, which calls the methods of
    :class:`~sharded_orm.backends.write_hooks.observer.TransactionListener`. Not thread-safe.
    """

    def __init__(self, cache: CacheClient, connection: MarkedConnection) -> None:
        self._cache = cache
        self._connection = connection
        # The written rows. Maps a pair (name of the cached model, place) to a dict. This inner dict
        # maps the token of each shard key to the written rows of the key, or None to the rows of
        # the whole table.
        self._touched: dict[tuple[str, str], dict[str | None, TouchedRows]] = {}
        self._placed: list[PlacedMarker] = []
        # The cache servers that could not be told of the writes, while ON_CACHE_FAILURE lets the
        # transaction go on without them.
        self._unmarked: set[CacheServer] = set()
        # Maps a server to the sizes in bytes of the guards in which writes were announced, by guard
        # name. Has only servers on which at least one guard may have to be compacted.
        self._long: dict[CacheServer, dict[str, int]] = {}
        # The monotonic time at which this transaction last began to send its markers. None if it
        # has sent none, or has written further rows since.
        self._marked_at: float | None = None

    def touch(
        self,
        scope: Scope,
        pks: Iterable[str] | None,
        *,
        isolates: Iterable[Scope] = (),
        wide: bool = False,
    ) -> None:
        """Note rows that the transaction has written or is about to write. Costs no round trip.

        :param scope: the set of rows of their shard key or isolate key. The whole table, if the
            shard key is not known or the model is global.
        :param pks: tokens (the form in names of entries) of the primary keys of those rows that may
            be cached as objects; None for all rows of the scope.
        :param isolates: the scopes of the isolate keys that the rows have before and after the
            write (default: none). ``scope`` is added to them if it is that of an isolate key.
        :param wide: whether the write may also concern isolate keys that are not in ``isolates``
            (default: no).
        """
        self._marked_at = None
        type, place, key = scope.type, scope.place, scope.key
        if scope.isolate is not None:
            isolates = (*isolates, scope)
            scope = Scope(type, place, key)
        request_cache.forget(_home(scope))
        keys = self._touched.setdefault((type.name, place), {})
        if type.sharded and None in keys:
            return
        if type.sharded and (key is None or (key not in keys and len(keys) >= MAX_LISTED)):
            keys.clear()
            rows = keys[None] = TouchedRows(scope if key is None else Scope(type, place))
            rows.add(None, (), True)
            return
        if (touched := keys.get(key)) is None:
            touched = keys[key] = TouchedRows(scope)
        touched.add(pks, isolates, wide)

    def _all(self) -> list[TouchedRows]:
        return [rows for keys in self._touched.values() for rows in keys.values()]

    def _types(self) -> set[str]:
        return {name for name, _ in self._touched}

    def _forget(self) -> None:
        for rows in self._all():
            request_cache.forget(_home(rows.scope))

    @property
    def is_announced(self) -> bool:
        """Whether markers (announcements of writes) of this transaction were sent, so that they may
        be on a cache server.
        """
        return bool(self._placed)

    def announce(self) -> None:
        """Announce the writes to the cache: open a marker in the guard of each scope (set of rows)
        to which the transaction wrote.

        Called before COMMIT, and before a statement that may commit implicitly. Costs one round
        trip per cache server. If this takes longer than COMMIT_WITHIN seconds, it is repeated, up
        to _ATTEMPTS times in all. Sends nothing if all guards got their markers less than
        COMMIT_WITHIN seconds ago, and nothing was written since.

        :raises CacheUnavailable: a cache server does not answer, and ``ON_CACHE_FAILURE`` is
            "refuse". Or every attempt took longer than COMMIT_WITHIN seconds. Markers that were
            opened stay open until :meth:`over`.
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

    def announce_within(self, seconds: float) -> bool:
        """Announce a write in autocommit, before its statement is sent. Return whether the
        announcement took less than ``seconds``.

        If it took longer, do not send the statement, because the database might commit it after
        COMMIT_WITHIN seconds, when readers no longer trust the markers. Makes one attempt, which
        costs one round trip per cache server.

        :raises CacheUnavailable: as :meth:`announce`.
        """
        self._mark()
        return self._marked_at is not None and time.monotonic() <= self._marked_at + seconds

    def _mark(self) -> None:
        started, now = time.monotonic(), time.time()
        writer = Writer(*self._connection.session_id())
        token = new_token()
        records: dict[CacheServer, Records] = {}
        for rows in self._all():
            for update in rows.updates():
                marker = Marker(token, now, update.wide, writer, update.pks)
                line = opening(marker)
                for server, objects, lists in self._cache.holders(update.scope.place):
                    if not (update.at_home or lists):
                        continue
                    records.setdefault(server, []).append((update.guard, line))
                    # Note the marker before it is sent. Even if sending fails, the server may have
                    # received it, and then it must be closed.
                    holds_objects = objects and update.at_home
                    self._placed.append(PlacedMarker(update, server, marker, holds_objects))
        first_line, ttl = header(now), self._cache.guard_ttl
        for server, lines in records.items():
            try:
                closing_queue.flush(server)
                sizes = server.mark(lines, first_line, ttl)
            except ServerDown as exc:
                self._failed(server, exc)
                continue
            self._long.pop(server, None)
            if max(sizes) > COMPACT_FROM:
                names = [name for name, _ in lines]
                self._long[server] = dict(zip(names, sizes, strict=True))
        self._marked_at = started

    def _failed(self, server: CacheServer, exc: ServerDown) -> None:
        if self._cache.options.on_failure == "refuse":
            self._refuse(f"cache server {server.name} does not answer ({exc})", exc)
        self._unmarked.add(server)
        for name in self._types():
            self._cache.statistics.add(name, proceeded=1)
        failure_log.warn(
            server,
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
        """Delete the objects of the written rows from the cache, then close the markers.

        Called after the end of the transaction. Sends one packet to each cache server, usually
        without waiting for the answer. If a server does not confirm the packet, its closing is
        queued. The method waits for the answer if no connection to the server is idle, if a guard
        is long, or if readers may have stored old rows before. They may have done so if COMMIT came
        late, or if the server could not be told of the writes in time.

        If a server cannot be reached, the database session is closed, too. A reader that finds an
        open marker looks for the session of its writer. If the session is gone, the reader knows
        that the transaction is over.
        """
        markers, self._placed = self._placed, []
        try:
            if markers:
                self._finish(markers)
        finally:
            # Drop the rows from the per-request cache, too. Between the write and COMMIT, a reader
            # may have put the old rows there.
            self._forget()

    def _finish(self, markers: list[PlacedMarker]) -> None:
        late = self._marked_at is None or (
            time.monotonic() > self._marked_at + self._cache.options.commit_within
        )
        closings = self._closings(markers, late=late)
        done: list[CacheServer] = []
        try:
            for server, server_closing in closings.items():
                # If COMMIT came late, readers may have closed the markers before it, and stored old
                # rows. So wait until the server has made these rows void.
                if self._close(server_closing, wait=late or server in self._unmarked):
                    done.append(server)
        finally:
            if len(done) < len(closings):
                for server, server_closing in closings.items():
                    if server not in done:
                        closing_queue.add(server_closing)
                self._connection.discard_session()

    def _closings(self, markers: list[PlacedMarker], *, late: bool) -> dict[CacheServer, Closing]:
        """Return what each server must do to close ``markers``, the announcements of writes: maps
        the server to its :class:`Closing`.

        :param late: whether COMMIT may have come more than COMMIT_WITHIN seconds after the markers
            were opened. Closing them then also makes all earlier entries void.
        """
        closings: dict[CacheServer, Closing] = {}
        for update, server, marker, holds_objects in markers:
            if (server_closing := closings.get(server)) is None:
                server_closing = closings[server] = Closing(server)
            if holds_objects and update.pks:
                server_closing.objects.update(map(update.scope.object_name, update.pks))
            void = late or server in self._unmarked or marker.voids
            server_closing.records.append((update.guard, closing(marker.token, void=void)))
        return closings

    def _close(self, server_closing: Closing, *, wait: bool) -> bool:
        """Close the transaction's markers (announcements of writes) on one cache server. Errors are
        logged and not raised.

        :param wait: whether to wait for the answer. Necessary if a reader may have closed the
            markers before, and stored old rows.
        :returns: whether the markers are closed, as far as is known.
        """
        server = server_closing.server
        sizes = self._long.get(server)
        try:
            closing_queue.flush(server)
            # Do not wait for the answer, unless ``wait`` is True. This is safe, because readers
            # query the database as long as the markers are open. If the server does not confirm
            # later, the closing is queued. compact_marked() below may come before the server has
            # closed the markers, but it keeps open markers.
            lost = None if wait else partial(closing_queue.add, server_closing)
            server.finish(list(server_closing.objects), server_closing.records, lost)
        except ServerDown as exc:
            failure_log.warn(
                server,
                "Cache server %s does not answer (%s) after the end of a transaction on %r: what"
                " it wrote is not cached until the server is told.",
                server.name, exc, self._connection.alias,
            )  # fmt: skip
            return False
        except Exception:
            # Only log the error. The transaction is committed, and an error would look as if it
            # were not.
            logger.exception("closing markers on %s", server.name)
            return False
        try:
            if sizes:
                compact_marked(server, sizes, self._cache.guard_ttl)
        except ServerDown:
            logger.debug("compacting guards on %s", server.name, exc_info=True)
        return True

    def lost(self) -> None:
        """Leave the markers open: nobody knows whether the transaction will be committed.

        Called if the connection was lost. Readers that find the open markers ask the database
        whether the transaction is over.
        """
        markers, self._placed = self._placed, []
        # Some servers never got the markers, so nothing warns the readers there. Queue the deletion
        # of the written rows until these servers answer.
        unmarked = [marker for marker in markers if marker.server in self._unmarked]
        for server_closing in self._closings(unmarked, late=True).values():
            closing_queue.add(server_closing)
        self._forget()


def _home(scope: Scope) -> str | None:
    """Return the name under which the per-request cache keeps the rows of ``scope``: the name of
    the guard of their shard key or global table.

    Return None if ``scope`` is a whole table on a shard, because its rows are kept under several
    names.
    """
    return scope.guards[scope.home] if scope.home < len(scope.guards) else None
