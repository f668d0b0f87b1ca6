"""Guards are repaired after a writer died, and compacted when they are long.

The marker of a killed writer stays open, and rows that it covers are read from the database. A
reader that finds an old marker asks the database whether the writer's session still exists. If
not, its transaction was committed or rolled back, and the reader closes the marker as the writer
would have done.

The marker of one transaction may stand in several guards, on one or two cache servers. Each is
repaired by the reader that finds it there, in any order: an object is only valid under the
guards of its own server, and there the deletion precedes the closing in one packet.
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

#: Seconds for which a marker is left to its writer.
REPAIR_AFTER = 1.0
#: Seconds until a process asks about the same marker, or closes it in the same guard, again.
_AGAIN_AFTER = 1.0
_REMEMBERED = 4096


class Sessions(Protocol):
    """The sessions of the database that holds a scope."""

    def judges(self, writer: Writer) -> bool:
        """Whether :meth:`gone` can judge this writer.

        It can if the writer has a session on the server that is asked, and the account that asks
        can see it. Also True while the server does not answer: then no writer is declared dead.
        """

    def gone(self, writers: Sequence[Writer]) -> set[Writer]:
        """The writers whose session has ended, so that its transaction can no longer commit.

        Empty if the database does not answer. Raises nothing.
        """


@dataclass(slots=True)
class _MarkerState:
    """The knowledge of this process about a marker; times are monotonic."""

    seen_at: float
    asked_at: float | None = None
    is_dead: bool = False


class Repairer:
    """Finds and closes the markers of dead writers. Thread-safe; its memory is bounded.

    :param quarantine: age in seconds from which a marker counts as dead if its writer cannot be
        judged. A writer marks again before such a late COMMIT.
    :param after: age in seconds until which a marker is left to its writer.
    :param monotonic: a clock.
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
        """Close the markers of ``guard`` whose writers are dead, and delete their objects.

        Objects are deleted on a server of lists, too: it may also hold the objects, and to
        delete a missing entry costs nothing.

        :param index: the position of the guard in ``scope.guards``.
        :param now: seconds since 1970.
        :returns: the number of closed markers. The caller must still read the database, as its
            copy of the guard is older.
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
                # A writer's clock that is ahead must not make its marker immortal.
                age = max(now - marker.at, tick - state.seen_at)
                if age <= self._after:
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
                # For this marker in other guards, nobody needs to ask again.
                if (state := self._states.get(marker.token)) is not None:
                    state.is_dead = True
        return dead + new_dead

    def _unclosed(self, server: str, guard: str, dead: list[Marker]) -> list[Marker]:
        """The dead markers without those that this process has just closed in this guard."""
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
    """Replace the guard ``raw`` by a shorter one, if that is worth it and it was not changed.

    Open markers and the generation stay. Lists of the scope become void, so the best moment is
    right after a write, which voids them anyway.

    :returns: whether the guard was replaced.
    :raises ServerDown: the cache server does not answer. A long guard does no harm.
    """
    try:
        guard = parse(raw)
    except BrokenGuard:
        return False  # readers will replace it
    return guard.is_bulky and server.replace(name, raw, compacted(guard), ttl)


def compact_marked(server: CacheServer, sizes: Mapping[str, int], ttl: float) -> None:
    """Compact the guards of a write. ``sizes`` are those that :meth:`CacheServer.mark` returned."""
    names = [name for name, size in sizes.items() if size > COMPACT_FROM]
    if not names:
        return
    for name, raw in zip(names, server.read(names)[0], strict=True):
        if raw is not None:
            compact(server, name, raw, ttl)
