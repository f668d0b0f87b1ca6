"""Collect the decisions of two-phase commits that are not needed any more, because all branches
(the parts on the shards) have committed.

Their rows are deleted when this process stores its next decision on the same shard, or by
``manage.py transactions recover`` if the process ends before.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import Final

#: Seconds for which the row of a decision to commit is kept. A server that does not write each
#: commit to its disk may lose the commit of a branch when the machine fails. The branch is then
#: prepared again, and needs the decision.
KEPT_FOR: Final = 60.0
_BATCH = 20
_MOST = 10_000

# Transactions whose decisions may be deleted: alias of the shard with the decision -> pairs of end
# time and name. Appending to a deque and popping from it are atomic, so no lock is needed.
_finished: defaultdict[str, deque[tuple[float, str]]] = defaultdict(lambda: deque(maxlen=_MOST))


def add(alias: str, transaction: str) -> None:
    """Record that all shards have committed ``transaction``: its decision, on the shard ``alias``,
    can be deleted later.
    """
    _finished[alias].append((time.monotonic(), transaction))


def take(alias: str) -> list[str]:
    """Return a few transactions whose decisions to commit may be deleted now from the shard ``alias``.

    Each transaction is returned only once.
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
