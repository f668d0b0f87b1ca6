"""Split a server: move some of its shards to another server (Pinterest, P10).

On MariaDB, the shards move to a replica of the server, which has their rows already. This is
possible because a replica on MariaDB can take writes while it still replicates. On other databases,
the rows are copied. In both cases, each shard is moved separately
(:mod:`sharded_orm.operations.shard_moves`). If the move of a shard fails, the shard stays where it
is, and the command can be run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from django.db import Error

from sharded_orm import runtime
from sharded_orm.exceptions import MoveRefused
from sharded_orm.operations import shard_moves
from sharded_orm.operations.nodes import node_connection
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs import lease as leases
from sharded_orm.operations.runs.conflicts import refuse_conflicts
from sharded_orm.operations.runs.rollout import Stopping
from sharded_orm.operations.shard_moves.leftovers import remove_expired
from sharded_orm.operations.shard_moves.plan import ShardMovePlan
from sharded_orm.operations.shard_moves.replication import open_pair, takes_shards_over
from sharded_orm.operations.shard_moves.request import Tell
from sharded_orm.operations.shard_moves.shard_sessions import SchemaSessions
from sharded_orm.topology.model import Shard, server_of

#: Tables can be dropped only when no open transaction uses them. The cleanup waits for this number
#: of seconds at most.
_PATIENCE = 30.0


def check(
    source: str,
    target: str,
    shards: Mapping[str, Sequence[int]],
    *,
    replica: str | None = None,
    options: shard_moves.ShardMoveOptions | None = None,
) -> list[ShardMovePlan]:
    """Return what :func:`split` would do, as one plan for each group. Changes nothing.

    :raises MoveRefused: :func:`split` would refuse to move the shards. Every reason is listed.
    """
    runtime.refresh()
    problems, plans = list(_wrong_nodes(source, target, shards)), []
    if problems:
        raise MoveRefused(problems)
    by_replication = takes_shards_over(source)
    if by_replication and options is not None and options.rate is not None:
        problems.append(
            f"a rate is for copies, and {target!r} gets the rows by replication: leave out --rate"
        )
    for group, numbers in shards.items():
        try:
            plans.append(
                shard_moves.check_shard_moves(
                    group, numbers, target, replica, by_replication=by_replication, options=options
                )
            )
        except MoveRefused as exc:
            problems += [problem for problem in exc.problems if problem not in problems]
    if problems:
        raise MoveRefused(problems)
    return plans


def split(
    source: str,
    target: str,
    shards: Mapping[str, Sequence[int]],
    *,
    replica: str | None = None,
    options: shard_moves.ShardMoveOptions | None = None,
    stopping: Stopping | None = None,
    tell: Tell = lambda line: None,
) -> list[shard_moves.ShardMoveReport]:
    """Move shards from the server ``source`` to ``target`` while the site runs.

    On MariaDB, ``target`` must be a replica of ``source``, so that it has the rows already. On
    other databases, it must not be a replica, and the rows are copied.

    The groups are moved one after the other. If a shard cannot be moved, the next group is not
    begun. Can be repeated.

    :param shards: maps the name of each group to the numbers of its shards that are to move.
    :param replica: the node that becomes the replica of the moved shards; see
        :func:`~sharded_orm.operations.shard_moves.plan.plan_shard_moves`.
    :return: a list of reports, one for each group that was begun. If an earlier process was killed
        during a move, the list may begin with a report on this move.
    :raises: the errors of :func:`~sharded_orm.operations.shard_moves.runner.move_shards`.
    """
    reports = list(_end_broken_moves(shards, tell))
    check(source, target, shards, replica=replica, options=options)
    for group, numbers in shards.items():
        report = shard_moves.move_shards(
            group,
            numbers,
            target,
            replica=replica,
            by_replication=takes_shards_over(source),
            options=options,
            stopping=stopping,
            tell=tell,
        )
        reports.append(report)
        if not report.ok:
            break
    return reports


def _end_broken_moves(groups: Iterable[str], tell: Tell) -> Iterator[shard_moves.ShardMoveReport]:
    """Complete or undo the moves of shards that an earlier process has left unfinished.

    Such a move may leave a copy of the shard's tables, and then the checks would refuse the split.
    Yield a report for each group in which a move was completed.
    """
    for group in groups:
        if leases.runs().filter(kind=shard_moves.KIND, subject=group, unfinished=True).exists():
            report = shard_moves.repair(group, tell=tell)
            if report.moved:
                yield report


def _wrong_nodes(source: str, target: str, shards: Mapping[str, Sequence[int]]) -> Iterator[str]:
    topology = runtime.topology()
    unknown = [name for name in (source, target) if name not in topology.nodes]
    if unknown:
        yield from (
            f"there is no node {name!r}; NODES has {sorted(topology.nodes)!r}" for name in unknown
        )
        return
    for name, numbers in shards.items():
        group = runtime.group(name)
        for number in numbers:
            if number in group and not _is_on(group.shard(number), source, target):
                yield f"shard {number} of group {name!r} is on {group.shard(number).node!r}"


def _is_on(shard: Shard, *nodes: str) -> bool:
    known = runtime.topology().nodes
    servers = {server_of(known[name], name) for name in nodes}
    return server_of(known[shard.node], shard.node) in servers


# ##### Afterwards #####


def clean_up(source: str, target: str, *, tell: Tell = lambda line: None) -> list[str]:
    """End a split: drop the copies of tables that the servers do not need any more.

    Can be repeated. The function does this:

    1. It checks that each shard on ``target`` has its tables there.
    2. On MariaDB, it ends the replication from ``source`` to ``target``. Then it drops on
       ``target`` the copies of the shards that have stayed on ``source``.
    3. It drops the old tables that moves of shards have left, even if the time for which they are
       kept is not over. This includes moves that did not belong to this split.

    :return: sentences about what was dropped, and what could not be dropped.
    :raises MoveRefused: the replication is still needed, a move was interrupted, or a shard lacks
        tables. Nothing was changed.
    :raises OperationHeld: shards of a group are being moved.
    """
    with ExitStack() as stack:
        runs = []
        for group in sorted(runtime.topology().groups):
            run = stack.enter_context(
                journal.hold_run(shard_moves.KIND, group, {"to": "cleanup", "shards": []})
            )
            runs.append(run)
        for run in runs:
            refuse_conflicts(run)
        runtime.refresh()
        try:
            notes = _clean_up(source, target, runs, tell)
        except MoveRefused as exc:
            for run in runs:
                if run.arguments.get("current") is None:
                    run.finish("refused", journal.one_line(exc))
            raise
        for run in runs:
            run.finish("done")
    return notes


def _clean_up(
    source: str, target: str, runs: Sequence[journal.JournalRun], tell: Tell
) -> list[str]:
    problems = list(_wrong_nodes(source, target, {}))
    problems += [
        f"a move of shards of {run.subject!r} was broken off: end it by 'manage.py shards move"
        f" {run.subject} --repair'"
        for run in runs
        if run.arguments.get("current") is not None
    ]
    if problems:
        raise MoveRefused(problems)
    by_replication = takes_shards_over(source)
    if by_replication:
        problems += _still_needed(source, target)
    here = [shard for shard in _all_shards() if _is_on(shard, target)]
    if not here:
        problems.append(f"no shard is on {target!r}: split the server first")
    problems += _without_tables(here)
    notes = []
    if by_replication:
        notes = _end_replication(source, target, runs, problems, tell)
    elif problems:
        raise MoveRefused(problems)
    for run in runs:
        notes += remove_expired(run, at_once=True)
    return notes


def _end_replication(
    source: str,
    target: str,
    runs: Sequence[journal.JournalRun],
    problems: list[str],
    tell: Tell,
) -> list[str]:
    """End the replication from ``source`` to ``target``, then drop useless copies on ``target``.

    Replication has copied all shards of ``source`` to ``target``. A copy is useless if its shard
    has stayed on ``source``. Return a sentence about each copy that was dropped.

    :param problems: reasons, found by the caller, why the replication must not be ended.
    :raises MoveRefused: the replication cannot be ended, or ``problems`` are not empty.
    """
    with open_pair(source, target) as pair:
        problems += pair.target.privilege_problems("end")
        if problems:
            raise MoveRefused(problems)
        link = pair.link()
        if link is not None:
            tell(f"ends the replication from {source} to {target}")
            pair.target.stop(link.name)
            pair.target.forget(link.name)
    return [
        f"the copy of shard {shard.number} of group {shard.group!r} on {target!r} was deleted"
        for shard in _copies_on(source, target)
        if _drop(shard, target, runs, tell)
    ]


def _all_shards() -> Iterator[Shard]:
    for group in runtime.topology().groups.values():
        yield from group.shards()


def _still_needed(source: str, target: str) -> Iterator[str]:
    nodes = runtime.topology().nodes
    server = server_of(nodes[target], target)
    if pair := runtime.topology().pair_of(target):
        yield f"{target!r} is a side of the pair {pair!r}, whose replication must go on"
    for name, group in runtime.topology().groups.items():
        for each in group.ranges:
            replica = each.replica
            if replica is not None and server_of(nodes[replica], replica) == server:
                yield (
                    f"the range {(each.first, each.last)!r} of group {name!r} names {replica!r} as its"
                    f" replica, and the replication would end: name another replica, or none"
                )


def _without_tables(shards: Sequence[Shard]) -> Iterator[str]:
    for shard in shards:
        try:
            with SchemaSessions(shard, _change_nothing) as sessions:
                hidden, tables = sessions.schema.hidden(), sessions.schema.tables()
        except Error as exc:
            yield f"{shard.alias!r} on {shard.node!r} cannot be read ({journal.one_line(exc)})"
            continue
        if hidden or not tables:
            yield f"{shard.alias!r} has no tables on {shard.node!r}, where the topology has it"


def _copies_on(source: str, target: str) -> list[Shard]:
    """Return the shards that have stayed on ``source``, but have a copy on ``target``.

    Such a copy was made by replication, while ``target`` was a replica of ``source``.
    """
    with node_connection(target) as wrapper:
        present = wrapper.schemas_present()
    return [
        shard
        for shard in _all_shards()
        if shard.schema in present and _is_on(shard, source) and not _is_on(shard, target)
    ]


def _drop(shard: Shard, node: str, runs: Sequence[journal.JournalRun], tell: Tell) -> bool:
    run = next(run for run in runs if run.subject == shard.group)
    tell(f"drops the copy of shard {shard.number} of group {shard.group!r} on {node}")
    with SchemaSessions(replace(shard, node=node), run.note) as sessions:
        sessions.schema.hide(sessions.schema.tables(), "dropped", _PATIENCE)
        sessions.schema.discard()
    return True


def _change_nothing() -> None:
    raise AssertionError("checks change nothing")
