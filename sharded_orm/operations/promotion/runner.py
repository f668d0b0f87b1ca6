"""Promotions as an operator asks for them: check, do or go on, undo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sharded_orm import runtime
from sharded_orm.exceptions import PromotionRefused, TopologyError
from sharded_orm.operations.promotion import preflight, recovery, switchover
from sharded_orm.operations.promotion.execution import Promotion
from sharded_orm.operations.promotion.plan import PromotionPlan, find_plan
from sharded_orm.operations.promotion.preflight import Findings, Loss
from sharded_orm.operations.promotion.record import Tell
from sharded_orm.operations.promotion.report import PromotionOptions, PromotionReport
from sharded_orm.operations.runs import journal

KIND: Final = "promote"
#: One promotion at a time: two could name the same server by different names.
SUBJECT: Final = "primaries"

Confirm = Callable[[PromotionPlan, Loss], bool]


def check(
    node: str, *, to: str | None = None, options: PromotionOptions | None = None
) -> PromotionReport:
    """Whether ``node`` could be replaced by its replica now. Changes nothing.

    :raises PromotionRefused: no, or another one was broken off; lists all reasons.
    :raises TopologyReadOnly: the topology is not changed by commands.
    :raises TopologyError: its source does not answer.
    :raises JournalMissing: the global database is not migrated.
    """
    options = options or PromotionOptions()
    last = journal.last_run(KIND, SUBJECT)
    if last is not None and last.state == "broken off" and _has_begun(last):
        raise PromotionRefused([recovery.ways_out(last)])
    if last is not None and last.held:
        node_now = last.arguments["node"]
        raise PromotionRefused([f"one that replaces {node_now!r} is under way, by {last.holder}"])
    plan = _planned(node, to)
    switchover.require_writable(plan, forced=options.force)
    found = _examined(plan, options)
    return PromotionReport(plan, "checked", options.force, loss=found.loss, warnings=found.warnings)


def promote(
    node: str,
    *,
    to: str | None = None,
    options: PromotionOptions | None = None,
    confirm: Confirm | None = None,
    tell: Tell = lambda line: None,
) -> PromotionReport:
    """Replace ``node`` as a primary by its replica, for all its ranges (P13).

    No write that was acknowledged is lost. Writers are refused from the fence until they know
    the new map; readers are not disturbed. A promotion that was broken off is resumed.

    :param to: what the replica must be; None takes the one that the ranges name.
    :param confirm: asked before a forced promotion, which loses writes; None for yes.
    :param tell: called with a line for each phase.
    :raises PromotionRefused: the checks failed, and nothing was touched.
    :raises PromotionFailed: something went wrong; the message tells whether it was undone.
    :raises OperationHeld: another promotion is under way.
    """
    options = options or PromotionOptions()
    with journal.hold_run(KIND, SUBJECT, {"node": node, "force": options.force}) as run:
        try:
            promotion = _resumed(run, node, options, tell)
            if promotion is None:
                promotion = _begun(run, node, to, options, confirm, tell)
        except (PromotionRefused, TopologyError) as exc:
            if not _has_begun(run):
                run.finish("refused", str(exc))
            raise
        return promotion.run_to_end()


def abort(node: str, *, tell: Tell = lambda line: None) -> PromotionReport | None:
    """Undo the promotion that replaces ``node`` and was broken off; None if there is none.

    :raises PromotionFailed: it cannot be undone any more, or a server does not answer.
    """
    last = journal.last_run(KIND, SUBJECT)
    if last is None or last.finished_at is not None or last.arguments["node"] != node:
        return None
    with journal.hold_run(KIND, SUBJECT, {"node": node, "force": False}) as run:
        if not _has_begun(run):
            run.finish("abandoned")
            return None
        promotion = Promotion(run, PromotionOptions(force=bool(run.arguments["force"])), tell)
        return promotion.abort()


def _has_begun(run: journal.JournalRun | journal.RunStatus) -> bool:
    """Whether anything may have been touched."""
    return bool(run.arguments.get("phase", "checked") != "checked")


def _planned(node: str, to: str | None) -> PromotionPlan:
    # Not by a last good copy, nor by what a push has not brought yet.
    runtime.refresh()
    return find_plan(runtime.topology(), node, to)


def _examined(plan: PromotionPlan, options: PromotionOptions) -> Findings:
    found = preflight.examine(plan, force=options.force, timeout=options.timeout)
    if found.problems:
        raise PromotionRefused(found.problems)
    return found


def _resumed(
    run: journal.JournalRun, node: str, options: PromotionOptions, tell: Tell
) -> Promotion | None:
    if not _has_begun(run):
        return None
    if (run.arguments["node"], run.arguments["force"]) != (node, options.force):
        raise PromotionRefused([recovery.ways_out(run)])
    tell(f"goes on with run {run.id}, which was broken off in the phase {run.arguments['phase']!r}")
    return Promotion(run, options, tell)


def _begun(
    run: journal.JournalRun,
    node: str,
    to: str | None,
    options: PromotionOptions,
    confirm: Confirm | None,
    tell: Tell,
) -> Promotion:
    plan = _planned(node, to)
    switchover.require_writable(plan, forced=options.force)
    found = _examined(plan, options)
    if found.loss is not None and confirm is not None and not confirm(plan, found.loss):
        raise PromotionRefused(["it was not confirmed"])
    assert found.new is not None
    assert found.link is not None
    run.note(
        **plan.to_json(),
        force=options.force,
        phase="checked",
        link=found.link.name,
        was={
            "old": found.old is not None and found.old.read_only,
            "new": found.new.read_only,
        },
        position="",
        loss=found.loss and [found.loss.received, found.loss.executed, found.loss.idle],
        warnings=found.warnings,
    )
    return Promotion(run, options, tell)
