"""The time that a test waits for an event."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds until an event counts as missing. A wait ends with its event, so a large value costs a
#: test nothing. It must be far above what a machine under several times its load needs.
PATIENCE = 600.0


def eventually(condition: Callable[[], object]) -> None:
    """Wait until ``condition`` is true. For events that nobody signals, such as a server's lists."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_time_left(deadline: float, has_done_enough: bool) -> bool:
    """Say whether to go on with work that ends at ``deadline``.

    A slow machine, which has not done enough to show anything by then, gets more time.

    :param deadline: the end, as ``time.monotonic()``.
    """
    now = time.monotonic()
    return now < deadline or (not has_done_enough and now < deadline + PATIENCE)
