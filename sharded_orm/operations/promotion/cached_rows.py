"""Cached rows that a promotion makes stale."""

from __future__ import annotations

from typing import Any, Final

from sharded_orm import runtime
from sharded_orm.exceptions import CacheUnavailable, TopologyError
from sharded_orm.operations import cache, topology
from sharded_orm.operations.promotion.record import PromotionRecord

#: Seconds for all processes to use the new map before the cache is invalidated.
READERS_PATIENCE: Final = 10.0


def invalidate(record: PromotionRecord) -> None:
    """Invalidate the cache once every process reads on the new primary.

    Rows that are lost may be cached. And a process that does not know the new map yet may read a
    row on the old primary, and cache it for all, after the row has changed on the new one.
    """
    if runtime.cache() is None:
        return
    _wait_for_readers(record)
    record.tell("makes the cache void: it may hold rows as the old primary has them")
    try:
        for cached in cache.cached_models():
            model: Any = cached.model
            model.cache.invalidate()
    except CacheUnavailable as exc:
        record.warn(
            f"the cache may hold rows as the old primary has them ({exc}): run 'manage.py"
            " cache_invalidate --all'"
        )


def _wait_for_readers(record: PromotionRecord) -> None:
    """Wait until every process that is connected to the source uses the new map."""
    try:
        reach = topology.wait_until_used(runtime.topology_status().version, READERS_PATIENCE)
    except TopologyError as exc:
        late = str(exc)
    else:
        if reach is None or not reach.behind:
            return
        late = ", ".join(f"{process.host} ({process.pid})" for process in reach.behind)
    record.warn(
        f"processes that do not use the new map yet ({late}) read on {record.plan.node!r}, and may"
        " cache what they read: run 'manage.py cache_invalidate --all' when they follow or have"
        " ended"
    )
