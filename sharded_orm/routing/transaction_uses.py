"""Calls a check, which raises an error if a transaction uses the same key on two shards.

Without this check, a key that moves during a transaction could be read on one shard and written on
another. The routing strategy calls the check for each key that it looks up. This module cannot
import the check, which belongs to a higher layer. So the package's Django app passes it to
:func:`provide_check` at start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sharded_orm.routing.placement_uses import KnownPlacement

_check: Callable[[Any, str, KnownPlacement], None] | None = None


def provide_check(check: Callable[[Any, str, KnownPlacement], None]) -> None:
    """Set the function that :func:`check_use` calls. The package's Django app does so at start."""
    global _check
    _check = check


def check_use(strategy: Any, key: str, placement: KnownPlacement) -> None:
    """Raise an error if ``key`` has moved to its shard during an open transaction that uses it.

    Then the transaction would use the rows of the key on two shards, or would not see all of them.

    :param strategy: the directory strategy that has found the placement.
    :param key: the text under which the directory stores the key.
    :raises KeyMoved: the key has moved, or may have moved, since the transaction began. If the
        transaction is run again, it succeeds.
    """
    if _check is not None:
        _check(strategy, key, placement)
