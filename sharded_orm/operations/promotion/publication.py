"""Whether the new map was published: asks the source, which may not answer, while writers wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from sharded_orm.exceptions import PromotionFailed, TopologyError
from sharded_orm.operations.promotion import recovery, switchover
from sharded_orm.operations.promotion.plan import PromotionPlan

#: Seconds for which a source that does not answer is asked again.
LOOK_UP = 15.0
# Seconds between two questions.
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

    A source that does not answer is asked again for :data:`LOOK_UP` seconds at most. It is not
    asked again if another question, as long as the last, would exceed that. Before the second
    question, the operator learns what the delay means for writers.

    :param check: called before each question; raises if this process may not go on.
    :param tell: called with a line for the operator.
    :raises PromotionFailed: the source did not answer: nothing may be undone, and nothing goes on.
    """
    first_try, is_reported = clock(), False
    while True:
        check()
        asked_at = clock()
        try:
            return switchover.was_switched(plan)
        except (TopologyError, OSError) as exc:
            now = clock()
            if now + _INTERVAL + (now - asked_at) > first_try + LOOK_UP:
                how_long = f"it was asked for {now - first_try:.0f} s; {exc}"
                raise unsettled_error(plan, how_long, forced=forced) from exc
            if not is_reported:
                is_reported = True
                tell(
                    f"{exc} {recovery.refused_phrase(plan, forced=forced)} until it is known whether the"
                    f" new map was published: asks for up to {LOOK_UP:g} s"
                )
            sleep(_INTERVAL)


def unsettled_error(plan: PromotionPlan, why: object, *, forced: bool) -> PromotionFailed:
    """The error of a promotion that can neither go on nor be undone until the source answers."""
    return PromotionFailed(
        f"Whether the new map was published is not known ({why})."
        f" {recovery.refused_phrase(plan, forced=forced)} until that is settled, unless it was; none that"
        " was acknowledged is lost. When the source of the topology answers, run"
        f" {recovery.to_finish(plan.node, forced=forced)} to finish, or"
        f" {recovery.to_undo(plan.node)} to go back.",
        settled=False,
    )
