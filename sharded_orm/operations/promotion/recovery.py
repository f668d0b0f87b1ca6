"""Tell an operator how to finish or undo a promotion that was interrupted.

The advice depends on the journal, on the state of both servers, and on whether the new topology
document is published. This module only reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from sharded_orm.exceptions import TopologyError
from sharded_orm.operations.exceptions import PromotionRefused
from sharded_orm.operations.promotion import preflight, topology_change
from sharded_orm.operations.promotion.plan import PUBLISHED, PromotionPlan
from sharded_orm.operations.runs import journal


def to_finish(node: str, *, forced: bool) -> str:
    """Return the command, in quotes, that resumes and finishes the promotion.

    :param node: the node name of the old primary.
    """
    return f"'manage.py shards promote {node}{' --force' if forced else ''}'"


def to_undo(node: str) -> str:
    return f"'manage.py shards promote {node} --abort'"


def refused_phrase(plan: PromotionPlan, *, forced: bool) -> str:
    """Return a phrase that says which writes are refused during the promotion, and why.

    For example: "'db1' is read only: writes to photos 0-511 are refused". The caller appends how
    long this lasts, such as "until that is settled".
    """
    ranges = ", ".join(map(str, plan.moves))
    why = "is given up" if forced else plan.server_class.texts.is_fenced
    return f"{plan.node!r} {why}: writes to {ranges} are refused"


def ways_out(run: journal.JournalRun | journal.RunStatus) -> str:
    """Return sentences that say in which phase a promotion was interrupted, and what to do now.

    They contain the command that finishes the promotion, or the command that undoes it, or both.

    :param run: the promotion's run in the journal.

    Cost: a login to each of the two servers, and one or two round trips to the source of the
    topology. If a server or the source does not answer, this takes up to five seconds for each.
    """
    plan, forced = PromotionPlan.from_json(run.arguments), bool(run.arguments["force"])
    node, phase = plan.node, run.arguments["phase"]
    finish, undo = to_finish(node, forced=forced), to_undo(node)
    text = f"the promotion that replaces {node!r} was broken off in the phase {phase!r}"
    is_published = phase in PUBLISHED
    source_error = ""
    if not is_published:
        try:
            document = topology_change.current()
        except (TopologyError, OSError) as exc:
            source_error = str(exc)
        else:
            is_published = topology_change.is_switched(plan, document)
    if is_published:
        return f"{text}. Its map is published, so it cannot be undone; finish it with {finish}"
    old_error, new_error, is_fenced = _check_servers(plan)
    if is_fenced and not forced:
        text += f". {refused_phrase(plan, forced=False)} until that is settled"
    if source_error and phase == "switching":
        return (
            f"{text}. Whether its map was published is not known ({source_error}); when it answers,"
            f" finish it with {finish} or undo it with {undo}"
        )
    obstacles = list(_obstacles(plan, old_error, new_error, source_error, forced=forced))
    if not obstacles:
        return f"{text}. Finish it with {finish} or undo it with {undo}"
    advice = f"{text}. It cannot be finished now: {'; '.join(obstacles)}. Undo it with {undo}"
    is_silent = old_error is not None and preflight.is_silent(plan, old_error)
    if forced and not is_silent:
        advice += f", and then promote in order with {to_finish(node, forced=False)}"
    elif is_silent:
        advice += f", and if {node!r} is dead, do without it with {to_finish(node, forced=True)}"
    return advice


def _check_servers(
    plan: PromotionPlan,
) -> tuple[PromotionRefused | None, PromotionRefused | None, bool]:
    """Log in to the old and to the new primary, to find out whether they answer.

    Return three values: the error of the login to the old primary, the error of the login to the
    new primary (each None if the login succeeded), and whether the old primary refuses writes.
    """
    errors: list[PromotionRefused | None] = []
    is_fenced = False
    for name in (plan.node, plan.new):
        try:
            with preflight.operator(name, plan) as server:
                if name == plan.node:
                    is_fenced = server.status().read_only
        except PromotionRefused as exc:
            errors.append(exc)
        else:
            errors.append(None)
    return errors[0], errors[1], is_fenced


def _obstacles(
    plan: PromotionPlan,
    old_error: PromotionRefused | None,
    new_error: PromotionRefused | None,
    source_error: str,
    *,
    forced: bool,
) -> Iterator[str]:
    if new_error is not None:
        yield from new_error.problems
    if forced:
        if old_error is None or not preflight.is_silent(plan, old_error):
            yield f"{plan.node!r} answers again, and was given up as dead"
    elif old_error is not None:
        yield from old_error.problems
    if source_error:
        yield source_error.rstrip(".")
