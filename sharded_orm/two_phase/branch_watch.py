"""Looks for prepared branches that nobody ends, on the nodes where this process has used two-phase
commits.

A prepared branch (the part on one shard of a transaction) holds locks until it is committed or
rolled back. If the process that has prepared it dies, another process must end it. Each process
that commits in two phases looks for such branches, so no separate process is needed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from django.db import Error, connections

from sharded_orm import runtime
from sharded_orm.forks import identity
from sharded_orm.topology.model import Shard
from sharded_orm.two_phase import recovery
from sharded_orm.two_phase.recovery import GRACE, PreparedBranch

logger = logging.getLogger("sharded_orm.two_phase")

#: The minimum number of seconds between two searches of this process for prepared branches. But if
#: a branch was probably left prepared, the next search begins at once; see BranchWatch.note().
INTERVAL: Final = 1.0
# The maximum number of branches that one search ends. It is small, because the caller of look()
# waits for the search.
_BATCH = 10


class BranchWatch:
    """The prepared branches that this process has seen, each with the time when it was first seen.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = identity()
        # Pairs (name of a shard group, name of a node). The transactions in two phases of this
        # process have used shards of the group on the node.
        self._used: set[tuple[str, str]] = set()
        self._seen: dict[PreparedBranch, float] = {}
        self._next = 0.0

    def note(self, shards: Sequence[Shard], is_left: bool) -> None:
        """Record that a transaction in two phases has used ``shards``.

        :param is_left: whether a prepared branch (the part of a transaction on one shard) may be
            left on the shards, by this transaction or by another one. The next :meth:`look` then
            searches at once.
        """
        self._used |= {(shard.group, shard.node) for shard in shards}
        if is_left:
            self._next = 0.0

    def look(self) -> None:
        """End branches that have been prepared for too long. Raises no database error.

        A branch is the part on one shard of a transaction in two phases. Costs one query to each
        node that this process has used in such transactions. Costs nothing if the last search was
        less than a second ago, unless :meth:`note` was told since that a branch may be left. Must
        not be called in a transaction of a shard group.
        """
        if self._process != identity():
            self.__init__()  # type: ignore[misc]  # Start anew in a forked child, because a thread of the parent may have held the lock.
        if time.monotonic() < self._next or not self._lock.acquire(blocking=False):
            return
        try:
            self._next = time.monotonic() + INTERVAL
            self._end(self._overdue())
        finally:
            self._lock.release()

    def _overdue(self) -> list[PreparedBranch]:
        seen: dict[PreparedBranch, float] = {}
        groups = runtime.topology().groups
        for name, node in sorted(self._used):
            group = groups.get(name)
            if group is None or node not in {holder.primary for holder in group.ranges}:
                continue
            now = time.monotonic()
            if _is_down(recovery.any_on(node, group)):
                continue
            try:
                for prepared in recovery.prepared_on(node, group):
                    seen[prepared] = self._seen.get(prepared, now)
            except Error as exc:
                logger.info("Node %r was not asked for prepared branches: %s", node, exc)
        self._seen = seen
        now = time.monotonic()
        return [prepared for prepared, since in seen.items() if now - since >= GRACE][:_BATCH]

    def _end(self, overdue: Sequence[PreparedBranch]) -> None:
        left: set[str] = set()
        for prepared in overdue:
            if prepared.branch.decider in left:
                continue
            decider = runtime.topology().resolve(prepared.branch.decider)
            if decider is not None and _is_down(connections[decider.alias]):
                continue
            if recovery.end(prepared, seconds=0).is_over:
                self._seen.pop(prepared, None)
            else:
                # The branch could not be ended now. Other branches may have the same deciding shard
                # (the shard that stores the decision to commit). Skip them in this search, because
                # they would have to wait for the same shard.
                left.add(prepared.branch.decider)
                self._seen[prepared] = time.monotonic()


def _is_down(wrapper: Any) -> bool:
    """Whether a shard's server is known to be down. Sending it a query would only take time."""
    return wrapper.node_failure() is not None


#: The only :class:`BranchWatch` of this process.
watch = BranchWatch()
