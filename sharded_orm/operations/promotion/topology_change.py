"""Change the topology document for a promotion, and find out whether it was changed.

To *switch* the topology is to publish a document in which the replica is the primary. The *source*
is the place where the document is stored.
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
    """Return whether the new primary of ``plan`` is the primary in ``document``.

    It must be the primary of all shards of the plan. Their ranges may differ from the ranges in the
    plan: if somebody has changed the topology after the promotion, 0 to 511 may have become 0 to
    255 and 256 to 511.
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

    In this document, the old primary is the replica of its former ranges. But after a forced
    promotion, these ranges have no replica. Return the document, which this process uses from now
    on.

    :param forced: whether the promotion does without the old primary, which is dead.
    :param confirm: called each time after the topology was read and before the changed topology is
        published. It raises an error if nothing may be published any more.
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
    """Check that the ranges on the old primary are still the same as in the plan.

    Call this before the promotion changes anything. It also shows that the source answers.

    :raises TopologyError: the source does not answer.
    :raises PromotionRefused: the ranges on the old primary have changed.
    """
    document = topology.current()
    if not is_switched(plan, document):
        _require_same(plan, document)


def was_switched(plan: PromotionPlan) -> bool:
    """Query the source whether the topology with the new primary of ``plan`` is published.

    :raises TopologyError: the source of the topology does not answer.
    """
    return is_switched(plan, topology.current())


def rule_out(plan: PromotionPlan) -> bool:
    """Ensure that the topology with the new primary of ``plan`` will never be published.

    Another process may be about to publish it. After this call, the source refuses that.

    :return: True if it will never be published, False if it is published already.
    :raises TopologyUnavailable: the source of the topology does not answer.
    """
    return topology.rule_out(
        partial(is_switched, plan), f"promotion in place of {plan.node} broken off"
    )


def require_writable(plan: PromotionPlan, *, forced: bool) -> None:
    """Check that a command can change the topology.

    For example, it cannot if the topology is written in the settings or in a file.

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
