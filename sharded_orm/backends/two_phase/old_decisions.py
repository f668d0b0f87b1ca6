"""Decisions that nobody needs any more, because all branches have committed.

The next transaction that this process decides on the same shard deletes their rows. Rows that are left,
because the process ends, are deleted by ``manage.py transactions recover``.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import Final

#: Seconds for which a row is kept. A server that does not write each commit to its disk may forget
#: the commit of a branch when the machine fails. The branch is then prepared again, and needs the row.
KEPT_FOR: Final = 60.0
_BATCH = 20
_MOST = 10_000

# The names by the decider's alias, each with the time of its end. Appending to a deque and popping from
# it are atomic, so no lock is needed.
_finished: defaultdict[str, deque[tuple[float, str]]] = defaultdict(lambda: deque(maxlen=_MOST))


def add(alias: str, transaction: str) -> None:
    """Note that all branches of ``transaction``, whose decision is on ``alias``, have committed."""
    _finished[alias].append((time.monotonic(), transaction))


def take(alias: str) -> list[str]:
    """Return a few transactions whose decisions on ``alias`` may be deleted now. Each is returned once."""
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
