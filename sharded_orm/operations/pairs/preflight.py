"""Check that shards can change their active side, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from django.db import Error

from sharded_orm import runtime
from sharded_orm.operations.exceptions import PairRefused, SwitchRefused
from sharded_orm.operations.pairs import pair_servers, replication_check
from sharded_orm.operations.pairs.plan import SideChange, SwitchPlan
from sharded_orm.operations.pairs.report import SwitchOptions
from sharded_orm.operations.pairs.sides import change_nothing, open_fence
from sharded_orm.operations.shard_change import require_publication
from sharded_orm.operations.shards.status import error_line
from sharded_orm.two_phase.recovery import refuse_prepared


def check_plan(plan: SwitchPlan, options: SwitchOptions) -> None:
    """Check that the shards of ``plan`` can change their active side.

    Changes nothing, with one exception: if a transaction in two phases is prepared on a shard and
    its outcome is decided already, it is ended.

    Costs about fifteen statements for each server, five for each shard, and a round trip to the
    source of the topology.

    :raises SwitchRefused: the sides cannot be changed. Every reason is listed.
    :raises TopologyReadOnly: commands cannot change the topology.
    :raises BranchesPrepared: a transaction in two phases holds locks on one of the shards.
    """
    require_publication(
        plan.changes, SwitchRefused, subject="Sides", done="switched", news="which side is active"
    )
    problems: list[str] = []
    for one, other in sorted({(change.source, change.target) for change in plan.changes}):
        problems += _server_problems(one, other, options)
    if not problems:
        if plan.changes:
            # Call this after the checks of the servers, because its error about a dead server names
            # no remedy.
            group = runtime.group(plan.group)
            refuse_prepared(group, [change.on(change.source) for change in plan.changes])
        for change in plan.changes:
            problems += _shard_problems(change)
    if problems:
        raise SwitchRefused(dict.fromkeys(problems))


def _server_problems(source: str, target: str, options: SwitchOptions) -> list[str]:
    """Return sentences about what is wrong with the pair of ``source`` and ``target``."""
    keeps_for_later = source if options.is_upgrade else ""
    problems = replication_check.check(source, target, keeps_for_later=keeps_for_later)
    if problems:
        if not pair_servers.answers(source):
            problems.append(
                f"if {source!r} is dead and does not come back, --all-from {source} --force gives it up:"
                f" what {target!r} has not received is put aside until it rejoins"
            )
        return problems
    with pair_servers.open_pair(source, target) as servers:
        return list(_readiness_problems(servers, options))


def _readiness_problems(servers: pair_servers.PairServers, options: SwitchOptions) -> Iterator[str]:
    for side in servers.both:
        if side.status().read_only:
            yield closed_problem(side.name)
    link = servers.second.link_from(servers.first)
    if link is None:
        return  # replication has been ended since the check
    yield from servers.second.replica_problems(servers.first, link)
    if link.seconds_behind is not None and link.seconds_behind > options.patience:
        yield (
            f"{servers.second.name!r} is {link.seconds_behind} s behind, more than the"
            f" {options.patience:g} s that writers may have to wait: let it come nearer, or allow more"
            " with --patience"
        )


def closed_problem(node: str) -> str:
    """Return a sentence that tells an operator that the server of ``node`` is read only.

    A server of a pair is read only after each start, until ``pairs rejoin`` brings it back.
    """
    return f"{node!r} is read only, as after a restart: run 'manage.py pairs rejoin {node}'"


def _shard_problems(change: SideChange) -> Iterator[str]:
    for node in (change.source, change.target):
        try:
            with open_fence(change.on(node), change_nothing) as fence:
                for problem in fence.privilege_problems():
                    yield f"node {node!r}: {problem}"
                for obstacle in fence.obstacles():
                    yield f"{change} on {node!r}: {obstacle}"
                if node == change.source and fence.is_closed():
                    yield (
                        f"{change} is active on {node!r} by the topology, and refuses writes there. If"
                        " the topology was changed by hand, change it back"
                    )
        except Error as exc:
            yield f"{change} on {node!r} cannot be read ({error_line(exc)})"


def passive_server_problems(changes: Sequence[SideChange]) -> list[str]:
    """Return sentences about passive servers to which no connection can be opened.

    :param changes: changes of shards; ``target`` is the passive side now.
    """
    problems: list[str] = []
    for node in sorted({change.target for change in changes}):
        try:
            pair_servers.open_side(node).close()
        except PairRefused as exc:
            problems += exc.problems
    return problems


def passive_problems(changes: Sequence[SideChange]) -> list[str]:
    """Return sentences about passive sides on which the account lacks privileges for a fence.

    A fence needs triggers in the schema of the shard, so the schemas must exist on these sides.

    :param changes: changes of shards; ``target`` is the passive side now.
    """
    problems: list[str] = []
    for change in changes:
        try:
            with open_fence(change.on(change.target), change_nothing) as fence:
                problems += [f"node {change.target!r}: {p}" for p in fence.privilege_problems()]
        except Error as exc:
            problems.append(f"{change} on {change.target!r} cannot be read ({error_line(exc)})")
    return list(dict.fromkeys(problems))
