"""A process after a fork: telling it from its parent, and leaving the parent's connections alone."""

from __future__ import annotations

import os

_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


# A child of a child may have the number of the first process, which has ended.
os.register_at_fork(after_in_child=_forked)


def identity() -> tuple[int, int]:
    """Differs from what any ancestor of this process would get.

    The number alone tells of a fork that did not go through Python.
    """
    return os.getpid(), _forks


def send_nowhere(descriptor: int) -> None:
    """Make what this process writes to a file descriptor vanish; the parent's stays.

    A driver that says goodbye on a socket that the fork copied ends the parent's session.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(nowhere, descriptor, inheritable=False)
    finally:
        os.close(nowhere)
