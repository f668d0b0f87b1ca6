"""Timestamped ids that this process makes, for databases that cannot make them (I2)."""

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
    """The last id of one shard and table. ``used`` counts the ids of millisecond ``last``."""

    last: int
    used: int
    sequence: int
    # Guards the lane: (last, sequence) is handed out at most once. Held while a caller waits for
    # the clock; callers of other lanes do not wait.
    lock: threading.Lock = field(default_factory=threading.Lock)


# A caller waits for a clock that is at most so many milliseconds behind the last id.
_PATIENCE = 1000


class TimestampClock:
    """Makes ids of one layout; never the same id twice. Thread-safe, fork-safe.

    :param layout: the widths and the epoch.
    :param clock: returns the time in milliseconds since 1970.
    :param wait: sleeps for a number of seconds; called when a millisecond is used up.
    :param draw: returns a random number below its argument, at which a sequence begins.

    - A shard and table get at most ``2**sequence_bits`` ids of one millisecond; a caller that
      needs more waits for the next millisecond.
    - When the clock steps back, ids go on from the last millisecond. When that is used up and the
      clock is at most a second behind, callers wait for the clock. If it is further behind, ids
      take the following milliseconds, as fast as they are needed.
    - A child process repeats none of the ids that its parent made.

    Two processes (or a process that is restarted while the clock steps back) may make the same id
    for one table. That is rare, because sequences begin at random numbers, and the insert detects
    it: see ``TimestampedIDField``.
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
        # Guards the dict of lanes.
        self._lock = threading.Lock()
        _clocks.add(self)

    def take(self, shard: int, table: str, count: int = 1) -> list[int]:
        """``count`` new ids for ``table`` on ``shard``, in the order of time.

        :param table: a name that differs for any two tables of all groups.
        :raises TimestampExhausted: the time does not fit into the layout any more.
        :raises InvalidID: the shard does not fit, or the clock is before the epoch.
        """
        with self._lock:
            lane = self._lanes.get((shard, table))
            if lane is None:
                lane = _Lane(-1, self._size, self._draw(self._size))
                self._lanes[shard, table] = lane
        with lane.lock:
            return [self._next(lane, shard) for _ in range(count)]

    def leave(self, shard: int, table: str) -> None:
        """Leave the current millisecond, and begin the next at a random sequence number.

        For a process whose id was taken by another process: its next ids would collide as well.
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
            # The clock was set back, by hours perhaps: too long to wait.
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
        # The child has one thread; another thread of the parent may have held a lock.
        self._lock = threading.Lock()
        for lane in self._lanes.values():
            lane.lock = threading.Lock()
            # The parent may go on making ids of this millisecond.
            self._leave(lane)


_clocks: weakref.WeakSet[TimestampClock] = weakref.WeakSet()


def _renew_in_child() -> None:
    for clock in _clocks:
        clock._after_fork()


os.register_at_fork(after_in_child=_renew_in_child)


@cache
def clock_of(layout: TimestampedLayout) -> TimestampClock:
    """The clock of all tables with ids of ``layout`` in this process."""
    return TimestampClock(layout)
