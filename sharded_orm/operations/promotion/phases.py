"""The forward phases of a promotion, from the fence to the published map.

To *fence* a server is to make it refuse writes: by ``read_only`` on MariaDB, by closing its
databases on PostgreSQL. The *map* is the topology document, which says which node is the primary of
each range of shards. The *source* is the place where the document is stored.

The journal records each phase before it begins. All phases can be repeated, so a resumed promotion
begins with the fence again. Only if the map may have been published already, the source is queried
first. Until the map is published, everything can be undone (``undo``).

The source is also queried before the fence, and before the phase ``switching``, which begins only
after an answer. So a source that does not answer cannot keep the old primary fenced for long.

============ ==================================================================================
fencing      The old primary is fenced, after its open statements and transactions have ended.
waiting      The replica executes everything that is in the old primary's log.
stopping     The replication on the new primary stops. (MariaDB only)
unfencing    The new primary accepts writes, but nobody sends any yet. (MariaDB only)
switching    The map is being published. After a kill, only the source knows whether it was.
promoting    The map is published, and the replica becomes a primary. (PostgreSQL only)
switched     The new primary takes writes. The cache is invalidated, and the run is finished.
undoing      Both servers get their former roles back.
============ ==================================================================================

A PostgreSQL server that was promoted can become a replica again only as a new copy of the primary.
So it is promoted only after the publication, when the promotion cannot be undone any more.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Final

from django.db import DatabaseError, Error

from sharded_orm.backends.replication import ReplicationServer, ReplicationStatus
from sharded_orm.exceptions import TopologyError
from sharded_orm.operations.exceptions import PromotionFailed, PromotionRefused
from sharded_orm.operations.promotion import preflight, recovery, topology_change
from sharded_orm.operations.promotion.pause import moment
from sharded_orm.operations.promotion.record import PromotionRecord

#: A server can be made to refuse writes only after its open statements and transactions have ended.
#: The promotion waits for them for this number of seconds at most.
FENCE_PATIENCE: Final = 5.0
# The wait for the replica is divided into waits of this number of seconds. Between two of them, the
# process checks the time limit, and whether another process has taken over the promotion.
_SLICE = 1.0


class ForwardPhases:
    """Executes the phases of a promotion, up to the publication of the new topology document.

    :param stack: receives the two connections, to the old and to the new primary. It closes them
        when the caller leaves it.
    """

    def __init__(self, record: PromotionRecord, stack: ExitStack) -> None:
        self._record = record
        self._run = record.run
        self._plan = record.plan
        self._timeout = record.options.timeout
        self._new = stack.enter_context(preflight.operator(record.plan.new, record.plan))
        #: The connection to the old primary. None in a forced promotion, in which the old primary
        #: is dead.
        self._old: ReplicationServer | None = None
        if not record.options.force:
            self._old = stack.enter_context(preflight.operator(record.plan.node, record.plan))

    def run(self) -> None:
        record, plan = self._record, self._plan
        if self._old is not None and record.phase == "checked":
            self._come_near(self._old)
        position = self._catch_up()
        if not self._new.is_promoted_for_good:
            record.begin("stopping", f"stops the replication on {plan.new}")
            self._new.stop(record.link)
            record.begin("unfencing", self._new.texts.opens.format(node=plan.new))
            self._new.unfence()
        self._verify(position)
        is_exact = self._switch()
        if self._new.is_promoted_for_good:
            record.note_promoting()
        else:
            now = moment(self._run)
            record.note_switched([now if is_exact else self._run.arguments["publishing_at"], now])
        if self._old is not None:
            self._warn_of_late_writes(self._old, position)

    # ##### The replica catches up #####

    def _come_near(self, old: ReplicationServer) -> None:
        """Wait until the replica has almost caught up with the old primary.

        The wait ends when the replica has executed everything that was in the old primary's log at
        the time of this call. The old primary still accepts writes during the wait. So later, when
        it refuses writes, the replica has little left to execute, and writes are refused only for a
        moment.

        :raises PromotionRefused: the replica did not get so far in time.
        """
        if self._wait_for(old.status().logged):
            raise PromotionRefused(
                [
                    f"{self._plan.new!r} did not get within reach of {self._plan.node!r} in"
                    f" {self._timeout:g} s; nothing was fenced. Try again when it is nearer,"
                    " or allow more with --timeout"
                ]
            )

    def _catch_up(self) -> str:
        """Make the old primary refuse writes, then wait for the replica to execute all earlier ones.

        Return the last position in the old primary's log. In a forced promotion, the old primary is
        dead. Then only wait until the replica has executed what it has received, and return the
        last position that it has received.
        """
        record = self._record
        # Query the source of the topology now, while writes are still accepted. If the source is
        # down, the promotion fails here, before it has made the old primary refuse writes.
        topology_change.require_same_ranges(self._plan)
        if self._old is None:
            record.begin("waiting", f"waits until {self._plan.new} has executed what it received")
            received = str(self._run.arguments["loss"][0])
            self._require_position(received)
            record.report.position = received
            return received
        old = self._old
        since = self._refused_since(old)
        record.begin(
            "fencing",
            old.texts.fences.format(node=self._plan.node),
            fenced_at=since,
            warnings=record.report.warnings,
        )
        position = self._fence(old).logged
        # Refuse to continue if the old primary has a transaction that is prepared for a two-phase
        # commit, because it might be committed later on only one of the two servers. Check this
        # after the fence, because from then on no other transaction can be prepared.
        for problem in preflight.branch_problems(self._plan, old):
            raise PromotionFailed(f"{problem[0].upper()}{problem[1:]}.")
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            record.begin(
                "waiting", f"waits until {self._plan.new} has {position}", position=position
            )
            self._require_position(position)
            if not old.status().read_only:
                raise PromotionFailed(f"{old.texts.opened.format(node=old.name)}.")
            if not old.written_since(position):
                record.report.position = position
                return position
            # The log of the old primary has grown although the server refuses the application's
            # writes. So somebody else has written to it, such as a privileged account.
            # Wait until the replica has executed these writes, too.
            position = self._fence(old).logged
        raise PromotionFailed(
            f"{old.name!r} is written in spite of the fence ({old.texts.intruder}): stop that."
        )

    def _refused_since(self, old: ReplicationServer) -> str:
        """Return the time since which the old primary refuses writes.

        If an earlier process of this promotion has made the server refuse writes, and it still
        does, return the time that the earlier process has recorded. Otherwise return the time now.
        """
        since: str | None = self._run.arguments.get("fenced_at")
        if since is not None:
            if old.status().read_only:
                return since
            # The server takes writes. Do not warn of this in the phase "fencing": the earlier
            # process may have ended before it made the server refuse writes. In a later phase, the
            # server did refuse writes, so somebody has made it take them again.
            if self._record.phase != "fencing":
                self._record.warn(
                    f"{old.name!r} took writes again since it {old.texts.fenced_before} at {since}: how"
                    " long they were refused then is not counted"
                )
        return moment(self._run)

    def _fence(self, old: ReplicationServer) -> ReplicationStatus:
        texts = old.texts
        try:
            old.fence(FENCE_PATIENCE)
        except DatabaseError as exc:
            if not old.is_kept_off(exc):
                raise PromotionFailed(f"{old.name!r} {texts.not_fenced} ({exc}).") from exc
            raise PromotionFailed(
                f"{old.name!r} {texts.not_fenced} within {FENCE_PATIENCE:g} s ({exc}):"
                f" {texts.kept_off}."
            ) from exc
        status = old.status()
        if not status.read_only:
            raise PromotionFailed(f"{old.name!r} {texts.stays_open}.")
        return status

    def _require_position(self, position: str) -> None:
        """Start the replication if necessary, and wait until the replica has executed ``position``.

        :param position: a position in the old primary's log.
        :raises PromotionFailed: the replica does not reach the position in time.
        """
        new = self._new
        if not self._record.options.force:
            # An earlier attempt may have stopped the replication, so start it. Do not start it in a
            # forced promotion: a start discards the events that the replica has received but not
            # executed, and the dead old primary cannot send them again.
            new.start(self._record.link)
        if lacking := self._wait_for(position):
            errors = [link.error for link in new.links() if link.name == self._record.link]
            raise PromotionFailed(
                f"{new.name!r} did not get to {lacking} within {self._timeout:g} s"
                + "".join(f" ({error})" for error in errors if error)
                + "."
            )

    def _wait_for(self, position: str) -> str:
        """Wait until the new primary has executed the old primary's log up to ``position``.

        Stop waiting when the time limit is reached. Return the part of ``position`` that the new
        primary still lacks, or an empty string if it lacks nothing.
        """
        deadline = time.monotonic() + self._timeout
        while lacking := self._new.missing(position, self._new.status().current):
            self._run.check()
            left = deadline - time.monotonic()
            if left <= 0:
                return lacking
            self._new.wait_for(lacking, min(left, _SLICE))
        return ""

    # ##### The map is switched #####

    def _verify(self, position: str) -> None:
        """Check both servers a last time before the new topology document is published.

        :param position: the last position of the old primary's log that the replica has executed.
        :raises PromotionFailed: the new primary does not accept writes, or it is not a replica of
            the old primary, or the old primary was written after ``position``. In a forced
            promotion: the old primary answers again.
        """
        if not self._new.is_promoted_for_good and self._new.status().read_only:
            raise PromotionFailed(f"{self._new.name!r} {self._new.texts.stays_fenced}.")
        if self._old is None:
            if preflight.answers(self._plan):
                raise PromotionFailed(
                    f"{self._plan.node!r} has come back. Promote without --force, which loses"
                    " nothing."
                )
            return
        status, later = self._old.status(), self._old.written_since(position)
        if not status.read_only or later:
            raise PromotionFailed(
                f"{self._old.name!r} was written after the fence:"
                f" {self._old.texts.opened.format(node=self._old.name)}, or {self._old.texts.intruder}."
            )
        for problem in self._new.copy_problems(self._old):
            raise PromotionFailed(f"{problem}.")

    def _switch(self) -> bool:
        """Publish the new topology document. Return whether the time of publication is known.

        The time is not known if the answer to the publication got lost. Then a later query to the
        source of the topology has shown that the document is published.
        """
        record = self._record
        try:
            topology_change.switch(
                self._plan, forced=record.options.force, confirm=self._before_publication
            )
        except (TopologyError, Error, OSError):
            # Before the phase "switching", nothing was sent to the source of the topology, so
            # nothing is published. In this phase, the source may have refused the new document, or
            # published it although its answer got lost. So query the source.
            if record.phase != "switching" or not record.is_published():
                raise
            return False
        return True

    def _before_publication(self) -> None:
        """Record the phase ``switching`` in the journal, just before the new document is published.

        If another process has taken over the promotion, the write to the journal fails, so that
        this process does not publish. The write is necessary: by its clock alone, a process cannot
        know whether it still holds the lease of the run, because the clock may be wrong.

        If another process takes over after this write, it calls :meth:`PromotionRecord.rule_out`.
        After this call, the publication of this process fails.

        :raises LeaseLost: another process has taken over the run.
        """
        now = moment(self._run)
        # A second attempt finds the phase recorded already. (The first attempt fails if another
        # change of the topology is published just before.) Record only the new time.
        if self._record.phase == "switching":
            self._run.note(phase="switching", publishing_at=now)
        else:
            self._record.begin("switching", "publishes the new map", publishing_at=now)

    def _warn_of_late_writes(self, old: ReplicationServer, position: str) -> None:
        try:
            status, later = old.status(), old.written_since(position)
        except Error as exc:
            self._record.warn(f"{old.name!r} could not be asked at the end: {exc}")
            return
        if not status.read_only or later:
            self._record.warn(
                f"{old.name!r} was written after the switch ({later or 'it is writable'}): fence it"
                f" ({old.texts.to_fence}), and look for what is there and not on the new primary"
            )


def promote_published(record: PromotionRecord) -> None:
    """Make a PostgreSQL replica a primary, and let it take writes.

    Call this after the new topology document is published, which names the replica as the primary.
    Can be repeated. First it waits again until the replica has executed the old primary's log,
    because the replica may have been restarted meanwhile.

    :raises PromotionFailed: the server does not answer, or does not become a primary.
    """
    plan, arguments = record.plan, record.run.arguments
    position = str(arguments["position"] or arguments["loss"][0])
    is_resumed = record.phase_at_start == "promoting"
    try:
        with preflight.operator(plan.new, plan) as new:
            if not new.wait_for(position, record.options.timeout):
                raise PromotionFailed(f"it did not get to {position}")
            if not new.promote(record.options.timeout):
                raise PromotionFailed("it does not become a primary")
            # Check that this process still holds the run. While it waited for promote(), another
            # process may have taken over the run and made the server refuse writes.
            record.run.check()
            new.unfence()
            if new.status().read_only:
                raise PromotionFailed(f"it {new.texts.stays_fenced}")
    except (PromotionRefused, PromotionFailed, Error) as exc:
        problems = exc.problems if isinstance(exc, PromotionRefused) else [str(exc)]
        raise PromotionFailed(
            f"The map names {plan.new!r}, which does not take writes yet ({'; '.join(problems)}). When"
            f" it answers, run {recovery.to_finish(plan.node, forced=record.options.force)}. Writes"
            f" to {', '.join(map(str, plan.moves))} are refused until then; none that was"
            " acknowledged is lost.",
            settled=False,
        ) from exc
    now = moment(record.run)
    record.note_switched([arguments["promoting_at"] if is_resumed else now, now])
