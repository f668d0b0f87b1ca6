"""Names in the cache while tests run: new ones in each run and each process.

So a test meets no entry of another run, of a process beside it, or of the site itself.
"""

from __future__ import annotations

import secrets

from sharded_orm import runtime

# Aliases with a test database in this process.
_isolated: set[str] = set()


def isolate(alias: str) -> None:
    """A test database is about to be made for ``alias``."""
    if not _isolated:
        renew()
    _isolated.add(alias)


def isolate_worker(alias: str) -> None:
    """This process is one of several that run tests at the same time."""
    _isolated.add(alias)
    renew()


def release(alias: str) -> None:
    """The test database of ``alias`` is gone."""
    if alias in _isolated:
        _isolated.remove(alias)
        if not _isolated:
            runtime.swap_cache_prefix(None)


def renew() -> None:
    """Forget everything that is cached; rows were replaced behind the library's back."""
    runtime.swap_cache_prefix(f"test_{secrets.token_hex(8)}")
