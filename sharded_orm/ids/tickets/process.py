"""Telling this process from the one that it was forked from."""

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
