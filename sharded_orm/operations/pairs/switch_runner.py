"""Switch the active side of shards, and end switches that were interrupted. The operator's commands
call these functions.

A process first takes over the group's run in the journal. As long as it holds the run, no other
process can switch shards of the group. It switches one shard after the other, so that the writes of
each shard wait for some milliseconds only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from django.db import Error

from sharded_orm import runtime
from sharded_orm.backends.side_fence import SideFence
from sharded_orm.exceptions import LeaseLost
from sharded_orm.operations.exceptions import SwitchFailed, SwitchRefused
from sharded_orm.operations.pairs import KIND, preflight
from sharded_orm.operations.pairs.forced_switch import ForcedSwitch, GivenUpSide, check_forced
from sharded_orm.operations.pairs.pair_servers import is_silence, open_pair, open_side
from sharded_orm.operations.pairs.plan import SideChange, SwitchPlan, find_plan
from sharded_orm.operations.pairs.record import OPENING, PUBLISHING, SwitchRecord
from sharded_orm.operations.pairs.report import SwitchOptions, SwitchReport, Tell, UnsentWrites
from sharded_orm.operations.pairs.side_switch import (
    SideSwitch,
    close_side,
    remove_fence,
    wait_for,
)
from sharded_orm.operations.pairs.sides import open_fence
from sharded_orm.operations.pairs.status import pair_states
from sharded_orm.operations.pairs.upgrade_end import hold_upgrade, problems_of_end, upgraded_sides
from sharded_orm.operations.pairs.upgrade_state import stopped_writes
from sharded_orm.operations.promotion import cached_rows
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.conflicts import refuse_conflicts
from sharded_orm.operations.runs.rollout import Stopping
from sharded_orm.operations.shard_change import note_on_followers


def switch_sides(
    group: str,
    numbers: Sequence[int] | None,
    *,
    to_side: str | None = None,
    all_from: str | None = None,
    options: SwitchOptions | None = None,
    confirm: Callable[[UnsentWrites], bool] = lambda loss: True,
    stopping: Stopping | None = None,
    tell: Tell = lambda line: None,
) -> SwitchReport:
    """Make the passive server of a pair the active server of shards, while the site works (Yupoo,
    Y9).

    The two servers of a pair, its sides, replicate from each other. The active side takes the
    writes of a shard, and the passive side refuses them. The two never take writes at the same
    time, and no acknowledged write is lost. To undo a switch, switch again.

    In autocommit, writes of the shard wait for some milliseconds. A transaction that writes on the
    old side fails with :exc:`~sharded_orm.exceptions.SideFenced`. If this process is killed, call
    the function again: it first ends the unfinished switch.

    :param numbers: the numbers of the shards; None if ``all_from`` is given.
    :param to_side: the node that becomes active; by default the passive side of each shard.
    :param all_from: a node; all shards of the group that are active on it are switched.
    :param confirm: called with the writes that may be lost, before a side whose server is down is
        given up (``options.force``). If it returns False, the switch is refused.
    :param tell: called with a line for the operator.
    :raises SwitchRefused: the sides cannot be changed. Every reason is listed, and nothing was
        changed.
    :raises TopologyReadOnly: commands cannot change the topology.
    :raises TopologyError: the source of the topology does not answer.
    :raises OperationHeld: another process switches shards of the group, or an operation is under
        way during which no side may change.

    Costs, for each shard, about 30 statements and 5 for each table, and a publication.
    """
    options = options or SwitchOptions()
    arguments = {"to": to_side or f"all from {all_from}" if to_side or all_from else "other side"}
    stopping = stopping or Stopping()
    with ExitStack() as stack:
        upgrade = None
        if options.force and all_from is not None:
            upgrade = stack.enter_context(hold_upgrade(all_from))
        run = stack.enter_context(journal.hold_run(KIND, group, arguments))
        work = _SwitchWork(run, options, stopping, tell)
        work.begin(within_upgrade=upgrade is not None)
        try:
            upgraded = None
            if upgrade is not None:
                _refuse_end(upgrade.lost)
                upgrade.repair()
                upgraded = upgrade.lost, upgrade.survivor
            plan, loss = _checked_plan(group, numbers, to_side, all_from, options, upgraded)
            work.report.loss = loss
            if loss is not None and not confirm(loss):
                raise SwitchRefused(["nobody has confirmed that the side is given up"])
            if upgrade is not None:
                upgrade.migrate_survivor(stopping, tell)
        except Exception as exc:
            work.refuse(exc)
            raise
        work.switch(plan)
        if upgrade is not None and work.report.ok:
            upgrade.finish(group, options.patience, tell, needs_epoch=not plan.changes)
        work.finish()
    return work.report


def check_switch(
    group: str,
    numbers: Sequence[int] | None,
    *,
    to_side: str | None = None,
    all_from: str | None = None,
    options: SwitchOptions | None = None,
) -> SwitchPlan:
    """Check whether :func:`switch_sides` would work, and return what it would do. Changes nothing.

    :raises: the errors of :func:`switch_sides`, except :exc:`OperationHeld`.
    """
    options = options or SwitchOptions()
    runtime.refresh()
    upgraded = None
    if options.force and all_from is not None:
        upgraded = upgraded_sides(all_from)
        _refuse_end(all_from)
    plan, _ = _checked_plan(group, numbers, to_side, all_from, options, upgraded)
    return plan


def _refuse_end(lost: str) -> None:
    if problems := list(problems_of_end(lost)):
        raise SwitchRefused(problems)


def _checked_plan(
    group: str,
    numbers: Sequence[int] | None,
    to_side: str | None,
    all_from: str | None,
    options: SwitchOptions,
    upgraded: tuple[str, str] | None,
) -> tuple[SwitchPlan, UnsentWrites | None]:
    """Plan a switch and check the plan. Return the plan, and the writes that may be lost.

    Writes can be lost only if a side is given up (``options.force``). Otherwise None is returned
    for them.

    :param upgraded: the given-up side and the other side, if the switch ends a rolling upgrade of
        the pair; otherwise None.
    """
    if options.force and all_from is None:
        raise SwitchRefused(
            ["--force gives a whole side up, so it needs --all-from NODE in place of SHARDS"]
        )
    plan = find_plan(group, numbers, to_side=to_side, all_from=all_from, force=options.force)
    if options.force:
        return plan, check_forced(plan, options, upgraded)
    preflight.check_plan(plan, options)
    return plan, None


def repair(
    group: str, *, options: SwitchOptions | None = None, tell: Tell = lambda line: None
) -> SwitchReport:
    """End an unfinished switch of a shard's active side.

    If the topology names the new side as the active one already, the switch is completed: the new
    side takes writes. Otherwise it is undone, and the old side takes writes. This function also
    mends shards whose sides both refuse writes although no switch is unfinished: their active side
    takes writes again.

    :raises django.db.Error: a server does not answer.
    :raises OperationHeld: a process switches shards of the group at this time.
    :raises SwitchRefused: an upgrade that has stopped the writes of shards is not finished.
    """
    with journal.hold_run(KIND, group, {"to": "repair"}) as run:
        work = _SwitchWork(run, options or SwitchOptions(), Stopping(), tell)
        work.begin(repairs=True)
        if why := stopped_writes():
            # The sides may have different schemas.
            work.refuse(refusal := SwitchRefused([why]))
            raise refusal
        work.open_active_sides()
        work.finish()
    return work.report


def fence_passive_sides(
    group: str, numbers: Sequence[int], *, tell: Tell = lambda line: None
) -> int:
    """Make the passive server of each shard refuse writes to all tables of the shard.

    The two servers of a pair replicate from each other. For each shard, one of them is active
    (takes writes), and the other is passive. Call this when a range of shards has got a pair of
    servers, and whenever tables were created, because a new table has no triggers that refuse
    writes. The call can be repeated.

    :param numbers: the numbers of the shards.
    :param tell: called with a line for the operator.
    :returns: the number of shards.
    :raises SwitchRefused: a shard is not on a pair, or the account lacks privileges.
    :raises OperationHeld: a process switches shards of the group at this time, or creates tables.
    :raises SwitchFailed: replication does not create the tables on the passive server in time.
    :raises django.db.Error: a server does not answer.
    """
    with journal.hold_run(KIND, group, {"to": "fence"}) as run:
        work = _SwitchWork(run, SwitchOptions(), Stopping(), tell)
        work.begin()
        try:
            changes = find_plan(group, numbers).changes
            if problems := preflight.passive_server_problems(changes):
                raise SwitchRefused(problems)
            for source, target in sorted({(change.source, change.target) for change in changes}):
                _wait_for_tables(source, target, run)
            if problems := preflight.passive_problems(changes):
                raise SwitchRefused(problems)
            for change in changes:
                with open_fence(change.on(change.target), run.note) as fence:
                    close_side(fence)
                tell(f"{change}: {change.target} refuses writes")
        except Exception as exc:
            # An unfinished run would refuse migrations.
            work.refuse(exc)
            raise
        work.finish()
    return len(changes)


def _wait_for_tables(source: str, target: str, run: journal.JournalRun) -> None:
    """Wait until ``target``, the passive side, has all tables that ``source`` has."""
    seconds = SwitchOptions().patience
    with open_pair(source, target) as servers:
        position = servers.first.status().logged
        if lacking := wait_for(servers.second, position, seconds, run.check):
            raise SwitchFailed(
                f"{target!r} did not get to {lacking} within {seconds:g} s, so tables may be missing there."
                " Mend the replication, and try again."
            )


class _SwitchWork:
    """Switches shards of one group. The process holds the group's run in the journal."""

    def __init__(
        self, run: journal.JournalRun, options: SwitchOptions, stopping: Stopping, tell: Tell
    ) -> None:
        self._run = run
        self._options = options
        self._stopping = stopping
        self._tell = tell
        self.report = SwitchReport(run.subject, run.id)
        self._given_up = GivenUpSide(run.note, self._note)
        #: The time (``time.monotonic()``) since which the cache may have outdated rows because of
        #: a switch; infinite if it has none.
        self._stale_since = float("inf")

    def begin(self, *, repairs: bool = False, within_upgrade: bool = False) -> None:
        """End the switch that an earlier process has left unfinished.

        :param repairs: whether the caller begins no other switch. If so, an interrupted operation
            of another kind, such as a migration, is no reason to refuse.
        :param within_upgrade: whether the caller ends a rolling upgrade, and holds its run.
        """
        within = "rolling" if self._options.is_upgrade or within_upgrade else None
        refuse_conflicts(self._run, only_held=repairs, within=within)
        runtime.refresh()
        record = SwitchRecord.unfinished(self._run)
        if record is not None:
            self._tell(f"ends the switch of {record.change}, which was broken off: {record.phase}")
            self._end(record)

    def open_active_sides(self) -> None:
        """Find shards of which both sides refuse writes, and make their active side take writes.

        Both sides may refuse writes if the journal was lost during a switch.
        """
        if self._run.arguments.get("current") is not None:
            return
        for state in pair_states(runtime.group(self._run.subject).shards()):
            for shard in state.closed:
                change = SideChange(shard.group, shard.number, str(shard.replica), shard.node)
                if shard in state.writable:
                    self.report.failures[shard.number] = (
                        f"{change.target!r} is the active side by the topology and refuses writes, and"
                        f" {change.source!r} takes them. If the topology was changed by hand, change it"
                        " back."
                    )
                else:
                    self._open_active_side(change)

    def _open_active_side(self, change: SideChange) -> None:
        seconds = self._options.patience
        with open_pair(change.source, change.target) as servers:
            position = servers.first.status().logged
            lacking = wait_for(servers.second, position, seconds, self._run.check)
        if lacking:
            self.report.failures[change.number] = (
                f"both sides refuse writes, and {change.target!r} did not get to {lacking} of"
                f" {change.source!r} within {seconds:g} s. Mend the replication, and try again."
            )
            return
        with open_fence(change.on(change.target), self._run.note) as fence:
            self._remove_fence(change, fence)
        self._tell(f"{change}: {change.target} takes writes again")

    def refuse(self, cause: Exception) -> None:
        """Finish the run as refused, because a check has failed with ``cause``."""
        self._invalidate()
        self._run.finish("refused", journal.one_line(cause))

    def switch(self, plan: SwitchPlan) -> None:
        self.report.already = list(plan.already)
        for change in plan.changes:
            if self._stopping():
                break
            self._switch_one(change)
            if self._run.arguments.get("current") is not None:
                # The switch of this shard could be neither completed nor undone. A later command
                # needs its record. The next switch would overwrite it, so do not begin that one.
                break
        self.report.stopped = self._stopping.cause

    def finish(self) -> None:
        """Finish the run in the journal, unless a switch could be neither completed nor undone.

        Such a run stays unfinished, so that the next command ends the switch.
        """
        self._invalidate()
        if self.report.switched:
            self._wait_for_followers()
        if self._run.arguments.get("current") is not None:
            return
        failures = self.report.failures
        if failures:
            self._run.finish("failed", f"{len(failures)} shards were not switched")
        else:
            self._run.finish("stopped" if self._stopping() else "done")

    def _switch_one(self, change: SideChange) -> None:
        record = SwitchRecord(self._run, change)
        try:
            with self._sides(record) as side_switch:
                side_switch.run()
                self._note_reads(change, is_followed=side_switch.is_followed)
                self._remove_fence(change, side_switch.new)
        except LeaseLost:
            raise
        except BaseException as exc:
            self._end_after(record, exc)
            if not isinstance(exc, Exception):
                raise
        else:
            record.end()
            self.report.pauses.append(side_switch.pause)
            self._record_switched(change)
            runtime.refresh()
            if time.monotonic() > self._stale_since + cached_rows.READERS_PATIENCE:
                self._invalidate()

    @contextmanager
    def _sides(self, record: SwitchRecord) -> Iterator[SideSwitch | ForcedSwitch]:
        change, patience = record.change, self._options.patience
        with ExitStack() as stack:
            new = stack.enter_context(open_fence(change.on(change.target), record.confirm_new_side))
            if change.epoch is not None:
                survivor = stack.enter_context(open_side(change.target))
                yield ForcedSwitch(record, survivor, new, self._given_up, patience, self._run.check)
                return
            servers = stack.enter_context(open_pair(change.source, change.target))
            old = stack.enter_context(open_fence(change.on(change.source), record.confirm))
            yield SideSwitch(record, servers, old, new, patience, self._run.check)

    def _note(self, note: str) -> None:
        if note not in self.report.notes:
            self.report.notes.append(note)

    def _end_after(self, record: SwitchRecord, cause: BaseException) -> None:
        """End a switch that has failed with ``cause``: complete it if the topology names the new
        side already, otherwise undo it.
        """
        change = record.change
        why = str(cause) if isinstance(cause, SwitchFailed) else journal.one_line(cause)
        self.report.failures[change.number] = why
        if SwitchRecord.unfinished(self._run) is None:
            return
        try:
            self._end(record)
        except LeaseLost:
            raise
        except Exception as exc:
            self.report.failures[change.number] = (
                f"{why} The switch was not ended either ({journal.one_line(exc)}), and writes of the"
                f" shard may be refused until it is: run 'manage.py shards switch {change.group}"
                " --repair' when the cause is mended. Nothing is lost."
            )

    def _end(self, record: SwitchRecord) -> None:
        """End the switch of a shard: complete it if the topology names the new side already,
        otherwise undo it.
        """
        change = record.change
        is_published = record.phase == OPENING or (
            record.phase == PUBLISHING and not record.rule_out()
        )
        if is_published:
            record.enter(OPENING)
            self._note_reads(change, is_followed=False)
            runtime.refresh()
            if change.epoch is not None:
                # The old side may be back since it was given up.
                self._given_up.close(change)
        # Make one side take writes: the new side if the switch is completed, the old side if it is
        # undone. The opposite side refuses writes by now, or its server is down.
        side = change.target if is_published else change.source
        try:
            with open_fence(change.on(side), record.confirm) as fence:
                if is_published and change.epoch is not None:
                    fence.store_epoch(change.epoch)
                self._remove_fence(change, fence)
        except Error as exc:
            if change.epoch is None:
                # If the server is down, it need not take writes, because this process gives it up
                # next.
                may_be_dead = self._options.force and is_silence(side, exc)
            else:
                may_be_dead = not is_published
            if not may_be_dead:
                raise
            self._note(
                f"{side} could not be asked whether it refuses writes of {change}"
                f" ({journal.one_line(exc)}); if it does, 'shards switch {change.group} --repair' opens it"
            )
        record.end()
        if is_published:
            self._record_switched(change)
        else:
            self._tell(f"{change}: {change.source} is active as before")

    def _remove_fence(self, change: SideChange, fence: SideFence) -> None:
        if why := remove_fence(fence):
            self.report.notes.append(
                f"the triggers of {change} on its active side stay until its next switch ({why}); they"
                " refuse nothing"
            )

    def _record_switched(self, change: SideChange) -> None:
        self.report.failures.pop(change.number, None)
        self.report.switched[change.number] = change.target
        self._tell(f"{change}: {change.target} is active")

    # ##### Processes that do not know the new topology yet #####

    def _wait_for_followers(self) -> None:
        """Wait until every process uses the new topology. A note in the report names processes that
        do not.

        If such a process writes to a switched shard, the old side refuses the write. The process
        then reads the new topology.
        """
        if note := note_on_followers(
            "read on the old side until they follow, or write to a switched shard"
        ):
            self.report.notes.append(note)

    def _note_reads(self, change: SideChange, *, is_followed: bool) -> None:
        """Record that the cache must be invalidated, unless it cannot have outdated rows.

        A process that uses the old topology reads rows from the old side and caches them, even if
        they have been changed on the new side.

        :param is_followed: whether all processes used the new topology before the new side took
            writes.
        """
        if not is_followed:
            self._run.note(left_side=change.source)
            self._stale_since = min(self._stale_since, time.monotonic())

    def _invalidate(self) -> None:
        """Invalidate the cache if :meth:`_note_reads` has recorded that this is necessary.

        This empties the whole cache. So it is done once for all switches within some seconds.
        """
        if (node := self._run.arguments.get("left_side")) is not None:
            cached_rows.invalidate(node, self._tell, self.report.notes.append)
            self._run.note(left_side=None)
            self._stale_since = float("inf")
