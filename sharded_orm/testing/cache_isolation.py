"""Separates the cache entries of tests: each run and each process uses another prefix for cache
keys.

So a test never finds a cache entry of another run, of a parallel process, or of the real site.
"""

from __future__ import annotations

import secrets

from sharded_orm import runtime

# Aliases of shard groups and databases that have a test database in this process.
_isolated: set[str] = set()


def isolate(alias: str) -> None:
    """Switch to cache keys that only this process uses.

    Called before the test database of ``alias`` is created.
    """
    if not _isolated:
        renew()
    _isolated.add(alias)


def isolate_worker(alias: str) -> None:
    """Switch to cache keys that only this process uses. This process is one of several that run
    tests in parallel.

    :param alias: an alias that has a test database.
    """
    _isolated.add(alias)
    renew()


def release(alias: str) -> None:
    """Record that the test database of ``alias`` was dropped.

    If it was the last test database of this process, switch back to the configured prefix of cache
    keys.
    """
    if alias in _isolated:
        _isolated.remove(alias)
        if not _isolated:
            runtime.swap_cache_prefix(None)


def renew() -> None:
    """Forget all cache entries by switching to a new prefix of cache keys.

    Called when rows were replaced without the ORM, so that their cache entries may be outdated.
    """
    runtime.swap_cache_prefix(f"test_{secrets.token_hex(8)}")
