"""The check that the shard keys of a write are still on its shard, made just before the write is
sent.

When a key moves to another shard, a fence on the old shard refuses writes of the key. Later, the
fence is removed. A session that is opened after that could write to the old shard without an error,
if its process has not noticed the move. So each write first leases its session, and then checks
whether its keys are still on the shard. The package's Django app sets the function that checks.
"""

from __future__ import annotations

from collections.abc import Callable

_check: Callable[[], None] | None = None


def provide_check(check: Callable[[], None]) -> None:
    """Set the function that :func:`check_route` calls. The package's Django app does so when it is
    ready.
    """
    global _check
    _check = check


def check_route() -> None:
    """Raise an error if a key of the write that is about to be sent has moved to another shard.

    :raises KeyMoved: a key of the write has moved. Nothing was sent.
    """
    if _check is not None:
        _check()
