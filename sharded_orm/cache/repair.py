"""What readers do for guards that were left behind: repair them, and compact them.

A marker whose writer was killed stays open, and all that it covers is read from the database.
A reader that meets an old one asks the database whether the writer's session is still there.
If not, its transaction is over, one way or the other, and the reader closes the marker as the
writer would have done.

One token may stand in several guards, of one or of two cache servers. Each is repaired by
whoever meets it there, in any order: an object is only valid under the guards of its own
server, and there the deletion goes before the closing, in one packet.
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
    parse,
)
from sharded_orm.cache.keys import Scope
from sharded_orm.cache.stores.base import CacheServer

#: Younger markers are left to their writers, seconds.
REPAIR_AFTER = 1.0
#: So often a process asks about one marker, and closes it in one guard, seconds.
_AGAIN_AFTER = 1.0
_REMEMBERED = 4096


class Sessions(Protocol):
    """The sessions of the database that holds a scope."""

    def judges(self, writer: Writer) -> bool:
        """Whether :meth:`gone` can tell about this writer: it names a session of the server
        that would be asked, and the account that asks sees it. True, too, while the server
        does not answer: then nobody is declared dead."""

    def gone(self, writers: Sequence[Writer]) -> set[Writer]:
        """Those whose session does not exist any more, so that what it began can neither
        commit nor run on. Empty if the database does not answer; it raises nothing."""


@dataclass(slots=True)
class _Known:
    """What this process knows of a marker; times are monotonic."""

    seen: float
    asked: float | None = None
    over: bool = False


class Repairer:
    """Finds and closes the markers of dead writers. Thread-safe; its memory is bounded.

    :param quarantine: age from which on a marker counts as dead whose writer cannot be judged,
        seconds. A writer marks again before a COMMIT that comes so late.
    """

    def __init__(
        self,
        quarantine: float,
        *,
        after: float = REPAIR_AFTER,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quarantine = quarantine
        self._after = after
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._closed: OrderedDict[tuple[str, str, str], float] = OrderedDict()

    def repair(
        self,
        server: CacheServer,
        scope: Scope,
        index: int,
        guard: Guard,
        sessions: Sessions,
        now: float,
    ) -> int:
        """Close the markers of ``guard`` whose writers are dead.

        Objects that they name are deleted wherever the home guard is repaired, on a server of
        lists, too: it may be that of the objects, and deleting what is not there costs nothing.

        :param index: which of ``scope.guards`` it is.
        :param now: seconds since 1970.
        :returns: the number of closed markers. The caller still reads the database: the guard
            that it holds is of before.
        :raises ServerDown: by the cache server.
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
                known = self._known.get(marker.token)
                if known is None:
                    known = self._known[marker.token] = _Known(tick)
                    if len(self._known) > _REMEMBERED:
                        self._known.popitem(last=False)
                if known.over:
                    dead.append(marker)
                    continue
                # A clock that is ahead must not make a marker immortal.
                age = max(now - marker.at, tick - known.seen)
                if age <= self._after:
                    continue
                if known.asked is None or tick - known.asked >= _AGAIN_AFTER:
                    known.asked = tick
                    due.append((marker, age))
        if not due:
            return dead
        judged = {marker.writer for marker, _ in due if sessions.judges(marker.writer)}
        gone = sessions.gone(list(judged)) if judged else set()
        over = [
            marker
            for marker, age in due
            if (marker.writer in gone if marker.writer in judged else age > self._quarantine)
        ]
        with self._lock:
            for marker in over:
                # It never comes back to life, so other guards of this marker need not ask.
                if (known := self._known.get(marker.token)) is not None:
                    known.over = True
        return dead + over

    def _unclosed(self, server: str, guard: str, dead: list[Marker]) -> list[Marker]:
        """Without those that this process has just closed in this guard."""
        tick = self._monotonic()
        left: list[Marker] = []
        with self._lock:
            for marker in dead:
                key = (server, guard, marker.token)
                at = self._closed.get(key)
                if at is not None and tick - at < _AGAIN_AFTER:
                    continue
                self._closed[key] = tick
                self._closed.move_to_end(key)
                if len(self._closed) > _REMEMBERED:
                    self._closed.popitem(last=False)
                left.append(marker)
        return left


def compact(server: CacheServer, name: str, raw: bytes, ttl: float) -> bool:
    """Put a shorter guard in the place of ``raw`` if that is worth it and nobody was faster.

    Markers and generation stay; lists of the scope are not found again, so it is best done
    where a write has just ended them anyway.

    :raises ServerDown: by the cache server. A guard that stays long does no harm.
    """
    try:
        guard = parse(raw)
    except BrokenGuard:
        return False  # readers replace it
    return guard.is_bulky and server.replace(name, raw, compacted(guard), ttl)


def compact_marked(server: CacheServer, sizes: Mapping[str, int], ttl: float) -> None:
    """The same after a write: ``sizes`` are those that :meth:`CacheServer.mark` gave for guards."""
    names = [name for name, size in sizes.items() if size > COMPACT_FROM]
    if not names:
        return
    for name, raw in zip(names, server.read(names)[0], strict=True):
        if raw is not None:
            compact(server, name, raw, ttl)
