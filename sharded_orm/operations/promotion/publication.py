"""Whether the map was published, asked of a source that may not answer, while writers wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from sharded_orm.exceptions import PromotionFailed, TopologyError
from sharded_orm.operations.promotion import recovery, switchover
from sharded_orm.operations.promotion.plan import PromotionPlan

#: Seconds for which a source that does not answer is asked what it holds.
LOOK_UP = 15.0
# Seconds between two times.
_INTERVAL = 1.0


def was_switched(
    plan: PromotionPlan,
    *,
    forced: bool,
    check: Callable[[], None],
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether the map of ``plan`` is published.

    A source that does not answer is asked again for :data:`LOOK_UP` seconds at most: not once more
    when the answer would take longer, as the last one did. What that means for writers is told
    before it is asked again.

    :param check: called before each time; raises if this process may not go on.
    :raises PromotionFailed: no answer: nothing may be undone, and nothing goes on.
    """
    begun, silent = clock(), False
    while True:
        check()
        asked = clock()
        try:
            return switchover.was_switched(plan)
        except (TopologyError, OSError) as exc:
            now = clock()
            if now + _INTERVAL + (now - asked) > begun + LOOK_UP:
                how_long = f"it was asked for {now - begun:.0f} s; {exc}"
                raise unsettled(plan, how_long, forced=forced) from exc
            if not silent:
                silent = True
                tell(
                    f"{exc} {recovery.refused(plan, forced=forced)} until it is known whether the"
                    f" new map was published: asks for up to {LOOK_UP:g} s"
                )
            sleep(_INTERVAL)


def unsettled(plan: PromotionPlan, why: object, *, forced: bool) -> PromotionFailed:
    """The error of a promotion that can neither go on nor be undone before the source answers."""
    return PromotionFailed(
        f"Whether the new map was published is not known ({why})."
        f" {recovery.refused(plan, forced=forced)} until that is settled, unless it was; none that"
        " was acknowledged is lost. When the source of the topology answers, run"
        f" {recovery.to_finish(plan.node, forced=forced)} to finish, or"
        f" {recovery.to_undo(plan.node)} to go back.",
        settled=False,
    )
