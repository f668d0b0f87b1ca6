"""A promotion, phase by phase: each is in the journal before it begins.

Every effect may be repeated, so a rerun begins with the fence again, whatever the phase was;
but a switch that may have been published is looked up first. Until the switch everything can
be undone. The source of the topology is asked before the fence, and again before the phase
``switching``, which begins only when it has answered: without it nothing is fenced for long.

============ ======================================================================
fencing      the old primary becomes read only; nothing is under way there any more
waiting      until the replica has executed all that the old primary has logged
stopping     the replication on the new primary
unfencing    the new primary takes writes; nobody sends any yet
switching    the map is published; whether it was, only the source can tell
switched     only what belongs to the end is left
undoing      back to how it was
============ ======================================================================
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from django.db import Error, OperationalError

from sharded_orm import runtime
from sharded_orm.backends.mysql.replication import (
    ReplicationServer,
    ReplicationStatus,
    is_kept_off,
    missing,
)
from sharded_orm.exceptions import (
    CacheUnavailable,
    LeaseLost,
    PromotionFailed,
    PromotionRefused,
    TopologyError,
)
from sharded_orm.operations import cache, topology
from sharded_orm.operations.promotion import preflight, publication, recovery, switchover
from sharded_orm.operations.promotion.pause import Pause, moment
from sharded_orm.operations.promotion.plan import PromotionPlan
from sharded_orm.operations.promotion.preflight import Loss
from sharded_orm.operations.promotion.report import PromotionOptions, PromotionReport
from sharded_orm.operations.runs import journal

#: Seconds that statements under way on the old primary may keep the fence off.
FENCE_PATIENCE: Final = 5.0
#: Seconds for all processes to use the new map before the cache is made void.
READERS_PATIENCE: Final = 10.0
# Seconds of one wait for the replica; between two, it is looked at.
_SLICE = 1.0

Tell = Callable[[str], None]


class Promotion:
    """A run that has passed the checks, in this process."""

    def __init__(self, run: journal.JournalRun, options: PromotionOptions, tell: Tell) -> None:
        self.run = run
        self.options = options
        self.plan = PromotionPlan.from_json(run.arguments)
        self.link: str = run.arguments["link"]
        self._tell = tell
        # Whether an undo has given both servers back, as far as they answer.
        self._is_restored = False
        loss = run.arguments["loss"]
        self.report = PromotionReport(
            self.plan,
            "promoted",
            options.force,
            loss=loss and Loss(*loss),
            warnings=list(run.arguments["warnings"]),
        )

    @property
    def phase(self) -> str:
        return str(self.run.arguments["phase"])

    def _begin(self, phase: str, line: str, **more: Any) -> None:
        """Enter a phase: in the journal first. Nothing may be done by who has lost the lease."""
        self.run.check()
        self.run.note(phase=phase, **more)
        self._tell(line)

    # ##### Forward #####

    def run_to_end(self) -> PromotionReport:
        if self.phase == "switching" and not self._rule_out():
            self._note_published()
        if self.phase == "switched":
            self._finish()
            return self.report
        try:
            with ExitStack() as stack:
                self._forward(stack)
        except LeaseLost:
            raise
        except BaseException as exc:
            if self.phase == "switched":
                raise
            self._after_failure(exc)
        self._finish()
        return self.report

    def _forward(self, stack: ExitStack) -> None:
        plan = self.plan
        new = stack.enter_context(preflight.operator(plan.new))
        old = None
        if not self.options.force:
            old = stack.enter_context(preflight.operator(plan.node))
            if self.phase == "checked":
                self._come_near(old, new)
        position = self._catch_up(old, new)
        self._begin("stopping", f"stops the replication on {plan.new}")
        new.stop(self.link)
        self._begin("unfencing", f"lets {plan.new} take writes")
        new.unfence()
        self._verify(old, new, position)
        is_exact = self._switch()
        now = moment(self.run)
        self._begin(
            "switched",
            f"{plan.new} is the primary of {', '.join(map(str, plan.moves))}",
            switched=[now if is_exact else self.run.arguments["publishing_at"], now],
        )
        if old is not None:
            self._look_back(old, position)

    def _come_near(self, old: ReplicationServer, new: ReplicationServer) -> None:
        """While writers go on, so that they are refused for a moment only."""
        if self._reach(new, old.standing().logged):
            raise PromotionRefused(
                [
                    f"{self.plan.new!r} did not get within reach of {self.plan.node!r} in"
                    f" {self.options.timeout:g} s; nothing was fenced. Try again when it is nearer,"
                    " or allow more with --timeout"
                ]
            )

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
        standing = old.standing()
        if not standing.read_only:
            raise PromotionFailed(f"{old.name!r} does not become read only.")
        return standing

    def _catch_up(self, old: ReplicationServer | None, new: ReplicationServer) -> str:
        """Fence, and wait until the new primary has it all; returns the last position."""
        # While writers go on: without the source they would be refused for nothing.
        switchover.require_there(self.plan)
        if old is None:
            self._begin("waiting", f"waits until {self.plan.new} has executed what it received")
            received = str(self.run.arguments["loss"][0])
            self._wait(new, received)
            self.report.position = received
            return received
        since = self._refused_since(old)
        self._begin(
            "fencing",
            f"makes {self.plan.node} read only",
            fenced_at=since,
            warnings=self.report.warnings,
        )
        position = self._fence(old).logged
        deadline = time.monotonic() + self.options.timeout
        while time.monotonic() < deadline:
            self._begin("waiting", f"waits until {self.plan.new} has {position}", position=position)
            self._wait(new, position)
            later = old.standing()
            if not later.read_only:
                raise PromotionFailed(f"somebody has made {old.name!r} writable again.")
            if not missing(later.logged, position):
                self.report.position = position
                return position
            # A privileged account has written; what it wrote is waited for as well.
            position = later.logged
        raise PromotionFailed(
            f"a privileged account goes on writing to {old.name!r}, through read_only: stop it."
        )

    def _refused_since(self, old: ReplicationServer) -> str:
        """When writes were first refused: a process before this one may have fenced already."""
        since: str | None = self.run.arguments.get("fenced_at")
        if since is not None:
            if old.standing().read_only:
                return since
            if self.phase != "fencing":  # That may have been noted, and never done.
                self.report.warnings.append(
                    f"{old.name!r} took writes again since it was made read only at {since}: how long"
                    " they were refused then is not counted"
                )
        return moment(self.run)

    def _wait(self, new: ReplicationServer, position: str) -> None:
        if not self.options.force:
            # An earlier attempt may have stopped it. Without the old primary it must not be
            # started: that would throw away what was received and not executed yet.
            new.start(self.link)
        if wanted := self._reach(new, position):
            (link,) = (one for one in new.links() if one.name == self.link)
            raise PromotionFailed(
                f"{new.name!r} did not get to {wanted} within {self.options.timeout:g} s"
                + (f" ({link.error})." if link.error else ".")
            )

    def _reach(self, new: ReplicationServer, position: str) -> str:
        """Wait for ``position``; returns what of it is missing in the end."""
        deadline = time.monotonic() + self.options.timeout
        while wanted := missing(position, new.standing().current):
            self.run.check()
            left = deadline - time.monotonic()
            if left <= 0:
                return wanted
            new.wait_for(wanted, min(left, _SLICE))
        return ""

    def _verify(self, old: ReplicationServer | None, new: ReplicationServer, position: str) -> None:
        """The last look before the map is switched."""
        if new.standing().read_only:
            raise PromotionFailed(f"{new.name!r} stays read only.")
        if old is None:
            if preflight.answers(self.plan):
                raise PromotionFailed(
                    f"{self.plan.node!r} has come back. Promote without --force, which loses"
                    " nothing."
                )
            return
        standing = old.standing()
        if not standing.read_only or missing(standing.logged, position):
            raise PromotionFailed(
                f"{old.name!r} was written after the fence: it was made writable again, or a"
                " privileged account writes there."
            )

    def _switch(self) -> bool:
        """Publish the map; returns whether the source has said so just now."""
        try:
            switchover.switch(self.plan, forced=self.options.force, confirm=self._publishes)
        except (TopologyError, Error, OSError):
            # Before that phase nothing was sent. In it: refused, or published and the answer lost.
            if self.phase != "switching" or not self._look_up():
                raise
            return False
        return True

    def _publishes(self) -> None:
        """The source has answered, and is sent the map next.

        Asks the journal, not the clock: whoever has taken over has ruled out what was read before,
        and nothing that is read later may be published.
        """
        now = moment(self.run)
        if self.phase == "switching":  # Somebody else has published something: once more.
            self.run.note(phase="switching", publishing_at=now)
        else:
            self._begin("switching", "publishes the new map", publishing_at=now)

    def _note_published(self) -> None:
        """The map turns out to be published, by a process that could not tell the journal when."""
        self._begin(
            "switched",
            f"{self.plan.new} is the primary: the map had been published",
            switched=[self.run.arguments["publishing_at"], moment(self.run)],
        )

    def _rule_out(self) -> bool:
        """Whether the switch that a process may have sent is not published, and never will be."""
        if self._look_up():
            return False
        try:
            return switchover.rule_out(self.plan)
        except (TopologyError, OSError) as exc:
            raise publication.unsettled(self.plan, exc, forced=self.options.force) from exc

    def _look_up(self) -> bool:
        """Whether the map is switched.

        :raises PromotionFailed: the source does not answer.
        """
        return publication.was_switched(
            self.plan, forced=self.options.force, check=self.run.check, tell=self._tell
        )

    def _look_back(self, old: ReplicationServer, position: str) -> None:
        try:
            standing = old.standing()
        except Error as exc:
            self.report.warnings.append(f"{old.name!r} could not be asked at the end: {exc}")
            return
        later = missing(standing.logged, position)
        if not standing.read_only or later:
            self.report.warnings.append(
                f"{old.name!r} was written after the switch ({later or 'it is writable'}): make it"
                " read only, and look for what is there and not on the new primary"
            )

    def _finish(self) -> None:
        self._forget_cached()
        self.report.position = self.report.position or str(self.run.arguments["position"])
        earliest, latest = self.run.arguments["switched"]
        self.report.pause = Pause.of(self.run, earliest=earliest, latest=latest)
        self.run.finish("done")

    def _forget_cached(self) -> None:
        """Rows that are lost may be cached. And whoever did not know the new map yet may have
        read on the old primary, and cached for all, what was changed on the new one already."""
        if runtime.cache() is None:
            return
        self._wait_for_readers()
        self._tell("makes the cache void: it may hold rows as the old primary has them")
        try:
            for found in cache.cached_models():
                model: Any = found.model
                model.cache.invalidate()
        except CacheUnavailable as exc:
            self.report.warnings.append(
                f"the cache may hold rows as the old primary has them ({exc}): run 'manage.py"
                " cache_invalidate --all'"
            )

    def _wait_for_readers(self) -> None:
        """Until every process that is connected to the source reads on the new primary."""
        try:
            reach = topology.wait_until_used(runtime.topology_status().version, READERS_PATIENCE)
        except TopologyError as exc:
            late = str(exc)
        else:
            if reach is None or not reach.behind:
                return
            late = ", ".join(f"{one.host} ({one.pid})" for one in reach.behind)
        self.report.warnings.append(
            f"processes that do not use the new map yet ({late}) read on {self.plan.node!r}, and may"
            " cache what they read: run 'manage.py cache_invalidate --all' when they follow or have"
            " ended"
        )

    # ##### Back #####

    def abort(self) -> PromotionReport:
        """Undo what an earlier process has begun."""
        if self.phase == "switched" or (self.phase == "switching" and self._look_up()):
            raise PromotionFailed(
                f"The map is switched: {self.plan.new!r} may have been written already, so the"
                " promotion cannot be undone. Finish it with"
                f" {recovery.to_finish(self.plan.node, forced=self.options.force)}; to go back, let"
                " the old primary follow the new one and promote that.",
                settled=False,
            )
        self.report.outcome = "undone"
        if not self._undo("undone by --abort", lenient=True):
            self.report.outcome = "promoted"
            self._finish()
        return self.report

    def _after_failure(self, cause: BaseException) -> None:
        if isinstance(cause, PromotionFailed) and not cause.settled:
            raise cause
        if isinstance(cause, PromotionRefused):
            text = f"{'; '.join(cause.problems)}."
        else:
            text = str(cause) if isinstance(cause, PromotionFailed) else journal.one_line(cause)
        touched, known = self.phase != "checked", len(self.report.warnings)
        try:
            switched = not self._undo(text)
        except (LeaseLost, PromotionFailed):
            raise
        except Exception as exc:
            if self.phase == "switching":  # The journal does not answer.
                why = f"{text}; {journal.one_line(exc)}"
                raise publication.unsettled(self.plan, why, forced=self.options.force) from cause
            if self._is_restored:
                raise PromotionFailed(
                    f"{text} {self._restored(known)} The journal could not be told"
                    f" ({journal.one_line(exc)}): run {recovery.to_undo(self.plan.node)} when the"
                    " global database answers.",
                    settled=False,
                ) from cause
            raise PromotionFailed(
                f"{text} And it could not be undone ({exc})."
                f" {recovery.refused(self.plan, forced=self.options.force)} until it is: run"
                f" {recovery.to_undo(self.plan.node)} when both servers answer; if"
                f" {self.plan.node!r} is dead, run it now, and then"
                f" {recovery.to_finish(self.plan.node, forced=True)}.",
                settled=False,
            ) from cause
        if switched:
            return  # Somebody published it after all: forward is the only way.
        if not isinstance(cause, Exception):
            raise cause  # Ctrl-C
        if isinstance(cause, PromotionRefused) and not touched:
            raise cause
        done = self._restored(known) if touched else "Nothing was touched."
        raise PromotionFailed(f"{text} {done}") from cause

    def _restored(self, known: int) -> str:
        """What an undo has left.

        :param known: how many warnings there were before it.
        """
        pause = self.report.pause
        refused = "" if pause is None else f"; writes were refused for {pause}"
        left = "".join(f" But {warning}." for warning in self.report.warnings[known:])
        return f"Everything is as before{refused}.{left}"

    def _undo(self, reason: str, lenient: bool = False) -> bool:
        """Back to how it was; False if the map turns out to be switched.

        :param lenient: an old primary that does not answer is left as it is: it may be dead.
        """
        plan, was = self.plan, self.run.arguments["was"]
        if self.phase == "checked":
            self.run.finish("undone", reason)
            return True
        if self.phase == "switching" and not self._rule_out():
            self._note_published()
            return False
        self._begin("undoing", "goes back to how it was")
        try:
            with preflight.operator(plan.new) as new:
                if was["new"]:
                    new.fence(FENCE_PATIENCE)
                new.start(self.link)
        except (PromotionRefused, Error) as exc:
            # The map does not name it, so nobody writes there: no reason to refuse writes here.
            self.report.warnings.append(
                f"{plan.new!r} could not be put back ({exc}). When it answers: START SLAVE"
                + (", and SET GLOBAL read_only = ON" if was["new"] else "")
            )
        was_fenced = False
        if not self.options.force and not was["old"]:
            try:
                with preflight.operator(plan.node) as old:
                    self.run.check()  # Logging in may have taken its time.
                    was_fenced = old.standing().read_only
                    old.unfence()
            except PromotionRefused as exc:
                if not lenient:
                    raise
                self.report.warnings.append(
                    f"{plan.node!r} was made read only and could not be made writable again ({exc})."
                    " When it answers: SET GLOBAL read_only = OFF"
                )
            else:
                self._tell(f"{plan.node} takes writes as before")
        self._is_restored = True
        if was_fenced:
            now = moment(self.run)
            self.report.pause = Pause.of(self.run, earliest=now, latest=now)
        self.run.finish("undone", reason)
        return True
