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

    A forked child must not use them, because the ids belong to its parent; it starts without blocks.
    """

    process: tuple[int, int] = field(default_factory=identity)
    # Guards the blocks' iterators, so that each id is handed out once.
    lock: threading.Lock = field(default_factory=threading.Lock)
    blocks: defaultdict[str, deque[Iterator[int]]] = field(
        default_factory=lambda: defaultdict(deque)
    )


class Blocks:
    """A stock of ids, taken in blocks of ``size`` and handed out singly. Thread-safe and fork-safe.

    :param fetch: called with the name of a sequence and a size; takes a block of that many ids from a
        ticket server.

    Every ``size``-th id costs one round trip. Ids that are left when the process ends are lost.
    """

    def __init__(self, size: int, fetch: Callable[[str, int], Sequence[int]]) -> None:
        self._size = size
        self._fetch = fetch
        self._own = _ProcessBlocks()

    def next(self, sequence: str) -> int:
        """Return a new id of ``sequence``."""
        own = self._own
        if own.process != identity():
            # Replace the parent's blocks and lock: a thread of the parent may have held that lock.
            own = self._own = _ProcessBlocks()
        with own.lock:
            blocks = own.blocks[sequence]
            while blocks:
                for number in blocks[0]:
                    return number
                blocks.popleft()
        # Fetch without the lock, so that a caller that waits for a server blocks no other caller.
        block = iter(self._fetch(sequence, self._size))
        first = next(block)
        with own.lock:
            blocks.append(block)
        return first
