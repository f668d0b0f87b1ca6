"""Ids that a process has taken in advance."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from sharded_orm.forks import identity


@dataclass
class _Held:
    """What one process holds. A child begins with nothing: the ids are its parent's."""

    process: tuple[int, int] = field(default_factory=identity)
    # Guards the iterators: each id leaves once.
    lock: threading.Lock = field(default_factory=threading.Lock)
    blocks: defaultdict[str, deque[Iterator[int]]] = field(
        default_factory=lambda: defaultdict(deque)
    )


class Blocks:
    """Hands out ids one by one from blocks of ``size``. Thread-safe and fork-safe.

    :param fetch: takes a whole block from a server.

    No round trip but for each ``size``-th id. What a process holds when it ends is lost.
    """

    def __init__(self, size: int, fetch: Callable[[str, int], Sequence[int]]) -> None:
        self._size = size
        self._fetch = fetch
        self._held = _Held()

    def next(self, sequence: str) -> int:
        """One id."""
        held = self._held
        if held.process != identity():
            # Also the lock is new: a thread of the parent may have held it.
            held = self._held = _Held()
        with held.lock:
            blocks = held.blocks[sequence]
            while blocks:
                for number in blocks[0]:
                    return number
                blocks.popleft()
        # Not under the lock: who waits for a server that is down keeps nobody else waiting.
        fetched = iter(self._fetch(sequence, self._size))
        first = next(fetched)
        with held.lock:
            blocks.append(fetched)
        return first
