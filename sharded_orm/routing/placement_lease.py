"""The lease under which a process remembers the shards of keys (docs/decisions/0028-key-moves.md).

The placement of a key is the shard that has its rows. Before a key moves to another shard, every
process must stop using the placement that it remembers, even a process that cannot be reached. So a
process remembers placements only under a lease, which is valid for a short time. To renew the
lease, the process queries which keys are *in flight*: their move was announced and has not ended.
After its announcement, a move waits for longer than a lease is valid. Then each process knows of
the move, or has no lease.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol
from weakref import WeakSet

# The maximum number of keys that a process remembers as having been in flight (moving to another
# shard). If there are more, the process forgets the shards of all keys once.
_MOST_SEEN = 10_000
#: The id of a clock that also counts the time while the machine is suspended; None if the system
#: has no such clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


def now() -> float:
    """Return the time of a clock that never goes back, in seconds.

    On Linux, the clock also runs while the machine is suspended.
    """
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


class KeyInFlight(NamedTuple):
    """A key that is moving to another shard."""

    group: str
    #: The text under which the directory, the table with the shard of each key, stores the key.
    key: str
    #: The key itself, as text. It can differ from ``key``, because the directory stores some keys
    #: as a digest.
    value: str
    #: The number of the move. The next two fields are shard numbers: the key moves from the shard
    #: ``source`` to the shard ``target``.
    number: int
    source: int
    target: int
    phase: str


class MoveList(NamedTuple):
    """A list of moves of keys, as recorded in the directory."""

    in_flight: tuple[KeyInFlight, ...]
    #: The number of the move that was announced last; 0 if there was none.
    last: int
    #: Moves that have ended: those that the argument ``since`` of :meth:`MoveStore.moves` has
    #: selected.
    ended: tuple[KeyInFlight, ...] = ()


class MoveStore(Protocol):
    """A store that knows which keys are in flight: moving to another shard."""

    def moves(self, since: int | None = None) -> MoveList | None:
        """Return which keys are in flight: their move was announced and has not ended.

        Sends one query, which is not logged. Return None inside Django's ``TestCase``, whose
        transaction hides what other processes do.

        :param since: the number of a move. The result then also has all later moves that have
            ended. By default (None), it has only the latest move, if that has ended.
        """


@dataclass(frozen=True)
class Poll:
    """The result of one query for the keys in flight (keys that are moving). Immutable.

    While the lease of a poll is valid, the process may remember the shards of keys. ``since`` is
    the number of the first poll in an unbroken series. In such a series, each poll was received
    before the lease of the previous poll ended. A move takes longer than a lease, so it cannot
    begin and end between two polls: the series has seen every move.
    """

    number: int
    since: int
    #: ``renew_at``: the time from which the process renews the lease (its right to remember the
    #: shards of keys). ``valid_until``: the time at which the lease ends.
    renew_at: float
    valid_until: float
    moves: MoveList
    #: For each key that was in flight (moving) during the series of polls: the number of the last
    #: poll that reported it. The keys of the dict are pairs of group and key.
    seen: Mapping[tuple[str, str], int] = field(repr=False)

    @cached_property
    def _seen_in_groups(self) -> Mapping[str, int]:
        latest: dict[str, int] = {}
        for (group, _), number in self.seen.items():
            latest[group] = max(number, latest.get(group, 0))
        return latest

    def is_quiet(self, group: str, number: int) -> bool:
        """Whether no key of ``group`` was moving from poll ``number`` to this poll.

        A poll is a query for the keys that are moving.

        Correct only while the lease of this poll is valid.
        """
        return number >= self.since and self._seen_in_groups.get(group, 0) < number

    def covers(self, group: str, key: str, number: int) -> bool:
        """Whether the shard of ``key``, looked up after poll ``number``, is still correct.

        False for a key in flight (a key that is moving). The result is reliable only while the
        lease of this poll is valid.
        """
        return number >= self.since and self.seen.get((group, key), 0) < number


class PlacementLease:
    """The right of this process to remember placements (shards of keys) for some seconds.

    Thread-safe.

    The first operation after half of a lease's time renews the lease, with one query. There is no
    background thread. If the directory does not answer, the process continues until the lease ends.
    After that, each look-up raises the error of the directory.

    :param store: the object that knows which keys are in flight.
    :param seconds: how long a lease is valid, counted from the time at which the query is sent.
    """

    _instances: WeakSet[PlacementLease] = WeakSet()

    def __init__(self, store: MoveStore, seconds: float) -> None:
        self._store = store
        self.seconds = seconds
        self._poll: Poll | None = None
        #: Whether the lease is not needed now: its last query was sent inside Django's
        #: ``TestCase``, where no key moves.
        self.is_suspended = False
        # The lock is reentrant. The thread that holds the lock may open the connection of the
        # directory. A receiver of connection_created may then use sharded models, which take the
        # lock again.
        self._lock = threading.RLock()
        self._instances.add(self)

    def current(self) -> Poll | None:
        """Return the poll of a lease that is valid now. If half of its time is over, renew the
        lease.

        The poll is the result of the last query for the keys in flight (keys that are moving).
        Return None if the process must not remember the shards of keys: inside Django's
        ``TestCase``, or if the query took longer than a lease is valid.

        :raises django.db.Error: the lease has ended, and the directory does not answer.
        """
        poll = self._poll
        return poll if poll is not None and now() < poll.renew_at else self._renew()

    def valid(self) -> Poll | None:
        """Return the poll (the latest list of moving keys) while its lease is valid, else None.

        Sends nothing.
        """
        poll = self._poll
        return poll if poll is not None and now() < poll.valid_until else None

    def renew(self) -> Poll | None:
        """Query which keys are in flight (moving) now, and return the result as a poll.

        Return None in the same cases as :meth:`current`.
        """
        with self._lock:
            return self._ask()

    def _renew(self) -> Poll | None:
        poll = self.valid()
        # While one thread sends the query that renews the lease, the others continue if the lease
        # is still valid. Otherwise they wait for the lock.
        if not self._lock.acquire(blocking=poll is None):
            return poll
        try:
            known = self.valid()
            if known is not None and now() < known.renew_at:
                return known  # Another thread has renewed the lease meanwhile, so send no query.
            try:
                return self._ask()
            # The query failed. Continue without an error while the lease is valid. Catch
            # ``Exception``, because each driver has exceptions of its own.
            except Exception:
                if (known := self.valid()) is None:
                    raise
                # Send the next query that renews the lease a little later, so that not every
                # operation waits for the directory.
                self._poll = replace(known, renew_at=now() + self.seconds / 10)
                return known
        finally:
            self._lock.release()

    def _ask(self) -> Poll | None:
        sent = now()
        moves = self._store.moves()
        self.is_suspended = moves is None
        if moves is None:
            return None
        before, number = self._poll, 1
        seen: dict[tuple[str, str], int] = {}
        since = None
        if before is not None:
            number = before.number + 1
            # Compare the end of the previous lease with the time at which the answer arrived. If
            # the lease had ended by then, a key may have moved unseen, so a new series of polls
            # begins.
            if now() < before.valid_until and len(before.seen) < _MOST_SEEN:
                since, seen = before.since, dict(before.seen)
        for key in moves.in_flight:
            seen[key.group, key.key] = number
        self._poll = Poll(
            number,
            number if since is None else since,
            sent + self.seconds / 2,
            sent + self.seconds,
            moves,
            seen,
        )
        return self.valid()

    @classmethod
    def _after_fork(cls) -> None:
        # Replace the lock, because another thread of the parent may have held it at the fork. The
        # lease is as valid in the child as in the parent.
        for lease in list(cls._instances):
            lease._lock = threading.RLock()


os.register_at_fork(after_in_child=PlacementLease._after_fork)


class PermanentLease:
    """A lease (the right to remember the shards of keys) that is always valid, because keys never move.

    Sends no query.
    """

    seconds = None
    is_suspended = False
    _poll = Poll(1, 1, math.inf, math.inf, MoveList((), 0), {})

    def current(self) -> Poll:
        return self._poll

    valid = renew = current
