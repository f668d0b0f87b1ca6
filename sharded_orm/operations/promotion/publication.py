"""Finding out whether a promotion's new map was published, even if the source answers only later.

The *map* is the topology document, and the *source* is the place where it is stored. Until the
answer is known, writes to the shards of the promotion are refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sharded_orm.exceptions import PromotionFailed, TopologyError
from sharded_orm.operations.promotion import recovery, switchover
from sharded_orm.operations.promotion.plan import PromotionPlan

#: Seconds for which a source of the topology that does not answer is asked again and again.
LOOK_UP = 15.0
# Seconds to wait before a source of the topology that did not answer is asked again.
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
    """Ask the source of the topology whether the new map of ``plan`` is published.

    If the source does not answer, ask again, for :data:`LOOK_UP` seconds at most. Each further
    question is expected to take as long as the one before it. If the question would end too late,
    it is not asked. Before the second question, the operator is told what the delay means for
    writers.

    :param forced: whether the promotion does without the old primary; used in messages.
    :param check: called before each question; raises an error if this process may not go on.
    :param tell: called with a line for the operator.
    :raises PromotionFailed: the source did not answer. The caller may neither undo the promotion
        nor go on with it.
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
    """Return the error for a promotion that must wait until the source of the topology answers.

    Until then, the promotion can neither go on nor be undone.

    :param why: the error that was raised when the source was asked, or a text about it.
    """
    return PromotionFailed(
        f"Whether the new map was published is not known ({why})."
        f" {recovery.refused_phrase(plan, forced=forced)} until that is settled, unless it was; none that"
        " was acknowledged is lost. When the source of the topology answers, run"
        f" {recovery.to_finish(plan.node, forced=forced)} to finish, or"
        f" {recovery.to_undo(plan.node)} to go back.",
        settled=False,
    )
