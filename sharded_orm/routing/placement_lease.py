"""The lease under which a process remembers the shards of keys (docs/decisions/0028-key-moves.md).

A process remembers on which shard the rows of a key are, so that it need not query the directory
each time. But when a key moves to another shard, every process must stop using what it remembers,
even a process that cannot be reached. So a process may remember shards only while it has a *lease*,
which ends after some seconds.

To renew its lease, the process sends a query, the *poll*. It asks which keys are *in flight*, that
is, whose move was announced and has not ended. A process looks up such a key in the directory each
time. After its announcement, a move waits for longer than a lease is valid. When the wait is over,
each process has either learned of the move by a poll, or has no lease any more.
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

# A process keeps a record of the keys that have been in flight (moving), because the shards that it
# remembers for these keys may be wrong. When the record has this number of keys, the process drops
# it. Without the record, no remembered shard is safe, so it also forgets the shards of all keys.
_MOST_SEEN = 10_000
#: The id of a clock that goes on while the machine is suspended; None if the system has no such
#: clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


def now() -> float:
    """Return the time of a clock that never goes back, in seconds.

    On Linux, the clock goes on while the machine is suspended, so that a lease ends meanwhile.
    """
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


class KeyInFlight(NamedTuple):
    """A key that is moving to another shard."""

    group: str
    #: The text under which the directory stores the key. For some keys, this is a digest.
    key: str
    #: The key itself, as text.
    value: str
    #: The number of the move. The key moves from the shard with the number ``source`` to the shard
    #: with the number ``target``.
    number: int
    source: int
    target: int
    phase: str


class MoveList(NamedTuple):
    """The moves of keys that :meth:`MoveStore.moves` has found."""

    in_flight: tuple[KeyInFlight, ...]
    #: The number of the move that was announced last; 0 if there was none.
    last: int
    #: Moves that have ended; see the argument ``since`` of :meth:`MoveStore.moves`.
    ended: tuple[KeyInFlight, ...] = ()


class MoveStore(Protocol):
    """Knows which keys are moving to another shard. The directory implements this."""

    def moves(self, since: int | None = None) -> MoveList | None:
        """Return which keys are in flight: their move was announced and has not ended.

        Sends one query, which is not logged. Return None inside Django's ``TestCase``, whose
        transaction hides what other processes do.

        :param since: the number of a move. Then ``ended`` in the result has all later moves that
            have ended. By default (None), it has at most one move: the latest, if it has ended.
        """


@dataclass(frozen=True)
class Poll:
    """The answer to one query for the keys in flight, which gives a new lease. Immutable.

    The polls of a process are numbered. They form a series as long as each answer arrives before
    the lease of the previous poll has ended. Within a series, the process learns of every move: a
    move takes longer than a lease, so it cannot begin and end between two polls.

    :param number: the number of this poll.
    :param since: the number of the first poll in its series.
    :param moves: the answer.
    """

    number: int
    since: int
    #: ``renew_at``: the first operation after this time renews the lease. ``valid_until``: the time
    #: at which the lease ends.
    renew_at: float
    valid_until: float
    moves: MoveList
    #: Maps each key that was in flight (moving) during the series of polls, as a pair ``(group,
    #: key)``, to the number of the last poll that reported it.
    seen: Mapping[tuple[str, str], int] = field(repr=False)

    @cached_property
    def _seen_in_groups(self) -> Mapping[str, int]:
        latest: dict[str, int] = {}
        for (group, _), number in self.seen.items():
            latest[group] = max(number, latest.get(group, 0))
        return latest

    def is_quiet(self, group: str, number: int) -> bool:
        """Return whether no key of ``group`` has moved since the poll with this number.

        A poll is a query that asks which keys are moving. The result is False if that poll or a
        later one has reported a key of the group. The result is reliable only while the lease of
        this poll is valid.
        """
        return number >= self.since and self._seen_in_groups.get(group, 0) < number

    def covers(self, group: str, key: str, number: int) -> bool:
        """Return whether ``key`` is still on the shard that was found for it after poll ``number``.

        A poll is a query that asks which keys are moving. The result is False if poll ``number`` or
        a later one has reported that the key was moving. The result is reliable only while the
        lease of this poll is valid.
        """
        return number >= self.since and self.seen.get((group, key), 0) < number


class PlacementLease:
    """The right of this process to use the shards of keys that it remembers. Thread-safe.

    A lease is valid for ``seconds`` seconds. When half of this time is over, the next operation
    renews the lease with one query; there is no background thread. If the directory does not
    answer, the process still uses the shards that it remembers until the lease ends. After that,
    each look-up raises the directory's error.

    :param store: knows which keys are in flight.
    :param seconds: how long a lease is valid, counted from the time at which its query is sent.
    """

    _instances: WeakSet[PlacementLease] = WeakSet()

    def __init__(self, store: MoveStore, seconds: float) -> None:
        self._store = store
        self.seconds = seconds
        self._poll: Poll | None = None
        #: Whether the last query was sent inside Django's ``TestCase``. There, no key moves, so no
        #: lease is needed.
        self.is_suspended = False
        # The lock must be reentrant: the query may open the connection to the directory, and a
        # receiver of connection_created may use sharded models, which take the lock in the same
        # thread again.
        self._lock = threading.RLock()
        self._instances.add(self)

    def current(self) -> Poll | None:
        """Return the last poll. If half of the time of its lease is over, send a new poll first.

        A poll is a query that asks which keys are moving. It gives the process a new lease, the
        right to use the shards of keys that it remembers. Return None if the process has no such
        right: inside Django's ``TestCase``, or if the query took longer than a lease is valid.

        :raises django.db.Error: the lease has ended, and the directory does not answer.
        """
        poll = self._poll
        return poll if poll is not None and now() < poll.renew_at else self._renew()

    def valid(self) -> Poll | None:
        """Return the last poll (query for the moving keys) if its lease is still valid, else None.

        Sends no query.
        """
        poll = self._poll
        return poll if poll is not None and now() < poll.valid_until else None

    def renew(self) -> Poll | None:
        """Query at once which keys are in flight, and return the poll.

        Return None in the same cases as :meth:`current`.
        """
        with self._lock:
            return self._ask()

    def _renew(self) -> Poll | None:
        poll = self.valid()
        # Only one thread renews the lease. The other threads go on with the old lease, and wait for
        # the lock only if the old lease has ended.
        if not self._lock.acquire(blocking=poll is None):
            return poll
        try:
            known = self.valid()
            if known is not None and now() < known.renew_at:
                return known  # Another thread has renewed the lease meanwhile, so send no query.
            try:
                return self._ask()
            # The directory does not answer. Go on as long as the lease is valid. Catch every
            # exception, because each driver raises different ones.
            except Exception:
                if (known := self.valid()) is None:
                    raise
                # Do not send the next poll before a tenth of the lease's time is over. Otherwise,
                # every operation would wait for the directory, which does not answer.
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
            # If the previous lease had ended when the answer arrived, a key may have moved in
            # between without being reported. So a new series of polls begins, and the process does
            # not use the shards that it has remembered before.
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
        # If another thread held the lock at the fork, it would stay locked in the child. So make
        # new locks. The child keeps the leases of the parent, which end at the same times.
        for lease in list(cls._instances):
            lease._lock = threading.RLock()


os.register_at_fork(after_in_child=PlacementLease._after_fork)


class PermanentLease:
    """A lease that never ends, for projects in which keys never move. Sends no query."""

    seconds = None
    is_suspended = False
    _poll = Poll(1, 1, math.inf, math.inf, MoveList((), 0), {})

    def current(self) -> Poll:
        return self._poll

    valid = renew = current
