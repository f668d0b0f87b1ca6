"""The forward phases of a promotion, from the fence to the published map.

To *fence* a server is to make it read-only. The *map* is the topology document, which says which
node is the primary of each range of shards. The *source* is the place where the document is stored.

The journal records each phase before it begins. The effects of all phases can be repeated, so a
resumed promotion begins with the fence again, no matter which phase it had reached. There is one
exception: if the map may have been published already, the source is asked first. Until the map is
published, everything can be undone (``undo``).

A source that does not answer must not leave the old primary fenced for long. So the source is asked
before the fence, and again before the phase ``switching``, which begins only after an answer.

============ ==================================================================================
fencing      The old primary becomes read-only, after its running statements have ended.
waiting      The replica executes everything that is in the old primary's binary log.
stopping     The replication on the new primary stops.
unfencing    The new primary accepts writes, but nobody sends any yet.
switching    The map is being published. After a kill, only the source knows whether it was.
switched     The map is published. The cache is invalidated, and the run is finished.
undoing      Both servers get their former roles back.
============ ==================================================================================
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Final

from django.db import Error, OperationalError

from sharded_orm.backends.mysql.replication import (
    ReplicationServer,
    ReplicationStatus,
    is_kept_off,
    missing,
)
from sharded_orm.exceptions import PromotionFailed, PromotionRefused, TopologyError
from sharded_orm.operations.promotion import preflight, switchover
from sharded_orm.operations.promotion.pause import moment
from sharded_orm.operations.promotion.record import PromotionRecord

#: Seconds to wait for running statements on the old primary, which delay making it read-only.
FENCE_PATIENCE: Final = 5.0
# Seconds of one wait for the replica. Between two waits, the lease of the journal run and the time
# limit are checked.
_SLICE = 1.0


class ForwardPhases:
    """Executes the phases of a promotion, up to the publication of the new map (topology document).

    :param stack: closes the operator's connections to both servers at its end.
    """

    def __init__(self, record: PromotionRecord, stack: ExitStack) -> None:
        self._record = record
        self._run = record.run
        self._plan = record.plan
        self._timeout = record.options.timeout
        self._new = stack.enter_context(preflight.operator(record.plan.new))
        #: The connection to the old primary; None in a forced promotion, which does without it.
        self._old: ReplicationServer | None = None
        if not record.options.force:
            self._old = stack.enter_context(preflight.operator(record.plan.node))

    def run(self) -> None:
        record, plan = self._record, self._plan
        if self._old is not None and record.phase == "checked":
            self._come_near(self._old)
        position = self._catch_up()
        record.begin("stopping", f"stops the replication on {plan.new}")
        self._new.stop(record.link)
        record.begin("unfencing", f"lets {plan.new} take writes")
        self._new.unfence()
        self._verify(position)
        is_exact = self._switch()
        now = moment(self._run)
        record.begin(
            "switched",
            f"{plan.new} is the primary of {', '.join(map(str, plan.moves))}",
            switched=[now if is_exact else self._run.arguments["publishing_at"], now],
        )
        if self._old is not None:
            self._warn_of_late_writes(self._old, position)

    # ##### The replica catches up #####

    def _come_near(self, old: ReplicationServer) -> None:
        """Wait until the replica has almost caught up, before the old primary is fenced.

        That is, wait until the replica has executed all that the old primary had logged when this
        method was called. Writes are still accepted meanwhile. Because little is left to catch up,
        the fence later refuses writes only for a moment.

        :raises PromotionRefused: the replica did not come near in time.
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
        """Fence the old primary (make it read-only), then wait until the replica has caught up.

        Return the last position that the old primary's binary log has reached. In a forced
        promotion, which does without the old primary, fence nothing, and return the last position
        that the replica has received.
        """
        record = self._record
        # Ask the source of the topology now, while writes are still accepted. If the source is
        # down, this shows it before writes are refused in vain.
        switchover.require_same_ranges(self._plan)
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
            f"makes {self._plan.node} read only",
            fenced_at=since,
            warnings=record.report.warnings,
        )
        position = self._fence(old).logged
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            record.begin(
                "waiting", f"waits until {self._plan.new} has {position}", position=position
            )
            self._require_position(position)
            later = old.status()
            if not later.read_only:
                raise PromotionFailed(f"somebody has made {old.name!r} writable again.")
            if not missing(later.logged, position):
                record.report.position = position
                return position
            # A privileged account has written in spite of read_only: wait until the replica has
            # executed these writes, too.
            position = later.logged
        raise PromotionFailed(
            f"a privileged account goes on writing to {old.name!r}, through read_only: stop it."
        )

    def _refused_since(self, old: ReplicationServer) -> str:
        """Return the time since which writes are refused.

        This is the present time, unless an earlier process has fenced the old primary (made it
        read-only) and the fence still stands.
        """
        since: str | None = self._run.arguments.get("fenced_at")
        if since is not None:
            if old.status().read_only:
                return since
            # Do not warn in the phase "fencing": the earlier process may have ended before it made
            # the old primary read-only.
            if self._record.phase != "fencing":
                self._record.warn(
                    f"{old.name!r} took writes again since it was made read only at {since}: how long"
                    " they were refused then is not counted"
                )
        return moment(self._run)

    def _fence(self, old: ReplicationServer) -> ReplicationStatus:
        try:
            old.fence(FENCE_PATIENCE)
        except OperationalError as exc:
            if not is_kept_off(exc):
                raise PromotionFailed(f"{old.name!r} could not be made read only ({exc}).") from exc
            raise PromotionFailed(
                f"{old.name!r} could not be made read only within {FENCE_PATIENCE:g} s ({exc}):"
                " statements are under way there, a migration or LOCK TABLES perhaps."
            ) from exc
        status = old.status()
        if not status.read_only:
            raise PromotionFailed(f"{old.name!r} does not become read only.")
        return status

    def _require_position(self, position: str) -> None:
        """Wait until the new primary has executed everything up to ``position``.

        :raises PromotionFailed: the new primary does not get there in time.
        """
        new = self._new
        if not self._record.options.force:
            # Start the replication, because an earlier attempt may have stopped it. If the old
            # primary is dead, do not start it: a start discards events that were received but not
            # executed.
            new.start(self._record.link)
        if lacking := self._wait_for(position):
            (link,) = (link for link in new.links() if link.name == self._record.link)
            raise PromotionFailed(
                f"{new.name!r} did not get to {lacking} within {self._timeout:g} s"
                + (f" ({link.error})." if link.error else ".")
            )

    def _wait_for(self, position: str) -> str:
        """Wait until the new primary has executed everything up to ``position``, or time is up.

        Return the part of ``position`` that the new primary still lacks. Return an empty string if
        it lacks nothing.
        """
        deadline = time.monotonic() + self._timeout
        while lacking := missing(position, self._new.status().current):
            self._run.check()
            left = deadline - time.monotonic()
            if left <= 0:
                return lacking
            self._new.wait_for(lacking, min(left, _SLICE))
        return ""

    # ##### The map is switched #####

    def _verify(self, position: str) -> None:
        """Check both servers once more before the map is published.

        :raises PromotionFailed: the new primary is read-only, or the old primary may have new rows.
        """
        if self._new.status().read_only:
            raise PromotionFailed(f"{self._new.name!r} stays read only.")
        if self._old is None:
            if preflight.answers(self._plan):
                raise PromotionFailed(
                    f"{self._plan.node!r} has come back. Promote without --force, which loses"
                    " nothing."
                )
            return
        status = self._old.status()
        if not status.read_only or missing(status.logged, position):
            raise PromotionFailed(
                f"{self._old.name!r} was written after the fence: it was made writable again, or a"
                " privileged account writes there."
            )

    def _switch(self) -> bool:
        """Publish the new map (topology document). Return whether the publication was confirmed.

        Return False if the confirmation got lost, and a later question to the source of the
        topology showed that the map is published. Then the exact time of publication is not known.
        """
        record = self._record
        try:
            switchover.switch(
                self._plan, forced=record.options.force, confirm=self._before_publication
            )
        except (TopologyError, Error, OSError):
            # If the phase is not "switching" yet, no map was sent. If it is, either the source of
            # the topology has refused the map, or the map is published and only the answer got
            # lost.
            if record.phase != "switching" or not record.is_published():
                raise
            return False
        return True

    def _before_publication(self) -> None:
        """Record the phase ``switching``. To be called between reading the topology and publishing.

        This write to the journal fails if another process has taken the run over. A look at the
        lease would not be enough, because this process's clock may be wrong.

        The topology may have been read before such a takeover. This does no harm, because the other
        process makes sure that a publication which is based on the older topology fails
        (:meth:`PromotionRecord.rule_out`).

        :raises LeaseLost: another process has taken the run over.
        """
        now = moment(self._run)
        if self._record.phase == "switching":  # Another publication came first, so this is a retry.
            self._run.note(phase="switching", publishing_at=now)
        else:
            self._record.begin("switching", "publishes the new map", publishing_at=now)

    def _warn_of_late_writes(self, old: ReplicationServer, position: str) -> None:
        try:
            status = old.status()
        except Error as exc:
            self._record.warn(f"{old.name!r} could not be asked at the end: {exc}")
            return
        later = missing(status.logged, position)
        if not status.read_only or later:
            self._record.warn(
                f"{old.name!r} was written after the switch ({later or 'it is writable'}): make it"
                " read only, and look for what is there and not on the new primary"
            )
