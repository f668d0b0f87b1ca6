"""After a fork: tell a process from its parent, and leave the parent's connections alone."""

from __future__ import annotations

import os

_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


# A grandchild may have the process id of the first process, if that has ended.
os.register_at_fork(after_in_child=_forked)


def identity() -> tuple[int, int]:
    """A value that differs from that of every ancestor of this process.

    It holds the process id as well as a count of forks: a fork that did not go through Python
    changes only the process id.
    """
    return os.getpid(), _forks


def send_nowhere(descriptor: int) -> None:
    """Discard what this process writes to a file descriptor. The parent's descriptor is unchanged.

    A driver that closes a connection on a socket copied by a fork would end the parent's session.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(nowhere, descriptor, inheritable=False)
    finally:
        os.close(nowhere)
