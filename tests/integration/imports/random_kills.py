"""Programs that work side by side until a timer kills each of them, without a chance to clean up."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence

from tests.integration.imports.site import Site
from tests.patience import PATIENCE

_TIMER = """
import random, signal
seed = {seed}
chance = random.Random(seed)
signal.setitimer(signal.ITIMER_REAL, {seconds})
"""


def die_at_any_time(
    site: Site,
    preamble: str,
    programs: Sequence[str],
    kills: int,
    chance: random.Random,
    longest: float = 0.5,
) -> Iterator[int]:
    """Run all programs at the same time, in one round after another, until enough were killed.

    Yields after each round how many processes were killed so far.

    :param preamble: runs before the timer starts, for example imports.
    :param programs: do not end by themselves. They have the variables ``seed`` and ``chance``.
    :param longest: how long a program runs at most, in seconds.
    """
    killed = 0
    while killed < kills:
        processes = [
            site.start(
                "run",
                preamble
                + _TIMER.format(seed=killed + number, seconds=chance.uniform(0.01, longest))
                + program,
            )
            for number, program in enumerate(programs)
        ]
        for process in processes:
            _, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == -signal.SIGALRM, err
            killed += 1
        yield killed
    print(f"{killed} processes were killed")
