"""The check of the route of a write, after its session is taken and before the write is sent.

The fence of a key that moves stops old routes in all sessions that were open at the switch. A session
that is opened later may meet no fence. So a write takes its session first, and asks then whether
its keys are still on this shard. The check belongs to another layer, so the app provides it.
"""

from __future__ import annotations

from collections.abc import Callable

_check: Callable[[], None] | None = None


def provide_check(check: Callable[[], None]) -> None:
    """Provide the function that :func:`check_route` calls. The package's Django app does so."""
    global _check
    _check = check


def check_route() -> None:
    """Raise an error if the write that is about to be sent relies on a former shard of a key.

    :raises KeyMoved: a key of the running operation has moved. Nothing was sent.
    """
    if _check is not None:
        _check()
