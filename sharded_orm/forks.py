"""Help forked processes: recognise a fork, and do not disturb the parent's connections."""

from __future__ import annotations

import os

_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


# Count forks. Process ids alone do not tell processes apart, because a grandchild may get the process id of
# an ancestor that has ended.
os.register_at_fork(after_in_child=_forked)


def identity() -> tuple[int, int]:
    """Return a value that identifies this process and differs from the values in all its ancestors.

    The value consists of the process id and a count of forks. The count alone is not enough, because a
    fork by C code changes only the process id.
    """
    return os.getpid(), _forks


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
