"""Check, execute, resume or undo a promotion. The operator's commands call these functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sharded_orm import runtime
from sharded_orm.exceptions import TopologyError
from sharded_orm.operations.exceptions import PromotionRefused
from sharded_orm.operations.promotion import preflight, recovery, topology_change
from sharded_orm.operations.promotion.execution import Promotion
from sharded_orm.operations.promotion.plan import PromotionPlan, find_plan
from sharded_orm.operations.promotion.preflight import Findings, Loss
from sharded_orm.operations.promotion.record import Tell
from sharded_orm.operations.promotion.report import PromotionOptions, PromotionReport
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.conflicts import refuse_conflicts

KIND: Final = "promote"
#: The subject of all promotions in the journal. Only one operation with the same kind and subject
#: can run at a time, so only one promotion can. If the node's name were the subject, two promotions
#: of one server could run at the same time, because a server may have two node names.
SUBJECT: Final = "primaries"

Confirm = Callable[[PromotionPlan, Loss], bool]


def check(
    node: str, *, to: str | None = None, options: PromotionOptions | None = None
) -> PromotionReport:
    """Check whether the replica of ``node`` could replace ``node`` now.

    Changes nothing, with one exception: if a transaction in two phases was interrupted and its
    outcome is decided, its prepared parts are committed or rolled back.

    :param to: the node that must be the replica; None accepts the replica that the topology names.
    :raises PromotionRefused: the replica could not replace ``node``, or another promotion is under
        way or was broken off. The message lists all reasons.
    :raises TopologyReadOnly: commands cannot change the topology.
    :raises TopologyError: the source of the topology does not answer.
    :raises JournalMissing: the global database is not migrated.
    """
    options = options or PromotionOptions()
    last = journal.last_run(KIND, SUBJECT)
    if last is not None and last.state == "broken off" and _may_have_changed(last):
        raise PromotionRefused([recovery.ways_out(last)])
    if last is not None and last.held:
        node_now = last.arguments["node"]
        raise PromotionRefused([f"one that replaces {node_now!r} is under way, by {last.holder}"])
    plan = _find_plan(node, to)
    topology_change.require_writable(plan, forced=options.force)
    findings = _require_checks(plan, options)
    return PromotionReport(
        plan, "checked", options.force, loss=findings.loss, warnings=findings.warnings
    )


def promote(
    node: str,
    *,
    to: str | None = None,
    options: PromotionOptions | None = None,
    confirm: Confirm | None = None,
    tell: Tell = lambda line: None,
) -> PromotionReport:
    """Replace the primary server ``node`` by its replica (as at Pinterest, P13).

    The replica becomes the primary of all ranges of shards on ``node``. No acknowledged write is
    lost, unless ``options.force`` is set. During the promotion, the old primary refuses writes. A
    process can write to these shards again when it uses the new topology document, which names the
    new primary. On PostgreSQL, reads are refused for the same time; on MariaDB, they are not
    disturbed. If an earlier promotion of ``node`` was interrupted, it is resumed.

    :param to: the node that must be the replica; None accepts the replica that the topology names.
    :param confirm: called before a forced promotion, which loses writes; returns whether to
        continue. None means to continue without a question.
    :param tell: called with a line for the operator in each phase.
    :raises PromotionRefused: the checks failed, and nothing was touched; or another promotion was
        broken off, and must be finished or undone first.
    :raises PromotionFailed: a phase failed; the message says whether everything was undone.
    :raises OperationHeld: another promotion is under way.
    """
    options = options or PromotionOptions()
    with journal.hold_run(KIND, SUBJECT, {"node": node, "force": options.force}) as run:
        refuse_conflicts(run, only_held=options.force)
        try:
            promotion = _resume(run, node, options, tell)
            if promotion is None:
                promotion = _begin(run, node, to, options, confirm, tell)
        except (PromotionRefused, TopologyError) as exc:
            if not _may_have_changed(run):
                run.finish("refused", str(exc))
            raise
        return promotion.run_to_end()


def abort(node: str, *, tell: Tell = lambda line: None) -> PromotionReport | None:
    """Undo the unfinished promotion that replaces ``node``. Return the report.

    Return None if there is no such promotion, or if it has changed nothing yet.

    :raises PromotionFailed: the promotion cannot be undone any more, or the source of the topology
        does not answer.
    :raises OperationHeld: another promotion is under way.
    """
    last = journal.last_run(KIND, SUBJECT)
    if last is None or last.finished_at is not None or last.arguments["node"] != node:
        return None
    with journal.hold_run(KIND, SUBJECT, {"node": node, "force": False}) as run:
        if not _may_have_changed(run):
            run.finish("abandoned")
            return None
        promotion = Promotion(run, PromotionOptions(force=bool(run.arguments["force"])), tell)
        return promotion.abort()


def _may_have_changed(run: journal.JournalRun | journal.RunStatus) -> bool:
    """Return whether the promotion may have changed anything.

    The checks change nothing, but each phase after them may.
    """
    return bool(run.arguments.get("phase", "checked") != "checked")


def _find_plan(node: str, to: str | None) -> PromotionPlan:
    # Read the topology from its source, because the topology in this process may be outdated: it
    # may be the last good copy on disk, or may lack a change that was published just now.
    runtime.refresh()
    return find_plan(runtime.topology(), node, to)


def _require_checks(plan: PromotionPlan, options: PromotionOptions) -> Findings:
    findings = preflight.examine(plan, force=options.force, timeout=options.timeout)
    if findings.problems:
        raise PromotionRefused(findings.problems)
    return findings


def _resume(
    run: journal.JournalRun, node: str, options: PromotionOptions, tell: Tell
) -> Promotion | None:
    if not _may_have_changed(run):
        return None
    if (run.arguments["node"], run.arguments["force"]) != (node, options.force):
        raise PromotionRefused([recovery.ways_out(run)])
    tell(f"goes on with run {run.id}, which was broken off in the phase {run.arguments['phase']!r}")
    return Promotion(run, options, tell)


def _begin(
    run: journal.JournalRun,
    node: str,
    to: str | None,
    options: PromotionOptions,
    confirm: Confirm | None,
    tell: Tell,
) -> Promotion:
    plan = _find_plan(node, to)
    topology_change.require_writable(plan, forced=options.force)
    findings = _require_checks(plan, options)
    if findings.loss is not None and confirm is not None and not confirm(plan, findings.loss):
        raise PromotionRefused(["it was not confirmed"])
    assert findings.new is not None
    assert findings.link is not None
    run.note(
        **plan.to_json(),
        force=options.force,
        phase="checked",
        link=findings.link.name,
        was={
            "old": findings.old is not None and findings.old.read_only,
            "new": findings.new.read_only,
        },
        position="",
        loss=findings.loss and [findings.loss.received, findings.loss.executed, findings.loss.idle],
        warnings=findings.warnings,
    )
    return Promotion(run, options, tell)
