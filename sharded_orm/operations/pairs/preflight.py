"""Check that the active side of shards can be changed, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from django.db import Error
from django.db.utils import load_backend

from sharded_orm import database_settings, runtime
from sharded_orm.backends.features import features_of
from sharded_orm.backends.replication import ReplicationServer
from sharded_orm.exceptions import TopologyReadOnly
from sharded_orm.operations import topology
from sharded_orm.operations.exceptions import SwitchRefused
from sharded_orm.operations.pairs.plan import SideChange, SwitchPlan
from sharded_orm.operations.pairs.report import SwitchOptions
from sharded_orm.operations.pairs.sides import change_nothing, open_fence
from sharded_orm.operations.shard_moves.replication import open_pair
from sharded_orm.operations.shards.status import error_line
from sharded_orm.two_phase.recovery import refuse_prepared


def check_plan(plan: SwitchPlan, options: SwitchOptions) -> None:
    """Check that the sides of ``plan`` can be changed. The check leaves everything unchanged, except
    that prepared parts of two-phase transactions whose outcome is decided are ended.

    Costs about fifteen statements for each server, five for each shard, and a round trip to the
    source of the topology.

    :raises SwitchRefused: the sides cannot be changed. Every reason is listed.
    :raises TopologyReadOnly: commands cannot change the topology.
    :raises BranchesPrepared: a transaction in two phases holds locks on one of the shards.
    """
    if runtime.topology() is not runtime.config().topology:
        raise SwitchRefused(
            [
                "this process uses another topology than the configured one, as test runs do: shards of"
                " the real nodes would be switched"
            ]
        )
    _require_writable_topology(plan)
    if plan.changes:
        group = runtime.group(plan.group)
        refuse_prepared(group, [change.on(change.source) for change in plan.changes])
    problems: list[str] = []
    for one, other in sorted({(change.source, change.target) for change in plan.changes}):
        problems += server_problems(one, other, options)
    if not problems:
        for change in plan.changes:
            problems += _shard_problems(change)
    if problems:
        raise SwitchRefused(dict.fromkeys(problems))


def _require_writable_topology(plan: SwitchPlan) -> None:
    document = topology.current()
    for change in plan.changes:
        document = change.publish_in(document)
    runtime.check_document(document.at_version(document.version + 1))
    source = runtime.source()
    if not source.writable:
        raise TopologyReadOnly(
            f"Sides cannot be switched with {source.describe()}, which commands do not write: every"
            " process must learn at once which side is active. Use the source 'database' or 'zookeeper'"
            " (SHARDED_ORM['TOPOLOGY'])."
        )


def server_problems(source: str, target: str, options: SwitchOptions) -> list[str]:
    """Return the reasons why ``source`` and ``target`` are not a healthy pair, as sentences."""
    if problems := [*_unsuitable(source), *_unsuitable(target)]:
        return problems
    try:
        with open_pair(source, target) as pair:
            return list(_pair_problems(pair.source, pair.target, options))
    except Error as exc:
        return [
            f"the servers of {source!r} and {target!r} do not both answer the OPERATOR accounts"
            f" ({error_line(exc)}). 'shards switch' needs both; it has no --force for a dead side yet"
        ]


def _unsuitable(node: str) -> Iterator[str]:
    engine = runtime.topology().nodes[node]["ENGINE"]
    if not features_of(load_backend(engine).DatabaseWrapper).has_side_fences:
        yield f"node {node!r} has the engine {engine!r}; only MariaDB has pairs"
    elif database_settings.operator_settings(node) is None:
        yield (
            f'node {node!r} has no OPERATOR: give it "OPERATOR": {{"USER": …, "PASSWORD": …}}, an account'
            " that may make the triggers of fences"
        )


def _pair_problems(
    source: ReplicationServer, target: ReplicationServer, options: SwitchOptions
) -> Iterator[str]:
    for server in (source, target):
        if not server.status().can_be_promoted:
            yield f"{server.name!r} is no {server.product} ({server.status().version})"
            return
    lacking = [
        problem for server in (source, target) for problem in server.privilege_problems("switch")
    ]
    if lacking:
        yield from lacking
        return
    yield from source.pair_problems(target, keeps_for_later=options.is_upgrade)
    yield from target.pair_problems(source)
    link = target.link_from(source)
    if link is None:
        return
    yield from target.replica_problems(source, link)
    if link.seconds_behind is not None and link.seconds_behind > options.patience:
        yield (
            f"{target.name!r} is {link.seconds_behind} s behind, more than the {options.patience:g} s that writers"
            " may have to wait: let it come nearer, or allow more with --patience"
        )


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


def passive_problems(changes: Sequence[SideChange]) -> list[str]:
    """Return the reasons why a fence cannot be made on the passive sides, as sentences.

    :param changes: shards with their active side as ``source``.
    """
    nodes = sorted({change.target for change in changes})
    if problems := [problem for node in nodes for problem in _unsuitable(node)]:
        return problems
    problems = []
    for change in changes:
        try:
            with open_fence(change.on(change.target), change_nothing) as fence:
                problems += [f"node {change.target!r}: {p}" for p in fence.privilege_problems()]
        except Error as exc:
            problems.append(f"{change} on {change.target!r} cannot be read ({error_line(exc)})")
    return list(dict.fromkeys(problems))
