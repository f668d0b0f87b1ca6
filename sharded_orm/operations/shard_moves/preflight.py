"""Check that shards can be moved, before a move writes anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from django.db import Error

from sharded_orm import runtime
from sharded_orm.exceptions import MoveRefused
from sharded_orm.operations.nodes import node_connection
from sharded_orm.operations.shard_change import require_publication
from sharded_orm.operations.shard_moves import replication
from sharded_orm.operations.shard_moves.plan import ShardMovePlan, ShardToMove
from sharded_orm.operations.shard_moves.shard_sessions import SchemaSessions
from sharded_orm.operations.shards.status import error_line
from sharded_orm.scatter.failures import is_node_gone
from sharded_orm.two_phase.recovery import refuse_prepared


def check_plan(plan: ShardMovePlan, seconds: float) -> None:
    """Check that the shards of ``plan`` can be moved. Changes nothing.

    :param seconds: if the shards move to a replica of their server, the replica may be this number
        of seconds behind.

    Costs about ten statements for each shard, and a round trip to the source of the topology.

    :raises MoveRefused: the shards cannot be moved. Every reason is listed.
    :raises TopologyReadOnly: commands cannot change the topology.
    :raises BranchesPrepared: a transaction in two phases holds locks on one of the shards.
    """
    require_publication(
        plan.shards, MoveRefused, subject="Shards", done="moved", news="where a shard is"
    )
    _refuse_prepared(plan)
    problems = [
        problem
        for source in sorted({move.source for move in plan.shards})
        for problem in (
            replication.link_problems(source, plan.target, seconds)
            if plan.by_replication
            else replication.neighbour_problems(source, plan.target)
        )
    ]
    if not problems and not plan.by_replication:
        problems += _target_problems(plan.target, plan.shards)
    for move in plan.shards:
        problems += [f"{move} on {move.source!r}: {problem}" for problem in _source_problems(move)]
    if problems:
        raise MoveRefused(problems)


def _refuse_prepared(plan: ShardMovePlan) -> None:
    shards = [move.on(move.source) for move in plan.shards]
    for name in {shard.group for shard in shards}:
        refuse_prepared(runtime.group(name), [shard for shard in shards if shard.group == name])


def _target_problems(node: str, moves: Sequence[ShardToMove]) -> Iterator[str]:
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
        try:
            with SchemaSessions(shard, _change_nothing) as sessions:
                names = [table.name for table in sessions.schema.tables()]
        except Error as exc:
            yield f"the schema {shard.schema!r} on {node!r} cannot be read: {_why(exc)}"
            continue
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
                if not move.by_replication:  # It needs no triggers.
                    sessions.capture.check_privileges(sessions=False)
            except MoveRefused as exc:
                yield from exc.problems
    except Error as exc:
        if is_node_gone(exc):
            yield f"the node does not answer ({error_line(exc)})"
        else:
            yield f"it cannot be read: {_why(exc)}"


def _why(exc: Error) -> str:
    """Return the text of a database error, with the privileges that the account needs.

    A missing privilege is a likely cause of the error.
    """
    return (
        f"{error_line(exc)}. The node's OPERATOR, or its own account, needs all privileges on the"
        " schemas of shards"
    )


def _change_nothing() -> None:
    raise AssertionError("checks change nothing")
