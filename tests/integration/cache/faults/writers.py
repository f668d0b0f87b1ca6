"""Processes that change rows all the time, and are killed now and then."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.integration.cache.faults import failpoints
from tests.integration.cache.faults.process_setup import LANES, OWNERS, ProcessSetup

#: Average seconds between two transactions of a writer.
PACE = 0.04
_ONE_ROLLBACK_IN = 10
#: Shares of writes in autocommit, of writes to all owners of a shard at once, of writes in two
#: transactions that end together, and of writes in all lanes of an owner.
_ALONE, _SWEEPS, _TOGETHER, _IN_ALL_LANES = 0.2, 0.05, 0.05, 0.15
_SECONDS_BETWEEN_REPORTS = 0.05
POINTS = ("marking", "committing", "closing", "half")


class SelfKill:
    """Kills its process at one in so many points, in the middle of its work."""

    def __init__(self, dice: random.Random, one_in: int) -> None:
        self._dice, self._one_in = dice, one_in

    def __call__(self, point: str) -> None:
        if self._one_in and point in POINTS and not self._dice.randrange(self._one_in):
            os.kill(os.getpid(), signal.SIGKILL)


#: Number of lost writes by error.
errors: Counter[str] = Counter()


def outcome(write: Callable[[], None]) -> str:
    """Run ``write`` and return the name of its outcome."""
    from django.db import DatabaseError, InterfaceError, close_old_connections

    from sharded_orm.exceptions import CacheUnavailable
    from tests.integration.cache.faults.rows import Rollback

    try:
        write()
    except Rollback:
        return "rollbacks"
    except CacheUnavailable:
        return "refused"
    except (DatabaseError, InterfaceError) as exc:
        # A deadlock, or a connection that was killed. Clean up as at the end of a request.
        close_old_connections()
        errors[str(exc)[:60]] += 1
        return "lost"
    return "commits"


def write(
    setup: ProcessSetup, seed: str, one_in: int, stop: Any, preferred_owner: Any, reports: Any
) -> None:
    """Write until ``stop`` and report; runs in the writer's process.

    :param one_in: the process kills itself at one of so many points; 0 for never.
    """
    report: dict[str, Any] = {
        "commits": 0, "rollbacks": 0, "refused": 0, "lost": 0, "errors": {}, "failure": "", "ended": False,
    }  # fmt: skip
    try:
        setup.begin(writes=True)
        _write(random.Random(seed), one_in, stop, reports, report)
    except (BrokenPipeError, ConnectionError):
        return
    except Exception:  # the test must get any error
        report["failure"] = traceback.format_exc()
    report["ended"] = True
    reports.send(report)


def _any_write(owners: list[Any], dice: random.Random) -> Callable[[], None]:
    from tests.integration.cache.faults.rows import WORKS, sweep, transact, transact_together

    keep = bool(dice.randrange(_ONE_ROLLBACK_IN))
    owner = dice.choice(owners)
    kind = dice.random()
    if kind < _ALONE:
        return lambda: owner.write_in_autocommit(dice)
    lane = dice.choice(LANES)
    if kind < _ALONE + _SWEEPS and owner.number:
        # In the order in which other writers take the locks.
        several = [other for other in owners if other.number and other.alias == owner.alias]
        return lambda: transact(several, (lane,), lambda: sweep(several, lane, dice), keep=keep)
    if kind < _ALONE + _SWEEPS + _TOGETHER:
        several = sorted(dice.sample(owners[1:], 2), key=lambda other: int(other.number))
        name = dice.choice(WORKS)
        return lambda: transact_together(
            several, lane, lambda other: getattr(other, name)(lane, dice), keep=keep
        )
    lanes = LANES if dice.random() < _IN_ALL_LANES else (lane,)

    def work() -> None:
        for lane in lanes:
            getattr(owner, dice.choice(WORKS))(lane, dice)

    return lambda: transact((owner,), lanes, work, keep=keep)


def _write(
    dice: random.Random, one_in: int, stop: Any, reports: Any, report: dict[str, Any]
) -> None:
    from tests.integration.cache.faults.rows import Owner

    owners = [Owner(number) for number in OWNERS]
    failpoints.set_handler(SelfKill(dice, one_in))
    reported = 0.0
    while not stop.is_set():
        report[outcome(_any_write(owners, dice))] += 1
        now = time.monotonic()
        if now - reported > _SECONDS_BETWEEN_REPORTS:
            reports.send({**report, "errors": dict(errors)})
            reported = now
        # The pace of a site that reads more than it writes.
        time.sleep(dice.random() * 2 * PACE)
