"""Ids that a process has taken in advance."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from sharded_orm.forks import identity


@dataclass
class _ProcessBlocks:
    """The blocks of one process. A forked child starts without any: the ids are its parent's."""

    process: tuple[int, int] = field(default_factory=identity)
    # Guards the iterators: each id is handed out once.
    lock: threading.Lock = field(default_factory=threading.Lock)
    blocks: defaultdict[str, deque[Iterator[int]]] = field(
        default_factory=lambda: defaultdict(deque)
    )


class Blocks:
    """Hands out ids one by one from blocks of ``size``. Thread-safe and fork-safe.

    :param fetch: takes a whole block from a server, by sequence and size.

    Costs a round trip for each ``size``-th id. The ids that are left when the process ends are
    lost.
    """

    def __init__(self, size: int, fetch: Callable[[str, int], Sequence[int]]) -> None:
        self._size = size
        self._fetch = fetch
        self._own = _ProcessBlocks()

    def next(self, sequence: str) -> int:
        """One id."""
        own = self._own
        if own.process != identity():
            # The lock is new, too: a thread of the parent may have held it.
            own = self._own = _ProcessBlocks()
        with own.lock:
            blocks = own.blocks[sequence]
            while blocks:
                for number in blocks[0]:
                    return number
                blocks.popleft()
        # Without the lock: a caller that waits for a server blocks no other caller.
        block = iter(self._fetch(sequence, self._size))
        first = next(block)
        with own.lock:
            blocks.append(block)
        return first
