"""Execute a promotion to its end, or undo it, in this process."""

from __future__ import annotations

from contextlib import ExitStack

from sharded_orm.exceptions import LeaseLost
from sharded_orm.operations.exceptions import PromotionFailed, PromotionRefused
from sharded_orm.operations.promotion import cached_rows, publication, recovery
from sharded_orm.operations.promotion.pause import Pause
from sharded_orm.operations.promotion.phases import ForwardPhases, promote_published
from sharded_orm.operations.promotion.record import PromotionRecord, Tell
from sharded_orm.operations.promotion.report import PromotionOptions, PromotionReport
from sharded_orm.operations.promotion.undo import PromotionUndo
from sharded_orm.operations.runs import journal


class Promotion:
    """Executes one promotion after its checks have passed, or undoes it.

    :param run: the promotion's run in the journal. This process must hold the run's lease, the
        right to work on the run.
    :param tell: called with a line for the operator in each phase.
    """

    def __init__(self, run: journal.JournalRun, options: PromotionOptions, tell: Tell) -> None:
        self._record = PromotionRecord(run, options, tell)
        self._undo = PromotionUndo(self._record)

    def run_to_end(self) -> PromotionReport:
        """Execute the phases of the promotion that are not done yet. Return the report.

        If a phase fails before the new topology document is published, the promotion is undone, if
        that is possible.

        :raises PromotionFailed: a phase failed; the message says whether everything was undone.
        :raises PromotionRefused: a condition held at the time of the checks, but does not hold any
            more. Nothing was changed.
        :raises LeaseLost: another process has taken over the run.
        """
        record = self._record
        if record.phase == "switching" and not record.rule_out():
            record.note_published()
        if record.is_switched:
            self._finish()
            return record.report
        try:
            with ExitStack() as stack:
                ForwardPhases(record, stack).run()
        except LeaseLost:
            raise
        except BaseException as exc:
            if record.is_switched:
                raise
            self._after_failure(exc)
        self._finish()
        return record.report

    def abort(self) -> PromotionReport:
        """Undo the promotion that an earlier process has begun. Return the report.

        A promotion cannot be undone after its new topology document is published. If the document
        is published while this method runs, the promotion is finished instead, and the outcome in
        the report is "promoted".

        :raises PromotionFailed: the document was published before this call, or the source of the
            topology does not answer.
        """
        record = self._record
        if record.is_switched or (record.phase == "switching" and record.is_published()):
            raise PromotionFailed(
                f"The map is switched: {record.plan.new!r} may have been written already, so the"
                " promotion cannot be undone. Finish it with"
                f" {recovery.to_finish(record.plan.node, forced=record.options.force)}; to go back,"
                " let the old primary follow the new one and promote that.",
                settled=False,
            )
        record.report.outcome = "undone"
        if not self._undo.run("undone by --abort", lenient=True):
            record.report.outcome = "promoted"
            self._finish()
        return record.report

    def _finish(self) -> None:
        record = self._record
        if record.phase == "promoting":
            promote_published(record)
        cached_rows.invalidate(record.plan.node, record.tell, record.warn)
        arguments = record.run.arguments
        record.report.position = record.report.position or str(arguments["position"])
        earliest, latest = arguments["switched"]
        record.report.pause = Pause.of(record.run, earliest=earliest, latest=latest)
        record.run.finish("done")

    def _after_failure(self, cause: BaseException) -> None:
        """Undo the promotion because of the error ``cause``, then raise an error.

        The method returns only in one case: it finds that the new topology document is published
        already. Then the promotion cannot be undone, and the caller must finish it.
        """
        if isinstance(cause, PromotionFailed) and not cause.settled:
            raise cause
        record = self._record
        plan, forced = record.plan, record.options.force
        if isinstance(cause, PromotionRefused):
            text = f"{'; '.join(cause.problems)}."
        else:
            text = str(cause) if isinstance(cause, PromotionFailed) else journal.one_line(cause)
        is_touched = record.phase != "checked"
        try:
            is_published = not self._undo.run(text)
        except (LeaseLost, PromotionFailed):
            raise
        except Exception as exc:
            # The undo failed, for example because the journal's database does not answer.
            if record.phase == "switching":
                why = f"{text}; {journal.one_line(exc)}"
                raise publication.unsettled_error(plan, why, forced=forced) from cause
            if self._undo.is_restored:
                raise PromotionFailed(
                    f"{text} {self._undo.result()} The journal could not be told"
                    f" ({journal.one_line(exc)}): run {recovery.to_undo(plan.node)} when the"
                    " global database answers.",
                    settled=False,
                ) from cause
            raise PromotionFailed(
                f"{text} And it could not be undone ({exc})."
                f" {recovery.refused_phrase(plan, forced=forced)} until it is: run"
                f" {recovery.to_undo(plan.node)} when both servers answer; if"
                f" {plan.node!r} is dead, run it now, and then"
                f" {recovery.to_finish(plan.node, forced=True)}.",
                settled=False,
            ) from cause
        if is_published:
            # The new topology document is published, in spite of the error. So the promotion cannot
            # be undone any more, and the caller finishes it.
            return
        if not isinstance(cause, Exception):
            raise cause  # Such as KeyboardInterrupt.
        if isinstance(cause, PromotionRefused) and not is_touched:
            raise cause
        result = self._undo.result() if is_touched else "Nothing was touched."
        raise PromotionFailed(f"{text} {result}") from cause
