"""Programs that die at one of their points: before or after a statement or commit."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tests.integration.imports.site import Site

#: Runs before a program. The process kills itself at the point ``dies_at``; ``point`` is the number so far.
_POINTS = """
import os, signal
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
point = 0
def pass_point():
    global point
    point += 1
    if point == {dies_at}:
        os.kill(os.getpid(), signal.SIGKILL)
def around(owner, name):
    method = getattr(owner, name)
    def wrapper(self, *args, **kwargs):
        pass_point()
        result = method(self, *args, **kwargs)
        pass_point()
        return result
    setattr(owner, name, wrapper)
around(CursorWrapper, "execute")
around(CursorWrapper, "executemany")
around(BaseDatabaseWrapper, "_commit")
"""


def die_at_each_point(
    site: Site,
    program: str,
    check: Callable[[int], None],
    *,
    before: Callable[[], object] = lambda: None,
    stride: int = 1,
) -> None:
    """Run ``program`` as often as it has points. Each process dies at another one.

    :param check: called after each death, with the number of the point.
    :param before: called before each process.
    :param stride: the distance of two points at which a process dies. If a program does the same on each of
        many shards, it dies at other points of each.
    """
    points = 0
    for _ in range(2):  # The first run places keys and gets ids, so it has more points.
        before()
        points = int(site.run(_POINTS.format(dies_at=0) + program + "\nprint(point)\n"))
    assert points > 60
    killed = 0
    for dies_at in range(1, points + 1, stride):
        before()
        done = site.python("run", site.preamble + _POINTS.format(dies_at=dies_at) + program)
        assert done.code in (0, -signal.SIGKILL), done.err
        killed += done.code == -signal.SIGKILL
        check(dies_at)
    # Where a key or block of ids is known already, there are fewer points.
    assert killed * stride > points * 0.9
