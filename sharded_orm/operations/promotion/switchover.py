"""The map: which document switches a promotion, and whether it was published."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sharded_orm import runtime
from sharded_orm.exceptions import PromotionRefused, TopologyConflict, TopologyReadOnly
from sharded_orm.operations import topology
from sharded_orm.operations.promotion.plan import PromotionPlan
from sharded_orm.topology.document import Document


def switched(plan: PromotionPlan, document: Document) -> bool:
    """Whether the map that ``plan`` publishes is there, or a later one: all shards have moved,
    however they are divided into ranges by now."""
    return all(
        primary in plan.new_names
        for (group, first, last), primary in _primaries(document).items()
        if any(
            group == move.group and first <= move.last and move.first <= last for move in plan.moves
        )
    )


def _primaries(document: Document) -> dict[tuple[str, int, int], str]:
    return {
        (group, *each["range"]): each["primary"]
        for group, entry in document.groups.items()
        for each in entry.get("RANGES", ())
    }


def switch(
    plan: PromotionPlan, *, forced: bool, confirm: Callable[[], None] = lambda: None
) -> Document:
    """Publish the topology in which the replica is the primary. Returns when it is in use here.

    The old primary becomes the replica of its ranges, unless it is dead.

    :param confirm: called after each time that the topology was read, and before what was made
        of it is published; raises if nothing must be published any more. What
        :func:`rule_out` does after that makes the publication fail.
    :raises PromotionRefused: somebody has changed which ranges there are on the old primary.
    """
    moves = {(move.group, move.first, move.last): move for move in plan.moves}

    def edit(document: Document) -> Document:
        confirm()
        if switched(plan, document):
            return document
        _require_same(plan, document)
        content = document.content()
        for group, entry in content["groups"].items():
            for each in entry.get("RANGES", ()):
                move = moves.get((group, *each["range"]))
                if move is not None:
                    each["primary"] = move.new
                    each["replica"] = None if forced else move.old
        return Document.from_content(content)

    how = "without it" if forced else "in order"
    return topology.change(edit, f"{plan.new} promoted in place of {plan.node}, {how}")


def _require_same(plan: PromotionPlan, document: Document) -> None:
    there = {span for span, name in _primaries(document).items() if name in plan.old_names}
    planned = {(move.group, move.first, move.last) for move in plan.moves}
    if there != planned:
        raise PromotionRefused(
            [
                f"the topology was changed meanwhile: the ranges on {plan.node!r} are now"
                f" {sorted(there)!r}, and this promotion began with {sorted(planned)!r}"
            ]
        )


def current() -> Document:
    """What the source holds.

    :raises TopologyError: it does not answer.
    """
    return topology.current()


def require_there(plan: PromotionPlan) -> None:
    """Ask the source, so that nothing is touched if it does not answer, or holds other ranges.

    :raises TopologyError: it does not answer.
    :raises PromotionRefused: somebody has changed which ranges there are on the old primary.
    """
    document = topology.current()
    if not switched(plan, document):
        _require_same(plan, document)


def was_switched(plan: PromotionPlan) -> bool:
    """Ask the source whether the switch was published; for one whose outcome is unknown."""
    return switched(plan, topology.current())


def rule_out(plan: PromotionPlan) -> bool:
    """Make sure that a switch which may be on its way cannot be published any more.

    Publishes the topology as it is under a new version: of two publications in the place of
    one version the source takes one.

    :return: False if it has been published already.
    :raises TopologyUnavailable: the source does not answer.
    """
    source = runtime.source()
    comment = f"promotion in place of {plan.node} broken off"
    while True:
        document = topology.current()
        if switched(plan, document):
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
