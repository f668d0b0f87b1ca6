"""End a rolling upgrade of a pair that has lost one side for ever (``shards switch --force``).

The other side, the survivor, executes the changes that it has received, and then takes writes. Some
of these changes may be rows of the new schema, which do not fit into the old one. So before the
survivor executes the changes, a shard is migrated there in two cases: the lost side may have sent
rows of the new schema, or the migration of the shard on the survivor has begun. The journal shows
which shards these are. The lost side may have other tables than the survivor. So it can come back
only as a new copy of the survivor.

A side can also be lost while an operator aborts an upgrade. An abort gives the old schema back to
the tables of one side. If this side is lost, the survivor is the side with the old schema. If the
side with the old schema is lost, the survivor keeps the new schema. But if the abort has begun to
change tables of the survivor, only the lost side knows how they were before the upgrade. Then the
upgrade cannot end without the lost side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sharded_orm import runtime
from sharded_orm.operations import topology
from sharded_orm.operations.migrate.migration_run import Failure
from sharded_orm.operations.pairs.forced_switch import end_replication
from sharded_orm.operations.pairs.pair_servers import PairServers, open_side, shards_of
from sharded_orm.operations.pairs.report import Tell
from sharded_orm.operations.pairs.rolling_plan import RollingPlan, UpgradeRound
from sharded_orm.operations.pairs.round_steps import RoundSteps
from sharded_orm.operations.pairs.sides import open_fence
from sharded_orm.operations.pairs.upgrade_state import KIND, steps_of, unfinished, unfinished_run
from sharded_orm.operations.promotion import cached_rows
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs import lease as leases
from sharded_orm.operations.runs.conflicts import EVERYTHING
from sharded_orm.operations.runs.rollout import Stopping, Waves
from sharded_orm.operations.selection import numbers_text
from sharded_orm.topology.document import Document
from sharded_orm.topology.model import Shard
from sharded_orm.topology.range_entries import entry_of, replace_shard

#: The state of the journal's run for an upgrade that has ended without one side.
GIVEN_UP = "given up"


def upgraded_sides(node: str) -> tuple[str, str] | None:
    """Return ``node`` and the other side of its pair, if a rolling upgrade of the pair is not
    finished. Otherwise return None.

    One or two queries.
    """
    last = unfinished_run()
    if last is None or node not in last.arguments["pair"]:
        return None
    return node, next(name for name in last.arguments["pair"] if name != node)


def problems_of_end(lost: str) -> Iterator[str]:
    """Yield the reason why an unfinished upgrade cannot end without the side ``lost``.

    Yield nothing if the upgrade can end, or if no upgrade of this pair is unfinished. One or two
    queries.
    """
    run = unfinished_run()
    if run is None or lost not in run.arguments["pair"]:
        return
    arguments, plan = run.arguments, RollingPlan.from_json(run.arguments)
    current, _step = _current(arguments, plan)
    if arguments.get("returning") and current is not None and current.active == lost:
        yield (
            f"an abort has begun to give {current} on {current.passive!r} the old schema back, and only"
            f" {lost!r} knows that schema: start {lost!r} again, with its data or with a backup,"
            " and finish the abort by 'manage.py migrate_shards --rolling --abort'. If there is neither, see"
            " 'If a side is lost for ever' in the documentation of upgrades"
        )
    elif arguments.get("given_up", lost) != lost:
        yield unfinished(plan.first, plan.second)


def _current(arguments: Mapping[str, Any], plan: RollingPlan) -> tuple[UpgradeRound | None, int]:
    """Return the next step of an upgrade: its round, and its index in the round. The round is None
    if all rounds are finished.
    """
    number, step = divmod(int(arguments["done"]), len(steps_of(arguments)))
    return (plan.rounds[number] if number < len(plan.rounds) else None), step


@contextmanager
def hold_upgrade(node: str) -> Iterator[UpgradeEnd | None]:
    """A context manager that takes over the unfinished rolling upgrade of the pair of ``node``.

    During its block, no other process can work on the upgrade. Yields an object that can end the
    upgrade; None if there is no unfinished upgrade.

    :raises OperationHeld: a process works on the upgrade.
    """
    if upgraded_sides(node) is None:
        yield None
        return
    with journal.hold_run(KIND, EVERYTHING, {}) as run:
        if "done" in run.arguments:
            yield UpgradeEnd(run, node)
        else:  # it has ended meanwhile
            run.finish("refused", "no upgrade is unfinished")
            yield None


class UpgradeEnd:
    """Ends one rolling upgrade without the side ``lost``. To be used by one thread.

    If the process is killed during a method, another process can call the method again.
    """

    def __init__(self, run: journal.JournalRun, lost: str) -> None:
        self._run = run
        self._plan = RollingPlan.from_json(run.arguments)
        self.lost = lost
        (self.survivor,) = {self._plan.first, self._plan.second} - {lost}

    def repair(self) -> None:
        """Store the new epochs of shards on the survivor, if an earlier process was interrupted.

        That process may have published the epochs in the topology, but not stored them on the
        survivor.
        """
        if group := self._run.arguments.get("new_epochs"):
            self._store_epochs(self._shards_of(group))

    def migrate_survivor(self, stopping: Stopping, tell: Tell) -> None:
        """Migrate the shards that need the new schema on the survivor before it takes writes.

        The survivor may have received rows of the new schema of these shards, or their migration
        there has begun. Before the migration, record in the journal which shards will have the new
        schema on the survivor.

        :raises PairRefused: a shard was not migrated.
        :raises OperationStopped: ``stopping`` was set.
        """
        behind = self._behind()
        self._run.note(given_up=self.lost, upgraded=self._upgraded(behind))
        if behind is not None:
            tell(f"{self.survivor} gets the new schema of {behind}, before it executes rows of it")
            with open_side(self.survivor) as side:
                # The lost side is not asked.
                servers = PairServers(side, side, shards_of(self.lost, self.survivor))
                self._steps(servers, stopping, tell).migrate(behind, side)

    def finish(self, group: str, patience: float, tell: Tell, *, needs_epoch: bool) -> None:
        """End the replication from the lost side, and then the upgrade.

        :param group: the group whose shards were given up.
        :param needs_epoch: whether this method must begin a new epoch of the shards. If the lost
            side comes back, it is recognized because it has an older epoch. A switch begins a new
            epoch as well, but if no shard of the group was active on the lost side, there was no
            switch.
        """
        with open_side(self.survivor) as side:
            end_replication(side, patience, self._run.check, "The upgrade was not ended")
            shards = self._shards_of(group)
            if needs_epoch:
                self._run.note(new_epochs=group)
                topology.change(
                    lambda document: self._with_epochs(document, shards),
                    f"a rolling upgrade ended without {self.lost}",
                )
                runtime.refresh()
                self._store_epochs(shards)
            if self._plan.stop_writes or self._run.arguments.get("aborting"):
                servers = PairServers(side, side, ())
                self._steps(servers, Stopping(), tell).open(
                    [
                        shard
                        for each in self._plan.rounds
                        for shard in each.shards()
                        if shard.node == self.survivor
                    ]
                )
        if (left := self._run.arguments.get("left_side")) is not None:
            cached_rows.invalidate(left, tell, tell)
        groups = runtime.topology().groups
        epochs = {s.schema: groups[s.group].range_of(s.number).epoch for s in shards}
        self._run.note(lost_at=epochs)
        upgraded = self._run.arguments["upgraded"]
        new = ", ".join(f"{name} {_text(name, numbers)}" for name, numbers in upgraded.items())
        outcome = (
            f"{self.lost} was given up; on {self.survivor}, {new or 'no shard'} has the new schema"
        )
        self._run.finish(GIVEN_UP, outcome)
        tell(f"The rolling upgrade has ended: {outcome}")

    def _behind(self) -> UpgradeRound | None:
        """Return the shards whose schema on the survivor (the server of the pair that is left) must
        be upgraded now. Return None if there are no such shards.
        """
        current, step = _current(self._run.arguments, self._plan)
        if current is None or step > self._own_step(current):
            return None
        done = int(self._run.arguments["done"])
        is_begun = int(self._run.arguments.get("begun", done)) >= done
        first = self._own_step(current)
        if current.active == self.survivor and not self._plan.stop_writes:
            # In the step "switch", shards become active on the lost side, which has the new schema
            # already. From this step on, it may have sent rows of the new schema.
            first = steps_of(self._run.arguments).index("switch")
        if step + is_begun <= first:
            return None
        # Leave out shards that are active on the survivor. They have the old schema there, and need
        # no other, because the lost side has sent no rows of them.
        numbers = {
            selected.group.name: [
                shard.number
                for shard in selected.shards
                if shard.node == self.lost or self._plan.stop_writes
            ]
            for selected in current.selected()
        }
        numbers = {name: each for name, each in numbers.items() if each}
        return replace(current, numbers=numbers) if numbers else None

    def _own_step(self, current: UpgradeRound) -> int:
        """Return the index of the step in which the survivor gets the new schema."""
        names = steps_of(self._run.arguments)
        if current.passive == self.survivor:
            return names.index("migrate-passive")
        return names.index("migrate-active" if self._plan.stop_writes else "migrate-other")

    def _upgraded(self, behind: UpgradeRound | None) -> dict[str, list[int]]:
        """Return a dict that maps each group to the numbers of its shards with the new schema on
        the survivor.
        """
        number = int(self._run.arguments["done"]) // len(steps_of(self._run.arguments))
        current, step = _current(self._run.arguments, self._plan)
        rounds = list(self._plan.rounds[:number])
        if behind is not None:
            rounds.append(behind)
        elif current is not None and step > self._own_step(current):
            rounds.append(current)
        # Keep the shards that an earlier, interrupted call has recorded, because it may have
        # migrated them.
        upgraded = {name: set(n) for name, n in self._run.arguments.get("upgraded", {}).items()}
        for each in rounds:
            for name, numbers in each.numbers.items():
                upgraded.setdefault(name, set()).update(numbers)
        return {name: sorted(numbers) for name, numbers in upgraded.items()}

    def _steps(self, servers: PairServers, stopping: Stopping, tell: Tell) -> RoundSteps:
        return RoundSteps(
            self._run, self._plan, servers, Waves(), 0.0, _FailureLines(tell), stopping, tell
        )

    def _shards_of(self, group: str) -> list[Shard]:
        return [s for s in shards_of(self.lost, self.survivor) if s.group == group]

    def _with_epochs(self, document: Document, shards: Sequence[Shard]) -> Document:
        self._run.note()
        content = document.content()
        for shard in shards:
            entry: Any = entry_of(content, shard.group, shard.number)
            replace_shard(
                content, shard.group, shard.number, {**entry, "epoch": entry.get("epoch", 0) + 1}
            )
        return Document.from_content(content)

    def _store_epochs(self, shards: Sequence[Shard]) -> None:
        groups = runtime.topology().groups
        for shard in shards:
            with open_fence(replace(shard, node=self.survivor), self._run.note) as fence:
                fence.store_epoch(groups[shard.group].range_of(shard.number).epoch)


def last_lost_at(node: str) -> dict[str, int]:
    """Return the epochs of shards that began when ``node`` was given up during an upgrade.

    The dict maps the schema of each shard to its epoch. If ``node`` was given up several times, the
    last time counts. The dict is empty if it was never given up during an upgrade. One query.
    """
    runs = leases.runs().filter(kind=KIND, subject=EVERYTHING, state=GIVEN_UP).order_by("-pk")
    return next((run.arguments["lost_at"] for run in runs if run.arguments["given_up"] == node), {})


def _text(group: str, numbers: Sequence[int]) -> str:
    shards = runtime.topology().groups[group]
    return numbers_text([shards.shard(number) for number in numbers])


class _FailureLines:
    """Receives the progress of a migration, and passes only failures on to the operator."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def resume(self, group: str, run: int, done: Sequence[int], left: int) -> None: ...
    def begin(self, group: str, total: int) -> None: ...
    def done(self, alias: str) -> None: ...
    def failed(self, failure: Failure) -> None:
        self._tell(f"{failure.alias}: {failure.error}")

    def end(self) -> None: ...
