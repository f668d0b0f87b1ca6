"""Which server is asked next: round robin, separately for each sequence (Flickr, F3)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sharded_orm.forks import identity

# A SystemRandom has no seed: a forked child would otherwise draw the same numbers.
_random = random.SystemRandom()


@dataclass
class _Counters:
    """The counters of one process, by sequence."""

    process: tuple[int, int] = field(default_factory=identity)
    by_sequence: dict[str, Iterator[int]] = field(default_factory=dict)


class Turns:
    """Decides which of ``count`` servers is asked next. Thread-safe and fork-safe, without a lock.

    Sequences do not share a counter: if a site saved rows of two models alternately, each model
    would be served by one server only.

    :param first: returns the server with which a process begins in a sequence. Random by default:
        most ids may be taken by processes that take few, and a forked child must not continue
        its parent's turn.
    """

    def __init__(self, count: int, first: Callable[[int], int] = _random.randrange) -> None:
        self._count = count
        self._first = first
        self._counters = _Counters()

    def next(self, sequence: str) -> int:
        """The number of the server whose turn it is, counted from 0."""
        counters = self._counters
        if counters.process != identity():
            counters = self._counters = _Counters()
        turn = counters.by_sequence.get(sequence)
        if turn is None:
            # If two threads come here at once, both use the same counter.
            counter = itertools.count(self._first(self._count))
            turn = counters.by_sequence.setdefault(sequence, counter)
        return next(turn) % self._count
