"""Invalidate the cached rows that may be outdated after a promotion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sharded_orm import runtime
from sharded_orm.exceptions import CacheUnavailable, TopologyError
from sharded_orm.operations import cache, topology

#: The largest number of seconds that a promotion waits until all processes use its new map, the
#: topology document. After that, the cache is invalidated even if some still use the old one.
READERS_PATIENCE: Final = 10.0


def invalidate(node: str, tell: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Wait until every process reads from the new primary, then invalidate the cache.

    The cache may have rows that a forced promotion has lost. And a process that does not know the
    new map (topology document) yet may store a row of the old primary in the shared cache, although
    the row has changed on the new one.

    If a process still uses the old map after :data:`READERS_PATIENCE` seconds, or the cache does
    not answer, the report gets a warning. Does nothing if the project has no cache.
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
    """Wait until all processes that are connected to the topology's source use the new topology.

    Warn if one still does not after :data:`READERS_PATIENCE` seconds, or if the source does not
    answer.
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
