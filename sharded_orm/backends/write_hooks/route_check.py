"""The check that the rows of a write still belong on its shard, just before the write is sent.

While a key moves, its fence refuses writes of all sessions that were open at the switch. A session
that is opened later may meet no fence. So each write leases its session first, and then checks
whether its keys are still on this shard. The app provides the check.
"""

from __future__ import annotations

from collections.abc import Callable

_check: Callable[[], None] | None = None


def provide_check(check: Callable[[], None]) -> None:
    """Set the function that :func:`check_route` calls. The package's Django app does so."""
    global _check
    _check = check


def check_route() -> None:
    """Raise an error if a key of the write that is about to be sent has moved to another shard.

    :raises KeyMoved: a key of the write has moved. Nothing was sent.
    """
    if _check is not None:
        _check()
