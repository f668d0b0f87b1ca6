"""Help forked processes: recognise a fork, and do not disturb the parent's connections."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable

# The most seconds that a fork waits for the locks of one caller of hold_during_forks(). Without
# this limit, a fork would wait for ever if a signal handler forks while it interrupts the thread
# that holds one of the locks.
_FORK_WAITS = 1.0
_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


# Count forks. Process ids alone do not distinguish processes, because a grandchild may get the
# process id of an ancestor that has ended.
os.register_at_fork(after_in_child=_forked)


def identity() -> tuple[int, int]:
    """Return a value that identifies this process and differs from the values in all its ancestors.

    The value consists of the process id and a count of forks. The count alone is not enough, because a
    fork by C code changes only the process id.
    """
    return os.getpid(), _forks


def hold_during_forks(locks: Callable[[], Iterable[threading.Lock]]) -> None:
    """Make each later fork of this process acquire ``locks`` first, and release them after the fork.

    Use this for locks that threads hold while they run a statement of SQLite. A child that is
    forked meanwhile would inherit SQLite's records of file locks and the mutexes of the SQLite
    library. The child could then find the file or the library locked for ever.

    :param locks: a function that yields the locks; called before each fork.
    """
    # Two threads may fork at the same time. So keep the locks per thread: before and after a fork,
    # the functions below run in the thread that forks, and in its copy in the child.
    state = threading.local()

    def hold() -> None:
        state.held = []
        deadline = time.monotonic() + _FORK_WAITS
        for lock in locks():
            if lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                state.held.append(lock)

    def release() -> None:
        while state.held:
            state.held.pop().release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=release)


def send_nowhere(descriptor: int) -> None:
    """Redirect a file descriptor of this process to ``/dev/null``. The parent's descriptor stays as it is.

    Use this for a socket that a fork has copied. If the driver in the child closed the connection
    normally, the driver's last message would end the parent's session.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(nowhere, descriptor, inheritable=False)
    finally:
        os.close(nowhere)
