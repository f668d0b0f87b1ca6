"""Processes that read through the cache as fast as they can, and check the answers."""

from __future__ import annotations

import random
import time
import traceback
from contextlib import nullcontext
from typing import Any

from tests.integration.cache.faults import failpoints
from tests.integration.cache.faults.process_setup import OWNERS, ProcessSetup
from tests.integration.cache.faults.staleness import StalenessChecker, any_question

#: Number of cached reads after one read of the truth.
ROUND = 8
_SECONDS_BETWEEN_REPORTS = 0.02
#: Each fifth entry is stored late, by up to this many seconds.
JITTER = 0.04
ONE_LATE_IN = 5
HITS = ("object_hits", "list_hits")
COUNTED = (
    *HITS, "object_misses", "list_misses", "l1_hits", "bypasses", "fills", "fills_lost", "repairs", "broken",
)  # fmt: skip


class Jitter:
    """Delays a process now and then where it does harm: while it holds rows that may be old."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._passed = 0
        # The point of the next delay: after the SQL, or before entries are stored.
        self._point = "filling"

    def __call__(self, point: str) -> None:
        if point == self._point:
            self._passed += 1
            if self._passed % ONE_LATE_IN == 0:
                time.sleep(self._dice.random() * JITTER)
                self._point = self._dice.choice(("filling", "queried"))


def counts() -> dict[str, int]:
    """Return the library's counters of this process."""
    from sharded_orm import runtime

    cache = runtime.cache()
    assert cache is not None
    totals = dict.fromkeys(COUNTED, 0)
    for label in ("faults.Item", "faults.Notice"):
        counted = cache.statistics.counted(cache.type_name(label))
        for field in COUNTED:
            totals[field] += counted[field]
    return totals


def hits(counted: dict[str, int]) -> int:
    return sum(counted[field] for field in HITS)


def read(setup: ProcessSetup, seed: str, stop: Any, preferred_owner: Any, reports: Any) -> None:
    """Read until ``stop`` and report; runs in the reader's process.

    :param preferred_owner: see :func:`_choose_owner`.
    """
    report: dict[str, Any] = {
        "reads": 0, "rounds": [0] * len(OWNERS), "hit_rounds": [0] * len(OWNERS), "stale": [], "changed": 0,
        "longest": 0.0, "counts": {}, "failure": "", "ended": False,
    }  # fmt: skip
    try:
        setup.begin(writes=False)
        _read(setup, random.Random(seed), stop, preferred_owner, reports, report)
    except (BrokenPipeError, ConnectionError):
        return  # nobody listens any more
    except Exception:  # the test must get any error
        report["failure"] = traceback.format_exc()
    report["ended"] = True
    reports.send(report)


def _choose_owner(preferred_owner: int, dice: random.Random) -> int:
    """Choose the owner whose rows are read next.

    :param preferred_owner: the owner to read most; -1: no preference; a smaller number excludes an
        owner (-2 excludes owner 0).
    """
    if preferred_owner >= 0 and dice.random() < 0.8:
        return preferred_owner
    number = dice.choice(OWNERS)
    while number == -2 - preferred_owner:
        number = dice.choice(OWNERS)
    return number


def _read(
    setup: ProcessSetup,
    dice: random.Random,
    stop: Any,
    preferred_owner: Any,
    reports: Any,
    report: dict[str, Any],
) -> None:
    from django.db import transaction

    from tests.integration.cache.faults.rows import ALIASES, Owner

    owners = [Owner(number) for number in OWNERS]
    checker = StalenessChecker(setup.address)
    failpoints.set_handler(Jitter(dice))
    failpoints.watch_queries(ALIASES)
    reported = time.monotonic()
    hits_before = 0
    while not stop.is_set():
        number = _choose_owner(preferred_owner.value, dice)
        before = checker.truth(number)
        # Half of the reads are in transactions, as in a view under ATOMIC_REQUESTS.
        in_transaction = dice.random() < 0.5
        with transaction.atomic(using=owners[number].alias) if in_transaction else nullcontext():
            for _ in range(ROUND):
                question = any_question(dice, number)
                began = time.monotonic()
                answer = question.ask(owners[number].rows())
                report["longest"] = max(report["longest"], time.monotonic() - began)
                problem = checker.problem(question, answer, before)
                if problem is not None and len(report["stale"]) < 20:
                    answer = question.ask(owners[number].rows())
                    again = checker.problem(question, answer, checker.truth(number))
                    report["stale"].append(f"{problem} Asked again: {again or 'right'}")
        report["reads"] += ROUND
        report["rounds"][number] += 1
        report["counts"] = counts()
        if hits(report["counts"]) > hits_before:
            hits_before = hits(report["counts"])
            report["hit_rounds"][number] += 1
        now = time.monotonic()
        if now - reported > _SECONDS_BETWEEN_REPORTS or report["stale"]:
            report["changed"] = checker.changed
            reports.send(report)
            reported = now
