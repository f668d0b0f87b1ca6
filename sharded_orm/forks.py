"""Helpers for forked processes: they recognise a fork, and protect the parent's connections."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable

# How many seconds a fork waits for the locks of one caller of hold_during_forks(). Without a limit,
# a fork could wait for ever: a signal handler may fork in the thread that holds the lock.
_FORK_WAITS = 1.0
_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


# Count forks, because a process id can be used more than once: a grandchild may get the id of an
# ancestor that has ended.
os.register_at_fork(after_in_child=_forked)


def identity() -> tuple[int, int]:
    """Return a value that is different in this process and in each of its ancestors.

    The value consists of the process id and the number of forks by Python code. This number alone
    is not enough: if C code forks, only the process id changes.
    """
    return os.getpid(), _forks


def hold_during_forks(locks: Callable[[], Iterable[threading.Lock]]) -> None:
    """Make each later fork of this process acquire ``locks`` first, and release them after the
    fork.

    Use this for locks that threads hold while they run a statement of SQLite. A child that is
    forked during such a statement would inherit locks of the SQLite library that nobody releases,
    and could wait for ever.

    :param locks: a function that yields the locks; called before each fork.
    """
    # Store the held locks per thread, because two threads may fork at the same time. The functions
    # below run in the thread that forks; after the fork, also in its copy in the child.
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
