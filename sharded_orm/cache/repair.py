"""Creates missing guards, closes the markers of dead writers in guards, and compacts guards that
have grown.

A *guard* is the cache entry that says whether the entries of a scope (a set of rows) are valid. An
open *marker* in a guard says that a write to these rows is under way.

If a writer is killed, its marker stays open, and readers bypass the cache for its rows. So a reader
that finds an old marker asks the database whether the writer's session still exists. If the session
has ended, the transaction is over. Then the reader closes the marker instead of the writer.

A transaction may leave markers in several guards on several cache servers. Readers repair each
guard separately, in any order, because a guard is only about objects on its own server. A repair
sends one packet, which first deletes the objects of the marker's rows, and then closes the marker.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sharded_orm.cache.guards import (
    COMPACT_FROM,
    BrokenGuard,
    Guard,
    Marker,
    Writer,
    closing,
    compacted,
    header,
    parse,
)
from sharded_orm.cache.keys import Scope
from sharded_orm.cache.stores.base import CacheServer, ServerDown

#: For this many seconds after a write was announced (by a marker in a guard), readers assume that
#: the writer is alive and will close the marker itself.
REPAIR_AFTER = 1.0
#: A process asks the database at most once in this many seconds whether the writer of a marker (the
#: announcement of a write) is alive. It also closes the same marker in the same guard at most once
#: in this many seconds.
_AGAIN_AFTER = 1.0
_REMEMBERED = 4096
# One packet creates at most this many guards (entries that say whether other entries are valid).
# The answers to a larger packet might not fit into the network buffers. Then client and server
# could block each other.
_MOST_ADDED = 256


class Sessions(Protocol):
    """Asks a database which writers are dead, for readers of the cache.

    A writer is a transaction that has announced a write to the cache. It is dead if its database
    session has ended.
    """

    def judges(self, writer: Writer) -> bool:
        """Whether the database can say if the session of ``writer`` has ended.

        False if the session is on another server, or if the account of the connection is not
        allowed to see the session. If the database does not answer, the result is True, and
        :meth:`gone` does not return the writer.
        """

    def gone(self, writers: Sequence[Writer]) -> set[Writer]:
        """Return those of ``writers`` whose sessions have ended, so that their transactions can no
        longer commit.

        Return an empty set if the database does not answer. Raise nothing.
        """


@dataclass(slots=True)
class _MarkerState:
    """What this process knows about a marker (announcement of a write) and its writer.

    The times are those of the monotonic clock.

    :param seen_at: when a reader of this process first found the marker.
    :param asked_at: when the database was last asked about the writer; None (the default) if it was
        not asked yet.
    :param is_dead: whether the writer is known to be dead (default: no).
    """

    seen_at: float
    asked_at: float | None = None
    is_dead: bool = False


class Repairer:
    """Finds markers (announcements of writes) whose writers are dead, and closes them. Thread-safe,
    with bounded memory.

    :param quarantine: seconds after which an open marker is closed if the database cannot say
        whether the writer is alive. This is safe, because a living writer does not begin a COMMIT
        with a marker of that age: it first opens new markers.
    :param monotonic: returns the time of a monotonic clock in seconds.
    """

    def __init__(
        self,
        quarantine: float,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quarantine = quarantine
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._states: OrderedDict[str, _MarkerState] = OrderedDict()
        self._closed_at: OrderedDict[tuple[str, str, str], float] = OrderedDict()

    def repair(
        self,
        server: CacheServer,
        scope: Scope,
        index: int,
        guard: Guard,
        sessions: Sessions,
        now: float,
    ) -> int:
        """Close those markers (announcements of writes) in ``guard`` whose writers are dead.

        If ``guard`` is the one that says whether objects (cached rows) are valid, first delete the
        objects that the markers of the dead writers name. This is done even on a server that has
        only lists, because deleting a missing entry costs nothing.

        :param server: the cache server from which ``guard`` was read.
        :param index: the position of the guard in ``scope.guards``.
        :param guard: the guard as it was read. This object does not change when its markers are
            closed on the server.
        :param sessions: asks a database which writers are dead. It must be the database with the
            rows of the scope.
        :param now: the time in seconds since 1970.
        :returns: the number of closed markers.
        :raises ServerDown: the cache server does not answer.
        """
        if not guard.open:
            return 0
        name = scope.guards[index]
        dead = self._unclosed(server.name, name, self._dead(guard, sessions, now))
        if not dead:
            return 0
        objects = {}
        if index == scope.home:
            for marker in dead:
                objects.update(dict.fromkeys(map(scope.object_name, sorted(marker.pks or ()))))
        server.finish(
            list(objects),
            [(name, closing(marker.token, void=marker.voids)) for marker in dead],
        )
        return len(dead)

    def _dead(self, guard: Guard, sessions: Sessions, now: float) -> list[Marker]:
        tick = self._monotonic()
        dead: list[Marker] = []
        due: list[tuple[Marker, float]] = []
        with self._lock:
            for marker in guard.open:
                state = self._states.get(marker.token)
                if state is None:
                    state = self._states[marker.token] = _MarkerState(tick)
                    if len(self._states) > _REMEMBERED:
                        self._states.popitem(last=False)
                if state.is_dead:
                    dead.append(marker)
                    continue
                # If the writer's clock is ahead of this one, now - marker.at is too small, or even
                # negative. So also take the time since this process first saw the marker.
                age = max(now - marker.at, tick - state.seen_at)
                if age <= REPAIR_AFTER:
                    continue
                if state.asked_at is None or tick - state.asked_at >= _AGAIN_AFTER:
                    state.asked_at = tick
                    due.append((marker, age))
        if not due:
            return dead
        judged = {marker.writer for marker, _ in due if sessions.judges(marker.writer)}
        gone = sessions.gone(list(judged)) if judged else set()
        new_dead = [
            marker
            for marker, age in due
            if (marker.writer in gone if marker.writer in judged else age > self._quarantine)
        ]
        with self._lock:
            for marker in new_dead:
                # Remember that the writer is dead, so that its markers in other guards need no
                # further query.
                if (state := self._states.get(marker.token)) is not None:
                    state.is_dead = True
        return dead + new_dead

    def _unclosed(self, server: str, guard: str, dead: list[Marker]) -> list[Marker]:
        """Return those of ``dead`` that this process has not closed in the last second.

        Also record that this process closes them now, because the caller does so after this call.

        :param server: the name of the cache server that has the guard.
        :param guard: the name of the guard that has the markers.
        :param dead: markers (announcements of writes) of dead writers.
        """
        tick = self._monotonic()
        unclosed: list[Marker] = []
        with self._lock:
            for marker in dead:
                key = (server, guard, marker.token)
                closed_at = self._closed_at.get(key)
                if closed_at is not None and tick - closed_at < _AGAIN_AFTER:
                    continue
                self._closed_at[key] = tick
                self._closed_at.move_to_end(key)
                if len(self._closed_at) > _REMEMBERED:
                    self._closed_at.popitem(last=False)
                unclosed.append(marker)
        return unclosed


def compact(server: CacheServer, name: str, raw: bytes, ttl: float) -> bool:
    """Replace a guard by a shorter one, if this saves enough bytes.

    If somebody has changed the guard since the caller has read it, it is not replaced.

    The shorter guard keeps the markers (announcements) of unfinished writes. It also keeps the
    generation, so cached objects stay valid. But cached lists become void. So call this function
    right after a write, because the write has made the lists void anyway.

    :param name: the name of the guard.
    :param raw: the bytes of the guard as they were read.
    :param ttl: seconds that the new guard lives.
    :returns: whether the guard was replaced.
    :raises ServerDown: the cache server does not answer. The guard then stays long, without harm.
    """
    try:
        guard = parse(raw)
    except BrokenGuard:
        # Leave the broken guard: the next reader replaces it.
        return False
    return guard.is_bulky and server.replace(name, raw, compacted(guard), ttl)


def compact_marked(server: CacheServer, sizes: Mapping[str, int], ttl: float) -> None:
    """Replace guards that are larger than COMPACT_FROM bytes by shorter ones, as :func:`compact`.

    A guard is an entry that says whether other entries are valid. Called after a transaction has
    announced its writes in these guards, because each announcement makes them longer.

    :param sizes: maps the name of each guard to its size in bytes, as :meth:`CacheServer.mark` has
        returned it.
    :raises ServerDown: the cache server does not answer.
    """
    names = [name for name, size in sizes.items() if size > COMPACT_FROM]
    if not names:
        return
    for name, raw in zip(names, server.read(names)[0], strict=True):
        if raw is not None:
            compact(server, name, raw, ttl)


def make_guards(
    server: CacheServer,
    found: Mapping[str, bytes | None],
    ttl: float,
    now: Callable[[], float],
) -> None:
    """Create the missing guards in ``found``, and replace the broken ones.

    A guard is an entry that says whether other entries are valid.

    Costs a round trip for up to 256 missing guards, and up to two for each broken guard. Does not
    raise an error if the cache server is down: a later reader will create the guards.

    :param found: maps the name of each guard to its bytes as they were read; None for a missing
        guard.
    :param ttl: seconds that the guards live from now on.
    :param now: returns the time in seconds since 1970.
    """
    try:
        for name, raw in found.items():
            if raw is not None:
                try:
                    parse(raw)
                except BrokenGuard:
                    server.replace(name, raw, header(now()), ttl)
        missing = [name for name, raw in found.items() if raw is None]
        for start in range(0, len(missing), _MOST_ADDED):
            part = missing[start : start + _MOST_ADDED]
            server.add([(name, header(now())) for name in part], ttl)
    except ServerDown:
        pass
