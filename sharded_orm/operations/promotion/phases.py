"""A promotion, phase by phase: each is in the journal before it begins.

Every effect may be repeated, so a rerun begins with the fence again, whatever the phase was;
but a switch that may have been published is looked up first. Until the switch everything can
be undone.

============ ======================================================================
fencing      the old primary becomes read only; nothing is under way there any more
waiting      until the replica has executed all that the old primary has logged
stopping     the replication on the new primary
unfencing    the new primary takes writes; nobody sends any yet
switching    the map is published
switched     only what belongs to the end is left
undoing      back to how it was
============ ======================================================================
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from django.db import Error, OperationalError

from sharded_orm import runtime
from sharded_orm.backends.mysql.replication import Server, Standing, missing
from sharded_orm.exceptions import (
    CacheUnavailable,
    LeaseLost,
    PromotionFailed,
    PromotionRefused,
    TopologyError,
)
from sharded_orm.operations import caching, journal, topology
from sharded_orm.operations.promotion import checking, switching
from sharded_orm.operations.promotion.checking import Loss
from sharded_orm.operations.promotion.plan import Plan

#: Seconds that statements under way on the old primary may keep the fence off.
FENCE_PATIENCE: Final = 5.0
#: Seconds for which a source that does not answer is asked what it holds.
LOOK_UP = 15.0
#: Seconds for all processes to use the new map before the cache is made void.
READERS_PATIENCE: Final = 10.0
# Seconds of one wait for the replica; between two, it is looked at.
_SLICE = 1.0

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How to promote.

    :param force: the old primary is dead; what it did not send is lost.
    :param timeout: seconds that the replica may take to come near, and then, fenced, to catch up.
    """

    force: bool = False
    timeout: float = 30.0


@dataclass
class Report:
    """What became of a promotion. ``outcome`` is "promoted", "undone" or "checked"."""

    plan: Plan
    outcome: str
    forced: bool = False
    #: The last position of the old primary, that the new one has.
    position: str = ""
    #: Seconds in which writes were refused.
    refused_for: float | None = None
    loss: Loss | None = None
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        loss = self.loss
        return {
            "outcome": self.outcome,
            "old_primary": self.plan.node,
            "new_primary": self.plan.new,
            "moves": switching.as_text(self.plan),
            "forced": self.forced,
            "position": self.position,
            "refused_for": None if self.refused_for is None else round(self.refused_for, 3),
            "loss": loss
            and {"received": loss.received, "executed": loss.executed, "idle": loss.idle},
            "warnings": self.warnings,
        }


