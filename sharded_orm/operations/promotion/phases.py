"""The forward phases of a promotion, from the fence to the published map.

The journal records each phase before it begins. Every effect may be repeated, so a resumed
promotion begins with the fence again, whatever its phase was. Only a switch that may have been
published is looked up first. Until the switch, everything can be undone (``undo``). The source of
the topology is asked before the fence, and again before the phase ``switching``, which begins only
when the source has answered: without the source, nothing stays fenced for long.

============ ==================================================================================
fencing      the old primary becomes read-only; no statement is under way there any more
waiting      until the replica has executed everything that the old primary has logged
stopping     the replication on the new primary stops
unfencing    the new primary accepts writes; nobody sends any yet
switching    the map is published; only the source can say whether it was
switched     the end: the cache is invalidated, and the run finished
undoing      both servers get their roles back
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

#: Seconds that statements under way on the old primary may keep the fence off.
FENCE_PATIENCE: Final = 5.0
# Seconds of one wait for the replica. The lease and the deadline are checked between two waits.
_SLICE = 1.0


class ForwardPhases:
    """The phases that lead to the published map.

    :param stack: holds the operator's connections to both servers.
    """

    def __init__(self, record: PromotionRecord, stack: ExitStack) -> None:
        self._record = record
        self._run = record.run
        self._plan = record.plan
        self._timeout = record.options.timeout
        self._new = stack.enter_context(preflight.operator(record.plan.new))
        #: None if the old primary is dead.
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
        """Wait for the replica while writers go on, so that they are refused only for a moment."""
        if self._wait_for(old.status().logged):
            raise PromotionRefused(
                [
                    f"{self._plan.new!r} did not get within reach of {self._plan.node!r} in"
                    f" {self._timeout:g} s; nothing was fenced. Try again when it is nearer,"
                    " or allow more with --timeout"
                ]
            )

    def _catch_up(self) -> str:
        """Fence the old primary and wait for the replica; returns the last position."""
        record = self._record
        # Writers still go on: if the source did not answer later, they would be refused for
        # nothing.
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
            # A privileged account has written in spite of read_only; wait for that as well.
            position = later.logged
        raise PromotionFailed(
            f"a privileged account goes on writing to {old.name!r}, through read_only: stop it."
        )

    def _refused_since(self, old: ReplicationServer) -> str:
        """When writes were first refused: an earlier process may have fenced already."""
        since: str | None = self._run.arguments.get("fenced_at")
        if since is not None:
            if old.status().read_only:
                return since
            if self._record.phase != "fencing":  # The journal is ahead: it may never have fenced.
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
        """:raises PromotionFailed: the new primary does not get to ``position`` in time."""
        new = self._new
        if not self._record.options.force:
            # An earlier attempt may have stopped the replication. Without the old primary it must
            # not be started: that would discard events that were received but not executed yet.
            new.start(self._record.link)
        if lacking := self._wait_for(position):
            (link,) = (link for link in new.links() if link.name == self._record.link)
            raise PromotionFailed(
                f"{new.name!r} did not get to {lacking} within {self._timeout:g} s"
                + (f" ({link.error})." if link.error else ".")
            )

    def _wait_for(self, position: str) -> str:
        """Wait until the new primary has ``position``; returns the part that it still lacks."""
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
        """Check both servers once more before the map is switched."""
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
        """Publish the map; whether the source has confirmed it just now."""
        record = self._record
        try:
            switchover.switch(
                self._plan, forced=record.options.force, confirm=self._before_publication
            )
        except (TopologyError, Error, OSError):
            # Before that phase nothing was sent. In it, the map was refused, or it was published
            # and the answer got lost.
            if record.phase != "switching" or not record.is_published():
                raise
            return False
        return True

    def _before_publication(self) -> None:
        """Record the phase: the source has answered, and the map is sent next.

        Asks the journal, not the clock: a process that has taken over has ruled out every topology
        that was read before, and no topology that is read later may be published here.
        """
        now = moment(self._run)
        if self._record.phase == "switching":  # Another publication came first: try again.
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
