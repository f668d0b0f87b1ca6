"""Timestamped ids that the Django process makes (Instagram's layout, I2).

For databases that cannot make such ids themselves.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from sharded_orm.exceptions import InvalidID
from sharded_orm.ids.layout import TimestampedLayout


def _now() -> int:
    return time.time_ns() // 1_000_000


@dataclass
class _Lane:
    """Records the ids that this process has made for one table on one shard.

    ``last`` is the time of the latest id, in milliseconds after the epoch, and ``sequence`` is its
    sequence number. ``used`` is the number of ids that were made for the time ``last``. If no more
    ids are to be made for this time, ``used`` is set to the largest possible number.
    """

    last: int
    used: int
    sequence: int
    # Held while an id is made, so that no pair (last, sequence) is used twice. A caller that waits
    # for the clock keeps the lock, but callers for other tables or shards have other locks.
    lock: threading.Lock = field(default_factory=threading.Lock)


# If the sequence numbers of a millisecond are used up, a caller waits for the next millisecond. But
# if the clock was set back by more than this number of milliseconds, the caller does not wait.
_PATIENCE = 1000


class TimestampClock:
    """A maker of timestamped ids of one layout. One maker never makes an id of a table twice.

    Thread-safe and fork-safe.

    :param layout: the widths of the parts of an id, and the epoch.
    :param clock: returns the Unix time in milliseconds.
    :param wait: sleeps for the given number of seconds; called when all sequence numbers of a
        millisecond are used up.
    :param draw: called with n, returns a random number from 0 to n - 1. The sequence numbers of
        each table on a shard begin at such a random number.

    - A table on a shard gets at most ``2**sequence_bits`` ids of one millisecond; a caller that
      needs more waits for the next millisecond.
    - If the clock is set back, new ids continue with the millisecond of the last id. If the
      sequence numbers of that millisecond are used up and the clock is at most a second behind,
      callers wait for the clock. If the clock is further behind, new ids use the following
      milliseconds, ahead of the clock and without waiting.
    - A forked child repeats none of the ids that its parent made before the fork.

    Two processes have two makers, and may make the same id for one table. So may one process that
    is restarted while the clock is set back. Such collisions are rare, because sequence numbers
    begin at random. The insert detects them: see ``TimestampedIDField``.
    """

    def __init__(
        self,
        layout: TimestampedLayout,
        *,
        clock: Callable[[], int] = _now,
        wait: Callable[[float], object] = time.sleep,
        draw: Callable[[int], int] = secrets.randbelow,
    ) -> None:
        self.layout = layout
        self._clock = clock
        self._wait = wait
        self._draw = draw
        self._size = 1 << layout.sequence_bits
        self._lanes: dict[tuple[int, str], _Lane] = {}
        # Held while the dict _lanes is used. Each lane (one table on one shard) has a lock of its
        # own, which is held while an id is made.
        self._lock = threading.Lock()
        _clocks.add(self)

    def take(self, shard: int, table: str, count: int = 1) -> list[int]:
        """Return ``count`` new ids for ``table`` on ``shard``, in the order of their time.

        :param table: a name that no other table of any group has.
        :raises TimestampExhausted: the current time is too late for the layout.
        :raises InvalidID: ``shard`` does not fit its bits, or the current time is before the epoch.
        """
        with self._lock:
            lane = self._lanes.get((shard, table))
            if lane is None:
                lane = _Lane(-1, self._size, self._draw(self._size))
                self._lanes[shard, table] = lane
        with lane.lock:
            return [self._next(lane, shard) for _ in range(count)]

    def leave(self, shard: int, table: str) -> None:
        """Make no more ids for ``table`` on ``shard`` in the millisecond of the last id.

        The next id has a later millisecond and a random sequence number. Call this after an id has
        collided with the id of another process, because the next ids of this millisecond would
        collide, too.
        """
        with self._lock:
            lane = self._lanes.get((shard, table))
        if lane is not None:
            with lane.lock:
                self._leave(lane)

    def _leave(self, lane: _Lane) -> None:
        lane.used = self._size
        lane.sequence = self._draw(self._size)

    def _next(self, lane: _Lane, shard: int) -> int:
        now = self._milliseconds()
        while lane.used >= self._size and 0 <= lane.last - now <= _PATIENCE:
            self._wait(0.0005)
            now = self._milliseconds()
        if now > lane.last:
            lane.last, lane.used = now, 0
        elif lane.used >= self._size:
            # The sequence numbers of this millisecond are used up, and the clock was set back by
            # more than _PATIENCE. It may be hours, which is too long to wait. So use the next
            # millisecond, although the clock has not reached it yet.
            lane.last, lane.used = lane.last + 1, 0
        lane.used += 1
        lane.sequence = (lane.sequence + 1) % self._size
        return self.layout.pack(lane.last, shard, lane.sequence)

    def _milliseconds(self) -> int:
        now = self._clock() - self.layout.epoch_milliseconds
        if now < 0:
            raise InvalidID(
                f"The clock is {-now} ms before the epoch {self.layout.epoch.isoformat()}: set the"
                " clock, or choose an epoch that has passed."
            )
        return now

    def _after_fork(self) -> None:
        # Replace all locks: another thread of the parent may have held one at the fork. The child
        # has only one thread now, which holds no lock.
        self._lock = threading.Lock()
        for lane in self._lanes.values():
            lane.lock = threading.Lock()
            # Leave the millisecond of the last id, because the parent may make more ids in it.
            self._leave(lane)


_clocks: weakref.WeakSet[TimestampClock] = weakref.WeakSet()


def _renew_in_child() -> None:
    for clock in _clocks:
        clock._after_fork()


os.register_at_fork(after_in_child=_renew_in_child)


@cache
def clock_of(layout: TimestampedLayout) -> TimestampClock:
    """Return the :class:`TimestampClock` with which this process makes ids of ``layout``.

    All tables with ids of this layout share the clock.
    """
    return TimestampClock(layout)
