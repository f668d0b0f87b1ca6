"""Change the topology document for a promotion, and find out whether it was changed.

The document is called the *map* here; the *source* is the place where it is stored. To *switch* the
map is to publish one in which the replica is the primary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sharded_orm import runtime
from sharded_orm.exceptions import TopologyReadOnly
from sharded_orm.operations import topology
from sharded_orm.operations.exceptions import PromotionRefused
from sharded_orm.operations.promotion.plan import PromotionPlan
from sharded_orm.topology.document import Document
from sharded_orm.topology.range_entries import primary_of


def is_switched(plan: PromotionPlan, document: Document) -> bool:
    """Return whether ``document`` is the topology document that ``plan`` publishes, or a later one.

    This is so if the new primary is the primary of all shards of the plan. The ranges may differ
    from those of the plan, because a later document may divide the shards differently.
    """
    return all(
        primary in plan.new_names
        for (group, first, last), primary in _primaries(document).items()
        if any(
            group == move.group and first <= move.last and move.first <= last for move in plan.moves
        )
    )


def _primaries(document: Document) -> dict[tuple[str, int, int], str]:
    return {
        (group, *entry["range"]): primary_of(entry)
        for group, options in document.groups.items()
        for entry in options.get("RANGES", ())
    }


def switch(
    plan: PromotionPlan, *, forced: bool, confirm: Callable[[], None] = lambda: None
) -> Document:
    """Publish the topology document in which the replica is the primary.

    The old primary becomes the replica of its ranges. With ``forced``, these ranges get no replica.
    Return the document, which this process uses from now on.

    :param forced: whether the promotion does without the old primary.
    :param confirm: called each time after the topology was read and before the changed topology is
        published. It raises an error if nothing may be published. If another process calls
        :func:`rule_out` after the topology was read, the publication fails.
    :raises PromotionRefused: the ranges on the old primary have changed.
    :raises TopologyError: the document was not published, or the answer got lost.
    """
    moves = {(move.group, move.first, move.last): move for move in plan.moves}

    def edit(document: Document) -> Document:
        confirm()
        if is_switched(plan, document):
            return document
        _require_same(plan, document)
        content = document.content()
        for group, options in content["groups"].items():
            for entry in options.get("RANGES", ()):
                move = moves.get((group, *entry["range"]))
                if move is not None:
                    entry["primary"] = move.new
                    entry["replica"] = None if forced else move.old
        return Document.from_content(content)

    manner = "without it" if forced else "in order"
    return topology.change(edit, f"{plan.new} promoted in place of {plan.node}, {manner}")


def _require_same(plan: PromotionPlan, document: Document) -> None:
    current_spans = {span for span, name in _primaries(document).items() if name in plan.old_names}
    planned_spans = {(move.group, move.first, move.last) for move in plan.moves}
    if current_spans != planned_spans:
        raise PromotionRefused(
            [
                f"the topology was changed meanwhile: the ranges on {plan.node!r} are now"
                f" {sorted(current_spans)!r}, and this promotion began with {sorted(planned_spans)!r}"
            ]
        )


def current() -> Document:
    """Return the topology document that is published now. This process may still use an older one.

    :raises TopologyError: the source of the topology does not answer.
    """
    return topology.current()


def require_same_ranges(plan: PromotionPlan) -> None:
    """Check that the source of the topology answers, and that the ranges to promote are unchanged.

    Call this before the promotion changes anything.

    :raises TopologyError: the source does not answer.
    :raises PromotionRefused: the ranges on the old primary have changed.
    """
    document = topology.current()
    if not is_switched(plan, document):
        _require_same(plan, document)


def was_switched(plan: PromotionPlan) -> bool:
    """Return whether the change of the topology that ``plan`` describes is published.

    :raises TopologyError: the source of the topology does not answer.
    """
    return is_switched(plan, topology.current())


def rule_out(plan: PromotionPlan) -> bool:
    """Ensure that the change of the topology that ``plan`` describes will never be published.

    :return: True if the change is ruled out, False if it is published already.
    :raises TopologyUnavailable: the source of the topology does not answer.
    """
    return topology.rule_out(
        partial(is_switched, plan), f"promotion in place of {plan.node} broken off"
    )


def require_writable(plan: PromotionPlan, *, forced: bool) -> None:
    """Check that the source of the topology accepts changes by commands.

    :raises TopologyReadOnly: commands cannot change the source. The message tells the operator what
        to do instead.
    """
    source = runtime.source()
    if source.writable:
        return
    to_fence = plan.server_class.texts.to_fence
    try:
        switch(plan, forced=forced)
    except TopologyReadOnly as exc:
        raise TopologyReadOnly(
            f"{exc}\nA promotion makes this change while {plan.node!r} is fenced and"
            f" {plan.new!r} has all of it, so that no write is lost. With this source both is up to"
            f" you: {to_fence} first."
        ) from exc


def as_text(plan: PromotionPlan) -> list[dict[str, Any]]:
    """Return the plan's moves as JSON values, for a report."""
    return [
        {"group": m.group, "range": [m.first, m.last], "from": m.old, "to": m.new}
        for m in plan.moves
    ]
