"""Helps forked processes: tells them that they are forks, and protects the parent's connections."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable

# A fork waits at most this number of seconds for the locks of one caller of hold_during_forks().
# Otherwise it could wait for ever. For example, a signal handler interrupts the thread that holds a
# lock, and forks: the lock is not released before the handler returns.
_FORK_WAITS = 1.0
_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


# Count forks, because a process id alone does not identify a process: a grandchild may get the id
# of an ancestor that has ended.
os.register_at_fork(after_in_child=_forked)


def identity() -> tuple[int, int]:
    """Return a value that differs between this process and each of its ancestors.

    Compare it with a stored value, to find out whether this process is a forked child. It is the
    pair (process id, number of forks by Python code). The number alone is not enough, because it
    misses forks by C code.
    """
    return os.getpid(), _forks


def hold_during_forks(locks: Callable[[], Iterable[threading.Lock]]) -> None:
    """Let each later fork of this process acquire ``locks`` before it forks, and release them
    after.

    Use this for locks that threads hold while they run a statement of SQLite. If a process forked
    during a statement, the child would inherit locks of the SQLite library that nobody releases,
    and could wait for ever.

    :param locks: a function that yields the locks; called before each fork.
    """
    # Two threads may fork at the same time, so each thread has a list of the locks that it holds.
    # All three functions below run in the thread that forks, or in its copy in the child.
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

    Use this for a socket that a fork has copied. When a driver closes a connection, it sends a
    message that ends the session. In a forked child, this would end the parent's session.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(nowhere, descriptor, inheritable=False)
    finally:
        os.close(nowhere)
