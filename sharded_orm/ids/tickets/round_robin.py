"""Chooses the ticket server to ask first: each in turn, separately for each sequence (Flickr, F3)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sharded_orm.forks import identity

# SystemRandom has no seed. With a seeded generator, a forked child would draw the same numbers as
# its parent.
_random = random.SystemRandom()


@dataclass
class _Counters:
    """Counts for each sequence how often this process has asked for a server."""

    process: tuple[int, int] = field(default_factory=identity)
    by_sequence: dict[str, Iterator[int]] = field(default_factory=dict)


class Turns:
    """Chooses the server to ask first: each of ``count`` servers in turn.

    Each sequence has a counter. With one counter for all sequences and two servers, a site that
    alternately saves rows of two models would get all ids of one model from the same server.
    Thread-safe and fork-safe, without a lock.

    :param first: called with ``count``; returns the index (from 0) of the server with which this
        process begins a sequence. The default returns a random index, so that the servers share
        the load even if each process takes only a few ids.
    """

    def __init__(self, count: int, first: Callable[[int], int] = _random.randrange) -> None:
        self._count = count
        self._first = first
        self._counters = _Counters()

    def next(self, sequence: str) -> int:
        """Return the index (from 0) of the server to ask first for the next id of ``sequence``."""
        counters = self._counters
        if counters.process != identity():
            counters = self._counters = _Counters()
        turn = counters.by_sequence.get(sequence)
        if turn is None:
            # If two threads come here at the same time, setdefault() gives both the same counter.
            counter = itertools.count(self._first(self._count))
            turn = counters.by_sequence.setdefault(sequence, counter)
        return next(turn) % self._count
