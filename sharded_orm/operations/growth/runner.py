"""Add shards to a group (a growth), or give up a growth that was interrupted.

The command ``shards grow`` calls these functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sharded_orm import runtime
from sharded_orm.exceptions import TopologyReadOnly
from sharded_orm.operations import topology
from sharded_orm.operations.exceptions import GrowthRefused, PairRefused
from sharded_orm.operations.growth.growth_run import GrowthReport, GrowthRun, Tell
from sharded_orm.operations.growth.new_range import NewRange
from sharded_orm.operations.migrate import migration_run
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.conflicts import refuse_conflicts
from sharded_orm.operations.runs.rollout import Stopping
from sharded_orm.routing.base import key_routing_of
from sharded_orm.topology.transitions import KeyRouting

KIND: Final = "grow"


def grow(
    name: str,
    count: int,
    *,
    primary: str,
    replica: str | None = None,
    is_pair: bool = False,
    weight: float = 1,
    bounds: Sequence[Any] = (),
    open_it: bool = True,
    progress: migration_run.Progress,
    stopping: Stopping | None = None,
    tell: Tell = lambda line: None,
) -> GrowthReport:
    """Add ``count`` shards to group ``name``: create, migrate, publish and open them as one range.

    After any interruption, a call with the same arguments continues the growth. Until it is
    complete or given up, a call with different arguments is refused. Call this in a process that
    does nothing else: during the call, the process uses a topology that has the new shards already,
    although their databases may not exist yet.

    :param primary: the node of the new shards.
    :param replica: the node of their copies; None for no copies.
    :param is_pair: whether ``primary`` and ``replica`` are a pair of servers that replicate from
        each other. Then half of the new shards are active on each.
    :param weight: how often a new shard gets a new key, relative to the weights of other ranges.
    :param bounds: for a group with ``BOUNDS``, the lowest key of each new shard. These keys must be
        in ascending order, and above every key in use. For other groups, ``bounds`` is empty.
    :param open_it: whether to open the range for new keys at the end.
    :param progress: receives reports during the migration of the new shards.
    :param stopping: a flag that ends the growth early once it is set; None if nothing can end it
        early.
    :param tell: called with a line for the operator in each phase.
    :raises GrowthRefused: the group cannot grow, or not with these arguments.
    :raises PairRefused: the two nodes do not replicate each other correctly.
    :raises SwitchRefused: the passive sides of a pair cannot be made to refuse writes.
    :raises TopologyReadOnly: commands cannot change the topology. The message tells the operator
        what to do instead.
    :raises OperationHeld: another process grows the group, or moves shards of it.
    """
    # Read the topology from its source, because this process may have loaded an outdated copy of it
    # from the disk. A growth from an outdated topology could create shards that exist already.
    runtime.refresh()
    if runtime.topology() is not runtime.config().topology:
        raise GrowthRefused(
            "This process uses another topology than the configured one, as test runs do: the shards"
            " would be made on the real nodes."
        )
    kind = _growable(name)
    arguments = {
        "count": count, "primary": primary, "replica": replica, "weight": weight,
        "bounds": list(bounds), "pair": is_pair or None,
    }  # fmt: skip
    if count < 1:
        raise GrowthRefused(f"A group grows by one shard or more, not by {count!r}.")
    with journal.hold_run(KIND, name, {**arguments, "first": None}) as run:
        refuse_conflicts(run)
        if run.arguments["first"] is None:
            is_resumed = False
            group = runtime.group(name)
            new = NewRange(
                name,
                group.count,
                group.count + count - 1,
                primary,
                replica,
                weight,
                tuple(bounds),
                is_pair,
            )
        else:
            is_resumed = True
            _require_same(name, run.arguments, arguments)
            new = NewRange(**{**run.arguments["range"], "bounds": tuple(bounds)})
            tell(f"goes on with run {run.id}: range {new}")
        growth = GrowthRun(run, new, kind, progress, stopping or Stopping(), tell)
        try:
            report = growth.run_to_end(arguments, open_it)
        except (GrowthRefused, PairRefused, TopologyReadOnly) as exc:
            if not is_resumed and run.arguments["first"] is None:
                run.finish("refused", str(exc))
            raise
        if not report.problems:
            run.finish()
        return report


def give_up(name: str) -> NewRange | None:
    """Give up a growth that was interrupted before its range was added to the topology.

    Return the range of shards that the growth would have added. Return None if no growth was
    interrupted, or if it was interrupted before it chose a range. The databases that the growth has
    created are kept, and a later growth of the group uses them.

    :raises GrowthRefused: the topology has the range already.
    :raises OperationHeld: another process grows the group.
    """
    last = journal.last_run(KIND, name)
    if last is None or last.finished_at is not None:
        return None
    with journal.hold_run(KIND, name, {"first": None}) as run:
        new = None
        if run.arguments.get("first") is not None:
            new = NewRange(**run.arguments["range"])
            if new.entries_in(topology.current()):
                raise GrowthRefused(
                    f"Range {new} is in the topology already and does not go again. Run the same"
                    f" 'shards grow' to finish, or leave it closed: 'manage.py shards close"
                    f" {name} {new.first}-{new.last}'."
                )
        run.finish("given up")
        return new


def _growable(name: str) -> KeyRouting:
    """Check that the group ``name`` can get more shards, and return how it finds the shard of a
    key.

    :raises GrowthRefused: the group computes the shard of a key from the number of shards, as the
        strategy ``modulo`` does. With more shards, existing keys would be looked for on wrong
        shards.
    """
    group = runtime.group(name)
    kind = key_routing_of(group)
    if kind is KeyRouting.COMPUTED:
        raise GrowthRefused(
            f"Group {name!r} cannot grow: its strategy {group.strategy!r} computes the shard of a"
            " key from the number of shards, so nearly every key would be looked for on another"
            " shard. Begin a new group, with a directory, and move the rows."
        )
    return kind


def _require_same(name: str, before: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Check that an interrupted growth is continued with the same arguments.

    :param name: the name of the group.
    :param before: the arguments of the interrupted growth.
    :param arguments: the arguments of this call.
    :raises GrowthRefused: the arguments differ.
    """
    differs = [key for key, value in arguments.items() if before.get(key) != value]
    if differs:
        options = " ".join(f"--{key} {before[key]}" for key in ("count", "primary"))
        raise GrowthRefused(
            f"Group {name!r} was being grown by other arguments ({', '.join(differs)} differ), and"
            f" that was broken off. Finish it with 'manage.py shards grow {name} {options} …', or"
            f" forget it with 'manage.py shards grow {name} --abort'."
        )
