"""Checks whether a topology may replace another one while processes run.

Even a valid topology can make rows unreachable: if it maps a key to a different shard than the old
topology does, the key's rows are not found. This module uses neither Django nor a database driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

from sharded_orm.topology.model import ShardGroup, Topology


class KeyRouting(Enum):
    """What determines the shard of a key. The values are descriptions for messages."""

    PLACED = "a record of each key"
    EMBEDDED = "the key itself"
    RANGES = "bounds of keys"
    COMPUTED = "the number of shards"


# The default values of two options of the embedded strategy, which determine the bits of a key that
# contain its shard number.
_EMBEDDED_OPTIONS = {"SHIFT": 46, "BITS": 16}


def problems(old: Topology, new: Topology, keys: Callable[[ShardGroup], KeyRouting]) -> list[str]:
    """Return the reasons, as sentences, why ``new`` must not replace ``old``; empty if it may.

    Both topologies must be valid. ``new`` must have every group and every shard of ``old``, and
    must map every key to the same shard. A shard may be on another node (database server) in
    ``new``; the operator who changes the node must move the shard's rows.

    :param keys: a function that returns, for a group, what determines the shards of its keys.
    """
    reasons = []
    if new.version <= old.version:
        reasons.append(
            f"version {new.version!r} does not come after {old.version!r}, which is in use"
        )
    for name, group in old.groups.items():
        if name not in new.groups:
            reasons.append(f"group {name!r} is gone; its shards have rows")
        else:
            reasons += _group_problems(old, new, group, new.groups[name], keys)
    return reasons


def _group_problems(
    old: Topology,
    new: Topology,
    before: ShardGroup,
    after: ShardGroup,
    keys: Callable[[ShardGroup], KeyRouting],
) -> Iterator[str]:
    where = f"group {before.name!r}"
    if after.count < before.count:
        yield (
            f"{where}: shards {after.count} to {before.count - 1} are gone; a range can be closed"
            " for new keys ('open': false), not taken away"
        )
    if after.database_name != before.database_name:
        yield (
            f"{where}: DATABASE_NAME {before.database_name!r} becomes {after.database_name!r};"
            " schemas are not renamed"
        )
    engines = [
        {str(topology.nodes[r.primary].get("ENGINE")) for r in group.ranges}
        for topology, group in ((old, before), (new, after))
    ]
    if engines[0] != engines[1]:
        yield (
            f"{where}: ENGINE {sorted(engines[0])!r} becomes {sorted(engines[1])!r}; rows do not"
            " move from one kind of database to another by themselves"
        )
    if after.strategy != before.strategy:
        yield (
            f"{where}: STRATEGY {before.strategy!r} becomes {after.strategy!r}; keys would be looked"
            " for on other shards"
        )
        return
    match keys(before):
        case KeyRouting.COMPUTED:
            if after.count != before.count:
                yield (
                    f"{where}: the number of shards cannot change from {before.count} to"
                    f" {after.count}: its strategy {before.strategy!r} computes the shard of a key"
                    " from it, so that nearly every key would be looked for on another shard"
                )
            if dict(after.strategy_options) != dict(before.strategy_options):
                yield f"{where}: STRATEGY_OPTIONS change; keys might be looked for on other shards"
        case KeyRouting.EMBEDDED:
            yield from _embedded_problems(where, before, after)
        case KeyRouting.RANGES:
            yield from _bounds_problems(
                where, before.strategy_options, after.strategy_options, before.count
            )
        case KeyRouting.PLACED:
            pass


def _embedded_problems(where: str, before: ShardGroup, after: ShardGroup) -> Iterator[str]:
    old, new = before.strategy_options, after.strategy_options
    for name in sorted({*old, *new, *_EMBEDDED_OPTIONS}):
        values = [options.get(name, _EMBEDDED_OPTIONS.get(name)) for options in (old, new)]
        if values[0] != values[1]:
            yield (
                f"{where}: {name} {values[0]!r} becomes {values[1]!r}; the ids that exist have"
                " their shard in other bits"
            )


def _bounds_problems(
    where: str, old: Mapping[str, Any], new: Mapping[str, Any], count: int
) -> Iterator[str]:
    if old.get("SIZE") != new.get("SIZE"):
        yield (
            f"{where}: SIZE {old.get('SIZE')!r} becomes {new.get('SIZE')!r}; keys would be looked"
            " for on other shards"
        )
    before, after = list(old.get("BOUNDS", ())), list(new.get("BOUNDS", ()))
    if "SIZE" not in old and after[: len(before)] != before:
        changed = next((n for n, bound in enumerate(before) if after[n : n + 1] != [bound]), count)
        yield (
            f"{where}: BOUNDS change from shard {changed} on; bounds of shards that exist stay, new"
            " ones are appended"
        )
