"""Blocks of ids that a process has taken from a ticket server in advance."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from sharded_orm.forks import identity


@dataclass
class _ProcessBlocks:
    """The blocks of ids that one process has taken, by sequence.

    A forked child starts without blocks: those of its parent are handed out by the parent.
    """

    process: tuple[int, int] = field(default_factory=identity)
    # Held while an id is taken from a block, so that no id is handed out twice.
    lock: threading.Lock = field(default_factory=threading.Lock)
    blocks: defaultdict[str, deque[Iterator[int]]] = field(
        default_factory=lambda: defaultdict(deque)
    )


class Blocks:
    """Takes blocks of ``size`` ids from a ticket server, and hands the ids out one by one.

    Thread-safe and fork-safe. Only one call in ``size`` costs a round trip. Ids that are left when
    the process ends are lost.

    :param fetch: called with the name of a sequence and a number of ids; returns that many new ids
        from a ticket server.
    """

    def __init__(self, size: int, fetch: Callable[[str, int], Sequence[int]]) -> None:
        self._size = size
        self._fetch = fetch
        self._own = _ProcessBlocks()

    def next(self, sequence: str) -> int:
        """Return a new id of the sequence named ``sequence``."""
        own = self._own
        if own.process != identity():
            # This is a forked child. Use neither the parent's blocks nor its lock, which another
            # thread of the parent may have held at the fork.
            own = self._own = _ProcessBlocks()
        with own.lock:
            blocks = own.blocks[sequence]
            while blocks:
                for number in blocks[0]:
                    return number
                blocks.popleft()
        # Release the lock during the round trip, so that other callers can take ids meanwhile.
        block = iter(self._fetch(sequence, self._size))
        first = next(block)
        with own.lock:
            blocks.append(block)
        return first
