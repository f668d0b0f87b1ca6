"""Measure what ``balance`` distributes evenly: the bytes, rows, keys or load of each shard."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final

from django.db.models import Count

from sharded_orm import runtime
from sharded_orm.backends.sizes import ShardSize
from sharded_orm.models.tables.directory import Placement
from sharded_orm.operations.exceptions import BalanceRefused
from sharded_orm.operations.nodes import Alive, ask_nodes, node_connection
from sharded_orm.operations.shards.status import error_line, shards_by_node
from sharded_orm.routing.directory import DirectoryStrategy
from sharded_orm.topology.model import Topology

BYTES: Final = "bytes"
ROWS: Final = "rows"
KEYS: Final = "keys"
LOAD: Final = "load"

#: Seconds to wait for the answer of a node to the query of its shards' sizes. The query reads
#: thousands of table sizes.
PATIENCE: Final = 60.0
#: The largest number that is accepted as a load in an operator's file of loads. A larger number
#: might make a sum of loads infinite.
MOST_LOAD: Final = 1e18


def shard_sizes(topology: Topology) -> dict[str, ShardSize]:
    """Return the sizes of all shards, keyed by alias. One query per node, on all nodes in parallel.

    :raises BalanceRefused: a node does not answer, so the sizes of its shards are unknown.
    """
    by_node = shards_by_node(
        shard for group in topology.groups.values() for shard in group.shards()
    )

    def read(node: str, alive: Alive) -> Mapping[str, ShardSize]:
        with node_connection(node) as wrapper:
            return wrapper.shard_sizes(by_node[node])

    sizes: dict[str, ShardSize] = {}
    problems = []
    for node, answer in ask_nodes(by_node, read, patience=PATIENCE).items():
        if isinstance(answer, Exception):
            problems.append(
                f"node {node!r} does not answer ({error_line(answer)}), so the sizes of its"
                f" {len(by_node[node])} shards are not known. Mend it, and try again"
            )
        else:
            sizes |= answer
    if problems:
        raise BalanceRefused(problems)
    return sizes


def rows_of(sizes: Mapping[str, ShardSize]) -> dict[str, float]:
    """Return the estimated number of rows of each shard, keyed by alias.

    :raises BalanceRefused: the database keeps no estimates.
    """
    rows = {alias: size.rows for alias, size in sizes.items()}
    if None in rows.values():
        raise BalanceRefused(
            [
                "the database keeps no estimates of rows, as SQLite does not: balance by bytes or by keys"
            ]
        )
    return {alias: count for alias, count in rows.items() if count is not None}


def key_counts(groups: Iterable[str]) -> dict[str, float]:
    """Return how many keys the directory has placed on each shard, keyed by alias. One query.

    :param groups: the groups to be balanced. Each needs a directory, which is the table that
        records the shard of each key.
    :raises BalanceRefused: a group has no directory.
    """
    without = [name for name in groups if not isinstance(runtime.strategy(name), DirectoryStrategy)]
    if without:
        raise BalanceRefused(
            [
                f"group {name!r} has no directory, so nobody counts its keys: choose another group by"
                " --group, or another --by"
                for name in without
            ]
        )
    rows = Placement.objects.using(runtime.config().directory).order_by()
    counts = rows.values_list("group", "shard").annotate(number=Count("pk"))
    return {
        runtime.shard(group, shard).alias: count
        for group, shard, count in counts
        if group in runtime.topology().groups
    }


def shard_loads(topology: Topology, path: str) -> dict[str, float]:
    """Return the loads of shards from an operator's JSON file, such as ``{"photos_00042": 0.5}``.

    See :func:`read_load`.

    :raises BalanceRefused: the file has a name that is not the alias of a shard.
    """
    loads = read_load(path)
    unknown = [name for name in loads if topology.resolve(name) is None]
    if unknown:
        raise BalanceRefused(
            [
                f"{path!r} names {', '.join(map(repr, unknown[:5]))}, but shards are meant:"
                f" {topology.alias_spans()}"
            ]
        )
    return loads


def read_load(path: str) -> dict[str, float]:
    """Return the loads from the JSON file ``path``.

    The file contains an object that maps the names of shards, or keys, to their loads, such as
    ``{"photos_00042": 0.5}``.

    :raises BalanceRefused: the file cannot be read, or does not contain such an object.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as exc:
        raise BalanceRefused([f"the load cannot be read from {path!r}: {exc}"]) from exc
    if not isinstance(content, dict):
        raise BalanceRefused(
            [f"{path!r} must have a JSON object of names and numbers, not {type(content).__name__}"]
        )
    problems = []
    for name, load in content.items():
        is_number = isinstance(load, (int, float)) and not isinstance(load, bool)
        if not is_number or not 0 <= load <= MOST_LOAD:
            problems.append(
                f"{path!r}: the load of {name!r} must be a number from 0 to {MOST_LOAD:g}, not"
                f" {str(load)[:40]!r}"
            )
    if problems:
        raise BalanceRefused(problems[:10])
    return content
