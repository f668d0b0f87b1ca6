"""The map, which is the topology document: switching it for a promotion, and reading it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sharded_orm import runtime
from sharded_orm.exceptions import PromotionRefused, TopologyConflict, TopologyReadOnly
from sharded_orm.operations import topology
from sharded_orm.operations.promotion.plan import PromotionPlan
from sharded_orm.topology.document import Document


def is_switched(plan: PromotionPlan, document: Document) -> bool:
    """Whether ``document`` is the map that ``plan`` publishes, or a later one.

    All shards of the plan have moved then, however they are divided into ranges by now.
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
        (group, *entry["range"]): entry["primary"]
        for group, options in document.groups.items()
        for entry in options.get("RANGES", ())
    }


def switch(
    plan: PromotionPlan, *, forced: bool, confirm: Callable[[], None] = lambda: None
) -> Document:
    """Publish the topology in which the replica is the primary. Returns when it is in use here.

    The old primary becomes the replica of its ranges, unless it is dead.

    :param confirm: called whenever the topology was read, before the changed topology is published;
        raises if nothing may be published any more. A later :func:`rule_out` makes the publication
        fail.
    :raises PromotionRefused: the ranges on the old primary have changed.
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
    """The topology that the source holds.

    :raises TopologyError: the source does not answer.
    """
    return topology.current()


def require_same_ranges(plan: PromotionPlan) -> None:
    """Check that the source answers and still has the ranges of the plan, before anything is
    touched.

    :raises TopologyError: the source does not answer.
    :raises PromotionRefused: the ranges on the old primary have changed.
    """
    document = topology.current()
    if not is_switched(plan, document):
        _require_same(plan, document)


def was_switched(plan: PromotionPlan) -> bool:
    """Ask the source whether the switch was published."""
    return is_switched(plan, topology.current())


def rule_out(plan: PromotionPlan) -> bool:
    """Make sure that a switch which may be on its way cannot be published any more.

    Publishes the present topology as a new version: if two publications replace the same version,
    the source accepts only one.

    :return: False if the switch has been published already.
    :raises TopologyUnavailable: the source does not answer.
    """
    source = runtime.source()
    comment = f"promotion in place of {plan.node} broken off"
    while True:
        document = topology.current()
        if is_switched(plan, document):
            return False
        version = document.version
        try:
            source.publish(document.at_version(version + 1), expected=version, comment=comment)
        except TopologyConflict:
            continue
        return True


def require_writable(plan: PromotionPlan, *, forced: bool) -> None:
    """:raises TopologyReadOnly: commands cannot switch the map; the message is what to do."""
    source = runtime.source()
    if source.writable:
        return
    try:
        switch(plan, forced=forced)
    except TopologyReadOnly as exc:
        raise TopologyReadOnly(
            f"{exc}\nA promotion makes this change while {plan.node!r} is fenced and"
            f" {plan.new!r} has all of it, so that no write is lost. With this source both is up to"
            " you: SET GLOBAL read_only = ON first."
        ) from exc


def as_text(plan: PromotionPlan) -> list[dict[str, Any]]:
    """The moves for a report."""
    return [
        {"group": m.group, "range": [m.first, m.last], "from": m.old, "to": m.new}
        for m in plan.moves
    ]
