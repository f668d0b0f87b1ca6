"""Invalidate the cache after a promotion, because it may contain outdated rows.

A *promotion* replaces a primary server by its replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sharded_orm import runtime
from sharded_orm.exceptions import CacheUnavailable, TopologyError
from sharded_orm.operations import cache, topology

#: Before a promotion invalidates the cache, it waits until all processes use the new topology. It
#: waits for this number of seconds at most. Then it invalidates the cache in any case.
READERS_PATIENCE: Final = 10.0


def invalidate(node: str, tell: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Wait until every process reads from the new primary, then invalidate the cache.

    The cache may be wrong for two reasons. It may have rows that a forced promotion has lost. And a
    process that still uses the old topology reads from the old primary. It may cache a row that has
    been changed on the new primary meanwhile.

    ``warn`` is called if a process still uses the old topology after :data:`READERS_PATIENCE`
    seconds, or if the cache does not answer. Does nothing if the project has no cache.

    :param node: the name of the old primary, for the warning.
    :param tell: called with a line for the operator.
    :param warn: called with a warning for the report.
    """
    if runtime.cache() is None:
        return
    _wait_for_readers(node, warn)
    tell("makes the cache void: it may hold rows as the old primary has them")
    try:
        for cached in cache.cached_models():
            model: Any = cached.model
            model.cache.invalidate()
    except CacheUnavailable as exc:
        warn(
            f"the cache may hold rows as the old primary has them ({exc}): run 'manage.py"
            " cache_invalidate --all'"
        )


def _wait_for_readers(node: str, warn: Callable[[str], None]) -> None:
    """Wait until all processes use the new topology, for :data:`READERS_PATIENCE` seconds at most.

    Only processes that are connected to the source of the topology are known. Call ``warn`` if one
    of them still uses the old topology after this time, or if the source does not answer.
    """
    try:
        reach = topology.wait_until_used(runtime.topology_status().version, READERS_PATIENCE)
    except TopologyError as exc:
        late = str(exc)
    else:
        if reach is None or not reach.behind:
            return
        late = ", ".join(f"{process.host} ({process.pid})" for process in reach.behind)
    warn(
        f"processes that do not use the new map yet ({late}) read on {node!r}, and may"
        " cache what they read: run 'manage.py cache_invalidate --all' when they follow or have"
        " ended"
    )