class Promotion:
    """A run that has passed the checks, in this process."""

    def __init__(self, run: journal.Run, options: Options, tell: Tell) -> None:
        self.run = run
        self.options = options
        self.plan = Plan.from_json(run.arguments)
        self.link: str = run.arguments["link"]
        self._tell = tell
        self._fenced_at: float | None = None
        loss = run.arguments["loss"]
        self.report = Report(
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

    def run_to_end(self) -> Report:
        if self.phase == "switched" or (self.phase == "switching" and not self._rule_out()):
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
        new = stack.enter_context(checking.operator(plan.new))
        old = None
        if not self.options.force:
            old = stack.enter_context(checking.operator(plan.node))
            if self.phase == "checked":
                self._come_near(old, new)
        position = self._catch_up(old, new)
        self._begin("stopping", f"stops the replication on {plan.new}")
        new.stop(self.link)
        self._begin("unfencing", f"lets {plan.new} take writes")
        new.unfence()
        self._verify(old, new, position)
        self._begin("switching", "publishes the new map")
        self._switch()
        self._begin("switched", f"{plan.new} is the primary of {', '.join(map(str, plan.moves))}")
        if self._fenced_at is not None:
            self.report.refused_for = time.monotonic() - self._fenced_at
        if old is not None:
            self._look_back(old, position)

    def _come_near(self, old: Server, new: Server) -> None:
        """While writers go on, so that they are refused for a moment only."""
        if self._reach(new, old.standing().logged):
            raise PromotionRefused(
                [
                    f"{self.plan.new!r} did not get within reach of {self.plan.node!r} in"
                    f" {self.options.timeout:g} s; nothing was fenced. Try again when it is nearer,"
                    " or allow more with --timeout"
                ]
            )

    def _fence(self, old: Server) -> Standing:
        try:
            old.fence(FENCE_PATIENCE)
        except OperationalError as exc:
            raise PromotionFailed(
                f"{old.name!r} could not be made read only within {FENCE_PATIENCE:g} s ({exc}):"
                " statements are under way there, a migration or LOCK TABLES perhaps."
            ) from exc
        standing = old.standing()
        if not standing.read_only:
            raise PromotionFailed(f"{old.name!r} does not become read only.")
        return standing

    def _catch_up(self, old: Server | None, new: Server) -> str:
        """Fence, and wait until the new primary has it all; returns the last position."""
        if old is None:
            self._begin("waiting", f"waits until {self.plan.new} has executed what it received")
            received = str(self.run.arguments["loss"][0])
            self._wait(new, received)
            self.report.position = received
            return received
        self._begin("fencing", f"makes {self.plan.node} read only")
        self._fenced_at = time.monotonic()
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

    def _wait(self, new: Server, position: str) -> None:
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

    def _reach(self, new: Server, position: str) -> str:
        """Wait for ``position``; returns what of it is missing in the end."""
        deadline = time.monotonic() + self.options.timeout
        while wanted := missing(position, new.standing().current):
            self.run.check()
            left = deadline - time.monotonic()
            if left <= 0:
                return wanted
            new.wait_for(wanted, min(left, _SLICE))
        return ""

    def _verify(self, old: Server | None, new: Server, position: str) -> None:
        """The last look before the map is switched."""
        if new.standing().read_only:
            raise PromotionFailed(f"{new.name!r} stays read only.")
        if old is None:
            if checking.answers(self.plan):
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

    def _switch(self) -> None:
        try:
            # Asks the journal, not the clock: whoever has taken over has ruled out what was read
            # before, and nothing that is read later may be published.
            switching.switch(
                self.plan,
                forced=self.options.force,
                confirm=lambda: self.run.note(phase="switching"),
            )
        except (TopologyError, Error, OSError) as exc:
            # Refused, or published and the answer was lost.
            if not self._look_up(exc):
                raise

    def _rule_out(self) -> bool:
        """Whether the switch that an earlier process may have sent is not published, and never
        will be."""
        if self._look_up():
            return False
        try:
            return switching.rule_out(self.plan)
        except TopologyError as exc:
            raise self._unsettled(exc) from exc

    def _look_up(self, cause: BaseException | None = None) -> bool:
        """Whether the map is switched; asks the source until it answers.

        :raises PromotionFailed: it does not: nothing may be undone, and nothing goes on.
        """
        end = time.monotonic() + LOOK_UP
        while True:
            self.run.check()
            try:
                return switching.was_switched(self.plan)
            except (TopologyError, OSError) as exc:
                if time.monotonic() > end:
                    raise self._unsettled(exc) from (cause or exc)
                time.sleep(_SLICE)

    def _unsettled(self, exc: BaseException) -> PromotionFailed:
        return PromotionFailed(
            f"Whether the new map was published is not known ({exc}). {self.plan.node!r} stays read"
            f" only, so nothing can be lost. When the source of the topology answers, run the same"
            f" command again, or 'manage.py shards promote {self.plan.node} --abort'.",
            settled=False,
        )

    def _look_back(self, old: Server, position: str) -> None:
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
        self.run.finish("done")

    def _forget_cached(self) -> None:
        """Rows that are lost may be cached. And whoever did not know the new map yet may have
        read on the old primary, and cached for all, what was changed on the new one already."""
        if runtime.cache() is None:
            return
        self._wait_for_readers()
        self._tell("makes the cache void: it may hold rows as the old primary has them")
        try:
            for found in caching.cached_models():
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
            reach = topology.wait_until_used(runtime.standing().version, READERS_PATIENCE)
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

    def abort(self) -> Report:
        """Undo what an earlier process has begun."""
        if self.phase == "switched" or (self.phase == "switching" and self._look_up()):
            raise PromotionFailed(
                f"The map is switched: {self.plan.new!r} may have been written already, so the"
                " promotion cannot be undone. Run the same command without --abort to finish it;"
                " to go back, let the old primary follow the new one and promote that.",
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
        text = journal.one_line(cause)
        touched, known = self.phase != "checked", len(self.report.warnings)
        try:
            switched = not self._undo(text)
        except LeaseLost:
            raise
        except PromotionFailed:
            raise
        except Exception as exc:
            raise PromotionFailed(
                f"{text} And it could not be undone ({exc}): run 'manage.py shards promote"
                f" {self.plan.node} --abort' when both servers and the source answer.",
                settled=False,
            ) from cause
        if switched:
            return  # Somebody published it after all: forward is the only way.
        if not isinstance(cause, Exception):
            raise cause  # Ctrl-C
        if isinstance(cause, PromotionRefused):
            raise cause
        done = "Everything is as before" if touched else "Nothing was touched"
        left = "".join(f" But {warning}." for warning in self.report.warnings[known:])
        raise PromotionFailed(f"{text} {done}.{left}") from cause

    def _undo(self, reason: str, lenient: bool = False) -> bool:
        """Back to how it was; False if the map turns out to be switched.

        :param lenient: an old primary that does not answer is left as it is: it may be dead.
        """
        plan, was = self.plan, self.run.arguments["was"]
        if self.phase == "checked":
            self.run.finish("undone", reason)
            return True
        if self.phase == "switching" and not switching.rule_out(plan):
            self._begin("switched", f"{plan.new} is the primary: the map had been published")
            return False
        self._begin("undoing", "goes back to how it was")
        try:
            with checking.operator(plan.new) as new:
                if was["new"]:
                    new.fence(FENCE_PATIENCE)
                new.start(self.link)
        except (PromotionRefused, Error) as exc:
            # The map does not name it, so nobody writes there: no reason to refuse writes here.
            self.report.warnings.append(
                f"{plan.new!r} could not be put back ({exc}). When it answers: START SLAVE"
                + (", and SET GLOBAL read_only = ON" if was["new"] else "")
            )
        if not self.options.force and not was["old"]:
            try:
                with checking.operator(plan.node) as old:
                    self.run.check()  # Logging in may have taken its time.
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
        self.run.finish("undone", reason)
        return True
