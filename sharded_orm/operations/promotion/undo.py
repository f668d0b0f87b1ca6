"""Undo a promotion: both servers get back the roles that they had before."""

from __future__ import annotations

from django.db import Error

from sharded_orm.operations.exceptions import PromotionRefused
from sharded_orm.operations.promotion import preflight
from sharded_orm.operations.promotion.pause import Pause, moment
from sharded_orm.operations.promotion.phases import FENCE_PATIENCE
from sharded_orm.operations.promotion.record import PromotionRecord


class PromotionUndo:
    """Undoes one promotion. This is possible until its new topology document is published."""

    def __init__(self, record: PromotionRecord) -> None:
        self._record = record
        self._earlier_warnings = len(record.report.warnings)
        #: Whether :meth:`run` has done what it could to give both servers their former roles. If
        #: that failed for one server, the report has a warning.
        self.is_restored = False

    def run(self, reason: str, *, lenient: bool = False) -> bool:
        """Undo the promotion. Return whether it is undone.

        Return False if the new topology document turns out to be published already.

        :param reason: why the promotion is undone; recorded in the journal.
        :param lenient: what to do if the login to the old primary fails. True adds a warning and
            continues, because the server may be dead. False raises the error.
        :raises PromotionRefused: the login to the old primary fails, and ``lenient`` is False.
        :raises PromotionFailed: the source of the topology does not answer.
        """
        record = self._record
        self._earlier_warnings = len(record.report.warnings)
        if record.phase == "checked":
            record.run.finish("undone", reason)
            return True
        if record.phase == "switching" and not record.rule_out():
            record.note_published()
            return False
        record.begin("undoing", "goes back to how it was")
        if not record.plan.server_class.is_promoted_for_good:
            self._restore_new()
        was_fenced = self._restore_old(lenient=lenient)
        self.is_restored = True
        if was_fenced:
            now = moment(record.run)
            record.report.pause = Pause.of(record.run, earliest=now, latest=now)
        record.run.finish("undone", reason)
        return True

    def _restore_new(self) -> None:
        record = self._record
        new_name, was_read_only = record.plan.new, record.run.arguments["was"]["new"]
        texts = record.plan.server_class.texts
        try:
            with preflight.operator(new_name, record.plan) as new:
                if was_read_only:
                    new.fence(FENCE_PATIENCE)
                new.start(record.link)
        except (PromotionRefused, Error) as exc:
            # Warn and continue, because the old primary must soon accept writes again. The other
            # server does no harm as it is: the topology does not name it as a primary, so no
            # process writes to it.
            record.warn(
                f"{new_name!r} could not be put back ({exc}). When it answers: {texts.to_start}"
                + (f", and {texts.to_fence}" if was_read_only else "")
            )

    def _restore_old(self, *, lenient: bool) -> bool:
        """Let the old primary accept writes again, unless it refused writes before the promotion.

        Do nothing in a forced promotion, because it has not changed the dead old primary.

        :returns: True if the server refused writes until now because of the promotion.
        """
        record = self._record
        if record.options.force or record.run.arguments["was"]["old"]:
            return False
        was_fenced = False
        try:
            with preflight.operator(record.plan.node, record.plan) as old:
                # Check again that this process still holds the run: the login may have taken so
                # long that another process has taken over the promotion.
                record.run.check()
                was_fenced = old.status().read_only
                old.unfence()
        except PromotionRefused as exc:
            if not lenient:
                raise
            texts = record.plan.server_class.texts
            record.warn(
                f"{record.plan.node!r} {texts.fenced_before} and could not be made writable again ({exc})."
                f" When it answers: {texts.to_open}"
            )
        else:
            record.tell(f"{record.plan.node} takes writes as before")
        return was_fenced

    def result(self) -> str:
        """Return sentences for people that describe the state after the undo."""
        report = self._record.report
        refused = "" if report.pause is None else f"; writes were refused for {report.pause}"
        warnings = report.warnings[self._earlier_warnings :]
        left = "".join(f" But {warning}." for warning in warnings)
        return f"Everything is as before{refused}.{left}"
