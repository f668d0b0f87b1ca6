"""One shard looked at closely, and many by size, by somebody who does not wait for long."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sharded_orm import runtime
from sharded_orm.backends.sizes import ShardSize, TableSize
from sharded_orm.backends.write_hooks.session_id import OpenSessions
from sharded_orm.operations.nodes import Alive, ask_nodes, node_connection, unheard
from sharded_orm.operations.shards.drift import Drift, Schemas
from sharded_orm.operations.shards.status import ShardStatus, shards_by_node, status
from sharded_orm.topology.model import Shard, ShardGroup

#: Siblings that a shard's schema is compared with.
SIBLINGS = 4
#: Shards whose sizes one statement asks for: what has arrived counts, so the steps are small.
_BATCH = 100


@dataclass(frozen=True)
class ShardDetail:
    """One shard on its primary.

    :param error: why nothing is known of it: its node does not answer.
    :param tables: None if they could not be read within the time.
    :param sessions: of its node; None where there is no server, or it did not tell.
    :param drift: how it differs from most of its siblings, if it does.
    :param compared: with how many siblings of the same migrations.
    """

    shard: Shard
    status: ShardStatus | None = None
    error: str | None = None
    tables: tuple[TableSize, ...] | None = None
    sessions: OpenSessions | None = None
    drift: Drift | None = None
    compared: int = 0


def look_at(shard: Shard, *, within: float) -> ShardDetail:
    """Look at ``shard``, and at the schemas of some siblings. Changes nothing.

    Costs what ``status`` does for at most five shards, two queries on its node, and two round
    trips for each schema.

    :param within: seconds for a node's state; the rest has what is left of them, and a third at
        least.
    """
    began = time.monotonic()
    found = status([shard, *_siblings(shard)], within=within)
    by_alias = {one.shard.alias: one for one in found.shards}
    mine = by_alias.get(shard.alias)
    if mine is None:
        (error,) = (node.error for node in found.nodes if node.name == shard.node)
        return ShardDetail(shard, error=error)
    alike = [one for one in by_alias.values() if _comparable(one, mine)]

    def look(node: str, alive: Alive) -> tuple[Schemas, _NodeShards]:
        schemas, own = Schemas(), _NodeShards()
        if node == shard.node:
            with node_connection(node) as wrapper:
                own = _NodeShards(tuple(wrapper.table_sizes(shard)), wrapper.open_sessions())
        schemas.read([one for one in alike if one.shard.node == node], unheard)
        return schemas, own

    nodes = {shard.node, *(one.shard.node for one in alike)}
    schemas, own = Schemas(), _NodeShards()
    for outcome in ask_nodes(nodes, look, patience=left_of(within, began)).values():
        if not isinstance(outcome, Exception):
            schemas.add(outcome[0])
            own = own if outcome[1].tables is None else outcome[1]
    drift = next((one for one in schemas.drifts() if one.shard == shard), None)
    return ShardDetail(
        shard, mine, mine.error, own.tables, own.sessions, drift, _number_of(schemas, shard)
    )


def left_of(within: float, began: float) -> float:
    """Seconds for a second question, when the first one began at ``began`` (monotonic)."""
    return max(within / 3, within - (time.monotonic() - began))


@dataclass(frozen=True)
class _NodeShards:
    tables: tuple[TableSize, ...] | None = None
    sessions: OpenSessions | None = None


def _siblings(shard: Shard) -> Iterator[Shard]:
    """Some of the group, far apart: what was changed by hand was changed on one node."""
    group: ShardGroup = runtime.group(shard.group)
    step = group.count / (SIBLINGS + 1)
    numbers = {round(shard.number + step * one) % group.count for one in range(1, SIBLINGS + 1)}
    return (group.shard(number) for number in sorted(numbers - {shard.number}))


def _comparable(one: ShardStatus, other: ShardStatus) -> bool:
    return one.state in ("current", "behind") and one.digest == other.digest


def _number_of(schemas: Schemas, shard: Shard) -> int:
    """With how many others ``shard`` was compared."""
    for looks in schemas.looks.values():
        shards = [one for look in looks.values() for one in look.shards]
        if shard in shards:
            return len(shards) - 1
    return 0


def sizes(shards: Iterable[Shard], *, within: float) -> dict[str, ShardSize]:
    """Alias -> how large the shard is; without those whose node did not tell in time.

    Costs a query per node and 100 shards, of the server's tables of tables: on MySQL far more
    than asking for states.

    :param within: seconds for a node.
    """
    by_node = shards_by_node(shards)
    found: dict[str, ShardSize] = {}

    def look(node: str, alive: Alive) -> None:
        with node_connection(node) as wrapper:
            for start in range(0, len(by_node[node]), _BATCH):
                # One step: a copy that is made meanwhile has all of a batch, or nothing.
                found.update(wrapper.shard_sizes(by_node[node][start : start + _BATCH]))

    ask_nodes(by_node, look, patience=within)
    return dict(found)
