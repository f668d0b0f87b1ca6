"""Find out whether the new topology document of a promotion was published.

This is not known if the answer to the publication got lost, or if the process was killed. The
*source*, the place where the document is stored, is queried again and again for some seconds.
Meanwhile, writes to the shards of the promotion are refused, because it is not known which of the
two servers is their primary.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sharded_orm.exceptions import TopologyError
from sharded_orm.operations.exceptions import PromotionFailed
from sharded_orm.operations.promotion import recovery, topology_change
from sharded_orm.operations.promotion.plan import PromotionPlan

#: If the source of the topology does not answer, the query is repeated for this number of seconds
#: at most.
LOOK_UP = 15.0
# The number of seconds to wait between two queries.
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
    """Query the source of the topology whether the new document of ``plan`` is published.

    If the source does not answer, the query is repeated, for :data:`LOOK_UP` seconds at most. To
    keep this limit, each query is expected to take as long as the query before, and is not sent if
    it would end too late. After the first failed query, the operator is told which writes are
    refused meanwhile.

    :param forced: whether the promotion does without the old primary; used in messages.
    :param check: called before each query; raises an error if this process must not continue.
    :param tell: called with a line for the operator.
    :raises PromotionFailed: the source did not answer. The caller must neither undo the promotion
        nor continue it.
    """
    first_try, is_reported = clock(), False
    while True:
        check()
        asked_at = clock()
        try:
            return topology_change.was_switched(plan)
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

    Until then, the promotion can be neither continued nor undone.

    :param why: the error of the query to the source, or a text about it.
    """
    return PromotionFailed(
        f"Whether the new map was published is not known ({why})."
        f" {recovery.refused_phrase(plan, forced=forced)} until that is settled, unless it was; none that"
        " was acknowledged is lost. When the source of the topology answers, run"
        f" {recovery.to_finish(plan.node, forced=forced)} to finish, or"
        f" {recovery.to_undo(plan.node)} to go back.",
        settled=False,
    )
