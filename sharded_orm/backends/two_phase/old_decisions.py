"""Remember which decisions of two-phase commits can be deleted, because all shards have committed.

This process deletes the rows of these decisions when it stores its next decision on the same shard.
If the process ends earlier, ``manage.py transactions recover`` deletes them.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import Final

#: Seconds for which the row with a decision is kept after all shards have committed. A server that
#: does not write each commit to its disk may forget the commit of a branch when its machine fails.
#: The branch is then prepared again after the restart, and the decision is needed once more.
KEPT_FOR: Final = 60.0
_BATCH = 20
_MOST = 10_000

# The decisions that can be deleted. Maps the alias of a shard to the decisions that it stores, as
# pairs (time of the end, name of the transaction). Appending to a deque and popping from it are
# atomic, so no lock is needed.
_finished: defaultdict[str, deque[tuple[float, str]]] = defaultdict(lambda: deque(maxlen=_MOST))


def add(alias: str, transaction: str) -> None:
    """Note that all shards have committed ``transaction``. Its decision, which the shard ``alias``
    stores, can be deleted later.
    """
    _finished[alias].append((time.monotonic(), transaction))


def take(alias: str) -> list[str]:
    """Return the names of a few transactions whose decisions the shard ``alias`` can delete now.

    Each name is returned only once.
    """
    queue = _finished.get(alias)
    names: list[str] = []
    while queue and len(names) < _BATCH:
        try:
            ended_at, name = queue.popleft()
        except IndexError:
            break
        if time.monotonic() - ended_at < KEPT_FOR:
            queue.appendleft((ended_at, name))
            break
        names.append(name)
    return names
