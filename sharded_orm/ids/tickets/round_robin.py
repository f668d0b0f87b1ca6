"""Chooses the ticket server to call next: round robin, separately for each sequence (Flickr, F3)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sharded_orm.forks import identity

# Use SystemRandom, which has no seed: with a seeded generator, a forked child would draw the same
# numbers as its parent.
_random = random.SystemRandom()


@dataclass
class _Counters:
    """The round-robin counters of one process, keyed by the name of the sequence."""

    process: tuple[int, int] = field(default_factory=identity)
    by_sequence: dict[str, Iterator[int]] = field(default_factory=dict)


class Turns:
    """A round robin over ``count`` servers, per sequence. Thread-safe and fork-safe, without a
    lock.

    With a common counter for all sequences, a site that saves rows of two models alternately would
    get all ids of one model from the same server.

    :param first: called with ``count``; returns the index (from 0) of the server that this process
        asks first for a sequence. By default a random index: so the servers share the load even if
        each process takes only a few ids, and a forked child does not repeat its parent's turns.
    """

    def __init__(self, count: int, first: Callable[[int], int] = _random.randrange) -> None:
        self._count = count
        self._first = first
        self._counters = _Counters()

    def next(self, sequence: str) -> int:
        """Return the index, counted from 0, of the server that is called first for the next id of
        ``sequence``.
        """
        counters = self._counters
        if counters.process != identity():
            counters = self._counters = _Counters()
        turn = counters.by_sequence.get(sequence)
        if turn is None:
            # If two threads run this code at the same time, setdefault() makes both use the same
            # counter.
            counter = itertools.count(self._first(self._count))
            turn = counters.by_sequence.setdefault(sequence, counter)
        return next(turn) % self._count
