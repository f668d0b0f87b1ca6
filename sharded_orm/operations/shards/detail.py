"""Read the details of one shard, or the sizes of many shards, within a time limit.

The admin uses this: a user waits for the page, so a slow node must not delay it for long.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sharded_orm import runtime
from sharded_orm.backends.sizes import ShardSize, TableSize
from sharded_orm.backends.write_hooks.session_id import OpenSessions
from sharded_orm.operations.nodes import Alive, ask_nodes, ignore_answer, node_connection
from sharded_orm.operations.shards.drift import Drift, Schemas
from sharded_orm.operations.shards.fleet_status import ShardStatus
from sharded_orm.operations.shards.status import shards_by_node, status
from sharded_orm.topology.model import Shard, ShardGroup

#: The schema of a shard is compared with the schemas of this number of other shards of the group.
SIBLINGS = 4
#: Number of shards whose sizes one statement reads. The number is small, because a statement that
#: is not finished at the time limit returns no sizes at all.
_BATCH = 100


@dataclass(frozen=True)
class ShardDetail:
    """The state of one shard, as its primary reports it.

    :param status: the migration state; None if the node does not answer.
    :param error: why the node does not answer or the shard cannot be read; None if all is well.
    :param tables: the sizes of the tables; None if they could not be read in time.
    :param sessions: number of database sessions that are open on the node; None if the node has not
        answered in time, or on SQLite, which has no server.
    :param drift: how the schema differs from the schema that most siblings have. Siblings are
        shards of the same group with the same applied migrations. None if there is no difference,
        or if the schema was not compared.
    :param compared: number of siblings with which the schema was compared.
    """

    shard: Shard
    status: ShardStatus | None = None
    error: str | None = None
    tables: tuple[TableSize, ...] | None = None
    sessions: OpenSessions | None = None
    drift: Drift | None = None
    compared: int = 0


def shard_detail(shard: Shard, *, within: float) -> ShardDetail:
    """Read the state of ``shard``, and compare its schema with a few other shards. Changes nothing.

    Costs as much as :func:`status` for at most five shards, plus two queries on the shard's node,
    and two round trips for each schema that is compared.

    :param within: seconds to wait for the migration states, which are read first. The sizes,
        sessions and schemas get the remaining time, but at least a third of ``within``. So the call
        may take up to four thirds of ``within``.
    """
    began = time.monotonic()
    fleet = status([shard, *_siblings(shard)], within=within)
    by_alias = {entry.shard.alias: entry for entry in fleet.shards}
    own_status = by_alias.get(shard.alias)
    if own_status is None:
        (error,) = (node.error for node in fleet.nodes if node.name == shard.node)
        return ShardDetail(shard, error=error)
    comparable = [entry for entry in by_alias.values() if _is_comparable(entry, own_status)]

    def read(node: str, alive: Alive) -> tuple[Schemas, _NodeData]:
        schemas, node_data = Schemas(), _NodeData()
        if node == shard.node:
            with node_connection(node) as wrapper:
                node_data = _NodeData(tuple(wrapper.table_sizes(shard)), wrapper.open_sessions())
        schemas.read([entry for entry in comparable if entry.shard.node == node], ignore_answer)
        return schemas, node_data

    nodes = {shard.node, *(entry.shard.node for entry in comparable)}
    schemas, node_data = Schemas(), _NodeData()
    for outcome in ask_nodes(nodes, read, patience=seconds_left(within, began)).values():
        if not isinstance(outcome, Exception):
            schemas.add(outcome[0])
            node_data = node_data if outcome[1].tables is None else outcome[1]
    drift = next((entry for entry in schemas.drifts() if entry.shard == shard), None)
    return ShardDetail(
        shard,
        own_status,
        own_status.error,
        node_data.tables,
        node_data.sessions,
        drift,
        _count_siblings(schemas, shard),
    )


def seconds_left(within: float, began: float) -> float:
    """Return the time limit, in seconds, for the second of two steps.

    Call this when the first step has ended. The result is the time that is left, but at least a
    third of ``within``, so that the second step gets some time even after a slow first step.

    :param within: the number of seconds for both steps together.
    :param began: the time at which the first step began, from ``time.monotonic()``.
    """
    return max(within / 3, within - (time.monotonic() - began))


@dataclass(frozen=True)
class _NodeData:
    tables: tuple[TableSize, ...] | None = None
    sessions: OpenSessions | None = None


def _siblings(shard: Shard) -> Iterator[Shard]:
    """Yield a few other shards of the same group, to compare their schemas with that of ``shard``.

    A difference shows that somebody has changed a schema by hand. Usually that affects all shards
    of one node. So the yielded shards have distant numbers, because these are usually on other
    nodes.
    """
    group: ShardGroup = runtime.group(shard.group)
    step = group.count / (SIBLINGS + 1)
    numbers = {round(shard.number + step * index) % group.count for index in range(1, SIBLINGS + 1)}
    return (group.shard(number) for number in sorted(numbers - {shard.number}))


def _is_comparable(shard_status: ShardStatus, other: ShardStatus) -> bool:
    return shard_status.state in ("current", "behind") and shard_status.digest == other.digest


def _count_siblings(schemas: Schemas, shard: Shard) -> int:
    """Return the number of other shards with which the schema of ``shard`` was compared."""
    for variants in schemas.variants.values():
        shards = [member for variant in variants.values() for member in variant.shards]
        if shard in shards:
            return len(shards) - 1
    return 0


def sizes(shards: Iterable[Shard], *, within: float) -> dict[str, ShardSize]:
    """Return a dict that maps the alias of each shard to its size.

    Shards whose sizes were not read in time are left out. On each node, costs one query of the
    system tables (``information_schema``) per 100 shards. On MySQL, such a query takes far longer
    than reading the migration states.

    :param within: seconds to wait for each node.
    """
    by_node = shards_by_node(shards)
    sizes_by_alias: dict[str, ShardSize] = {}

    def read(node: str, alive: Alive) -> None:
        with node_connection(node) as wrapper:
            for start in range(0, len(by_node[node]), _BATCH):
                # At the time limit, the caller gets a copy of this dict, while this thread may
                # still run. update() is atomic, so the copy has all sizes of this batch or none.
                sizes_by_alias.update(wrapper.shard_sizes(by_node[node][start : start + _BATCH]))

    ask_nodes(by_node, read, patience=within)
    return dict(sizes_by_alias)
