"""Names in the cache while tests run, which are new in each run and each process.

So a test finds no entry of another run, of a parallel process, or of the site itself.
"""

from __future__ import annotations

import secrets

from sharded_orm import runtime

# The aliases that have a test database in this process.
_isolated: set[str] = set()


def isolate(alias: str) -> None:
    """A test database for ``alias`` is about to be created."""
    if not _isolated:
        renew()
    _isolated.add(alias)


def isolate_worker(alias: str) -> None:
    """This process is one of several that run tests in parallel."""
    _isolated.add(alias)
    renew()


def release(alias: str) -> None:
    """The test database of ``alias`` was dropped."""
    if alias in _isolated:
        _isolated.remove(alias)
        if not _isolated:
            runtime.swap_cache_prefix(None)


def renew() -> None:
    """Forget all cached entries, as rows were replaced without the ORM."""
    runtime.swap_cache_prefix(f"test_{secrets.token_hex(8)}")
