"""What can be done about a promotion that was broken off, as its journal, both servers and the
source of the topology are now. Reads only."""

from __future__ import annotations

from collections.abc import Iterator

from sharded_orm.exceptions import PromotionRefused, TopologyError
from sharded_orm.operations.promotion import preflight, switchover
from sharded_orm.operations.promotion.plan import PromotionPlan
from sharded_orm.operations.runs import journal


def to_finish(node: str, *, forced: bool) -> str:
    """The command that goes on, in quotes."""
    return f"'manage.py shards promote {node}{' --force' if forced else ''}'"


def to_undo(node: str) -> str:
    return f"'manage.py shards promote {node} --abort'"


def refused(plan: PromotionPlan, *, forced: bool) -> str:
    """What holds for writers between the fence and the new map; to be followed by "until"."""
    ranges = ", ".join(map(str, plan.moves))
    why = "is given up" if forced else "is read only"
    return f"{plan.node!r} {why}: writes to {ranges} are refused"


def ways_out(run: journal.JournalRun | journal.RunStatus) -> str:
    """Where a run was broken off, and which commands work now: finish it, undo it, or both.

    A login to each server, and one or two round trips to the source; up to five seconds for each
    of them that does not answer.
    """
    plan, forced = PromotionPlan.from_json(run.arguments), bool(run.arguments["force"])
    node, phase = plan.node, run.arguments["phase"]
    finish, undo = to_finish(node, forced=forced), to_undo(node)
    begin = f"the promotion that replaces {node!r} was broken off in the phase {phase!r}"
    published = phase == "switched"
    source = ""
    if not published:
        try:
            document = switchover.current()
        except (TopologyError, OSError) as exc:
            source = str(exc)
        else:
            published = switchover.switched(plan, document)
    if published:
        return f"{begin}. Its map is published, so it cannot be undone; finish it with {finish}"
    old, new, is_fenced = _look(plan)
    if is_fenced and not forced:
        begin += f". {refused(plan, forced=False)} until that is settled"
    if source and phase == "switching":
        return (
            f"{begin}. Whether its map was published is not known ({source}); when it answers,"
            f" finish it with {finish} or undo it with {undo}"
        )
    obstacles = list(_obstacles(plan, old, new, source, forced=forced))
    if not obstacles:
        return f"{begin}. Finish it with {finish} or undo it with {undo}"
    told = f"{begin}. It cannot be finished now: {'; '.join(obstacles)}. Undo it with {undo}"
    if forced and not (old is not None and preflight.is_silent(old)):
        told += f", and then promote in order with {to_finish(node, forced=False)}"
    elif old is not None and preflight.is_silent(old):
        told += f", and if {node!r} is dead, do without it with {to_finish(node, forced=True)}"
    return told


def _look(plan: PromotionPlan) -> tuple[PromotionRefused | None, PromotionRefused | None, bool]:
    """Why the old primary and the new one cannot be worked with, and whether the old one is
    fenced."""
    errors: list[PromotionRefused | None] = []
    is_fenced = False
    for name in (plan.node, plan.new):
        try:
            with preflight.operator(name) as server:
                if name == plan.node:
                    is_fenced = server.standing().read_only
        except PromotionRefused as exc:
            errors.append(exc)
        else:
            errors.append(None)
    return errors[0], errors[1], is_fenced


def _obstacles(
    plan: PromotionPlan,
    old: PromotionRefused | None,
    new: PromotionRefused | None,
    source: str,
    *,
    forced: bool,
) -> Iterator[str]:
    if new is not None:
        yield from new.problems
    if forced:
        if old is None or not preflight.is_silent(old):
            yield f"{plan.node!r} answers again, and was given up as dead"
    elif old is not None:
        yield from old.problems
    if source:
        yield source.rstrip(".")
