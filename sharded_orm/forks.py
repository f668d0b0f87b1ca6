"""Help forked processes: recognise a fork, and do not disturb the parent's connections."""

from __future__ import annotations

import os

_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


# Count forks, because process ids are reused: a grandchild may have the id of an ended ancestor.
os.register_at_fork(after_in_child=_forked)


def identity() -> tuple[int, int]:
    """Return a value that identifies this process: in each of its ancestors, the value is another.

    It consists of the process id and a count of forks. The count alone is not enough: a fork by C code
    changes only the process id.
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
