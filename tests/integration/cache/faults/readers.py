"""Processes that read through the cache as fast as they can, and judge what they get."""

from __future__ import annotations

import random
import time
import traceback
from typing import Any

from tests.integration.cache.faults import failpoints
from tests.integration.cache.faults.judge import Judge, any_question
from tests.integration.cache.faults.world import OWNERS, World

#: Cached reads after one look at the truth.
ROUND = 8
_SECONDS_BETWEEN_REPORTS = 0.02
#: Each fifth entry to be stored is up to so late.
JITTER = 0.04
ONE_LATE_IN = 5
HITS = ("object_hits", "list_hits")
COUNTED = (
    *HITS, "object_misses", "list_misses", "l1_hits", "bypasses", "fills", "fills_lost", "repairs", "broken",
)  # fmt: skip


class Jitter:
    """Is slow now and then where a late process does harm: with rows that are old already."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._passed = 0
        # Where: after the SQL, or when all is ready to be stored.
        self._point = "filling"

    def __call__(self, point: str) -> None:
        if point == self._point:
            self._passed += 1
            if self._passed % ONE_LATE_IN == 0:
                time.sleep(self._dice.random() * JITTER)
                self._point = self._dice.choice(("filling", "queried"))


def counts() -> dict[str, int]:
    """What the library has counted in this process."""
    from sharded_orm import runtime

    cache = runtime.cache()
    assert cache is not None
    found = dict.fromkeys(COUNTED, 0)
    for label in ("faults.Item", "faults.Notice"):
        counted = cache.statistics.counted(cache.type_name(label))
        for field in COUNTED:
            found[field] += counted[field]
    return found


def hits(counted: dict[str, int]) -> int:
    return sum(counted[field] for field in HITS)


def read(world: World, seed: str, stop: Any, focus: Any, reports: Any) -> None:
    """The life of a reader.

    :param focus: see :func:`_whose`.
    """
    told: dict[str, Any] = {
        "reads": 0, "rounds": [0] * len(OWNERS), "hit_rounds": [0] * len(OWNERS), "stale": [], "changed": 0,
        "longest": 0.0, "counts": {}, "failure": "", "ended": False,
    }  # fmt: skip
    try:
        world.begin(writes=False)
        _read(world, random.Random(seed), stop, focus, reports, told)
    except (BrokenPipeError, ConnectionError):
        return  # nobody listens any more
    except Exception:  # whatever it is, the test is told
        told["failure"] = traceback.format_exc()
    told["ended"] = True
    reports.send(told)


def _whose(focus: int, dice: random.Random) -> int:
    """Whose rows to read.

    :param focus: the owner whose rows are to be read most; -1 for nobody; less for the one
        whose rows are to be left alone (-2 for owner 0).
    """
    if focus >= 0 and dice.random() < 0.8:
        return focus
    number = dice.choice(OWNERS)
    while number == -2 - focus:
        number = dice.choice(OWNERS)
    return number


def _read(
    world: World, dice: random.Random, stop: Any, focus: Any, reports: Any, told: dict[str, Any]
) -> None:
    from tests.integration.cache.faults.rows import ALIASES, Owner

    owners = [Owner(number) for number in OWNERS]
    judge = Judge(world.mariadb)
    failpoints.set_handler(Jitter(dice))
    failpoints.watch_queries(ALIASES)
    reported = time.monotonic()
    hits_before = 0
    while not stop.is_set():
        number = _whose(focus.value, dice)
        before = judge.truth(number)
        for _ in range(ROUND):
            question = any_question(dice, number)
            began = time.monotonic()
            answer = question.ask(owners[number].rows())
            told["longest"] = max(told["longest"], time.monotonic() - began)
            wrong = judge.verdict(question, answer, before)
            if wrong is not None and len(told["stale"]) < 20:
                answer = question.ask(owners[number].rows())
                again = judge.verdict(question, answer, judge.truth(number))
                told["stale"].append(f"{wrong} Asked again: {again or 'right'}")
        told["reads"] += ROUND
        told["rounds"][number] += 1
        told["counts"] = counts()
        if hits(told["counts"]) > hits_before:
            hits_before = hits(told["counts"])
            told["hit_rounds"][number] += 1
        now = time.monotonic()
        if now - reported > _SECONDS_BETWEEN_REPORTS or told["stale"]:
            told["changed"] = judge.changed
            reports.send(told)
            reported = now
