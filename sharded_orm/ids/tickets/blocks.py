"""Blocks of ids that a process has taken from a ticket server in advance."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from sharded_orm.forks import identity


@dataclass
class _ProcessBlocks:
    """The blocks of ids of one process, keyed by sequence.

    A forked child must not use its parent's blocks, because the parent hands out these ids. The child
    starts without blocks.
    """

    process: tuple[int, int] = field(default_factory=identity)
    # Lock to be held while an id is taken from a block, so that each id is handed out once.
    lock: threading.Lock = field(default_factory=threading.Lock)
    blocks: defaultdict[str, deque[Iterator[int]]] = field(
        default_factory=lambda: defaultdict(deque)
    )


class Blocks:
    """A stock of ids. It takes blocks of ``size`` ids from a ticket server, and hands out single ids.

    Thread-safe and fork-safe. Every ``size``-th id costs one round trip. Ids that are left when the
    process ends are lost.

    :param fetch: called with the name of a sequence and a number of ids; takes that number of ids
        from a ticket server and returns them.
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
        # Do not hold the lock while new ids are fetched, so that other callers can take ids
        # meanwhile.
        block = iter(self._fetch(sequence, self._size))
        first = next(block)
        with own.lock:
            blocks.append(block)
        return first
