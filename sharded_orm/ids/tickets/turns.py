"""Which server is asked next: round robin, for each sequence by itself (Flickr, F3)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sharded_orm.forks import identity

# Not seeded: a child would draw what its parent draws.
_random = random.SystemRandom()


@dataclass
class _Counters:
    """The turns of one process, by sequence."""

    process: tuple[int, int] = field(default_factory=identity)
    by_sequence: dict[str, Iterator[int]] = field(default_factory=dict)


class Turns:
    """Turns among ``count`` servers. Thread-safe and fork-safe, without a lock.

    Sequences do not share a turn: a site that saves two kinds of rows in turn would have
    each kind served by one server only.

    :param first: the server that a process begins with in a sequence. At random by default:
        most ids may be taken by processes that take few, and a forked child must not go on
        with its parent's turn.
    """

    def __init__(self, count: int, first: Callable[[int], int] = _random.randrange) -> None:
        self._count = count
        self._first = first
        self._counters = _Counters()

    def next(self, sequence: str) -> int:
        """The number of the server whose turn it is, from 0 on."""
        counters = self._counters
        if counters.process != identity():
            counters = self._counters = _Counters()
        turn = counters.by_sequence.get(sequence)
        if turn is None:
            # Of two threads that are the first at once, both go on with the same one.
            new = itertools.count(self._first(self._count))
            turn = counters.by_sequence.setdefault(sequence, new)
        return next(turn) % self._count
