"""What must hold before shards are moved. All of it is checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterator

from django.db import Error

from sharded_orm import runtime
from sharded_orm.exceptions import MoveRefused, TopologyReadOnly
from sharded_orm.operations import topology
from sharded_orm.operations.nodes import node_connection
from sharded_orm.operations.shard_moves.plan import ShardMovePlan, ShardToMove
from sharded_orm.operations.shard_moves.shard_sessions import SchemaSessions
from sharded_orm.operations.shards.status import error_line
from sharded_orm.scatter.failures import is_node_gone


def check_plan(plan: ShardMovePlan) -> None:
    """Make sure that the shards can be moved. Changes nothing but for a probe that is taken back.

    Costs about ten statements for each shard, and a round trip to the source of the topology.

    :raises MoveRefused: they cannot; every reason is listed.
    :raises TopologyReadOnly: commands cannot change the topology.
    """
    if runtime.topology() is not runtime.config().topology:
        raise MoveRefused(
            [
                "this process uses another topology than the configured one, as test runs do: shards of"
                " the real nodes would be moved"
            ]
        )
    _require_writable_topology(plan)
    problems = [
        problem
        for node in sorted({move.target for move in plan.shards})
        for problem in _target_problems(node, [m for m in plan.shards if m.target == node])
    ]
    for move in plan.shards:
        problems += [f"{move} on {move.source!r}: {problem}" for problem in _source_problems(move)]
    if problems:
        raise MoveRefused(problems)


def _require_writable_topology(plan: ShardMovePlan) -> None:
    document = topology.current()
    for move in plan.shards:
        document = move.publish_in(document)
    runtime.check_document(document.at_version(document.version + 1))
    source = runtime.source()
    if not source.writable:
        raise TopologyReadOnly(
            f"Shards cannot be moved with {source.describe()}, which commands do not write: every"
            " process must learn at once where a shard is. Use the source 'database' or 'zookeeper'"
            " (SHARDED_ORM['TOPOLOGY'])."
        )


def _target_problems(node: str, moves: list[ShardToMove]) -> Iterator[str]:
    try:
        with node_connection(node) as wrapper:
            present = wrapper.schemas_present()
    except Error as exc:
        yield f"the node {node!r} does not answer ({error_line(exc)})"
        return
    for move in moves:
        shard = move.on(node)
        if shard.schema not in present:
            continue
        with SchemaSessions(shard, _change_nothing) as sessions:
            names = [table.name for table in sessions.schema.tables()]
        if names:
            yield (
                f"{node!r} has a schema {shard.schema!r} with tables already (such as {names[0]!r})."
                " They belong to no shard: drop the schema if nobody needs them"
            )


def _source_problems(move: ShardToMove) -> Iterator[str]:
    try:
        with SchemaSessions(move.on(move.source), _change_nothing) as sessions:
            yield from sessions.schema.obstacles()
            try:
                if len(sessions.schema.identities()) < len(sessions.schema.tables()):
                    yield "the server does not tell the tables apart from those of before a TRUNCATE"
                sessions.capture.check_privileges(sessions=False)
            except MoveRefused as exc:
                yield from exc.problems
    except Error as exc:
        if is_node_gone(exc):
            yield f"the node does not answer ({error_line(exc)})"
        else:
            yield f"it cannot be read ({error_line(exc)})"


def _change_nothing() -> None:
    raise AssertionError("checks change nothing")
