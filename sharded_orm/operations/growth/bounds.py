"""Lower bounds of new shards in a range group, and the keys in use that forbid a bound."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sharded_orm import runtime
from sharded_orm.exceptions import GrowthRefused
from sharded_orm.operations.growth.new_range import NewRange
from sharded_orm.operations.nodes import node_connection
from sharded_orm.operations.shards.misplaced_rows import RowScan
from sharded_orm.topology.model import ShardGroup
from sharded_orm.topology.transitions import KeyRouting


def parse_bounds(name: str, texts: Sequence[str]) -> list[Any]:
    """Bounds from a command line, with the type of the group's existing bounds.

    :raises GrowthRefused: a text is not of that type, or a command cannot take that type.
    """
    bounds = runtime.group(name).strategy_options.get("BOUNDS") or [""]
    kind = type(bounds[-1])
    if kind not in (int, str):
        raise GrowthRefused(
            f"Bounds of type {kind.__name__} cannot be given to a command; change BOUNDS where they"
            " stand."
        )
    # int() accepts the digits of any script, and raises for thousands of them.
    number = re.compile(r"-?\d{1,100}", re.ASCII)
    wrong = [text for text in texts if kind is int and not number.fullmatch(text)]
    if wrong:
        raise GrowthRefused(f"Bounds of group {name!r} are whole numbers, not {wrong!r}.")
    return [kind(text) for text in texts]


def add_bounds(entry: dict[str, Any], new: NewRange, kind: KeyRouting) -> None:
    """Add the bounds of the new range to ``entry``, the group's entry in ``GROUPS``.

    :raises GrowthRefused: the group has no bounds, or ``new`` has a wrong number of them.
    """
    group = runtime.group(new.group)
    if kind is not KeyRouting.RANGES or "BOUNDS" not in group.strategy_options:
        if new.bounds:
            raise GrowthRefused(f"Group {new.group!r} has no BOUNDS; leave --bounds out.")
        return
    count = new.last - new.first + 1
    if len(new.bounds) != count:
        raise GrowthRefused(
            f"Group {new.group!r} needs a lower bound for each new shard: --bounds with {count}"
            f" values above {group.strategy_options['BOUNDS'][-1]!r}, not {list(new.bounds)!r}."
        )
    options = entry.setdefault("STRATEGY_OPTIONS", {})
    options["BOUNDS"] = [*group.strategy_options["BOUNDS"][: new.first], *new.bounds]


def keys_above(new: NewRange) -> list[str]:
    """Sentences about keys on the group's last shard that belong to the new shards.

    This process must already use the topology with the new range. Reads all shard keys of one
    shard.

    :raises GrowthRefused: the shard could not be read.
    """
    group: ShardGroup = runtime.group(new.group)
    if "BOUNDS" not in group.strategy_options or new.first == 0:
        return []  # With SIZE, keys beyond the last shard were refused.
    shard = group.shard(new.first - 1)
    scan = RowScan(sample=None)
    with node_connection(shard.node) as wrapper:
        scan.read(wrapper, [shard], lambda: None)
    if scan.errors:
        raise GrowthRefused(
            f"Shard {shard.alias!r} could not be read ({'; '.join(scan.errors.values())}), so"
            " nobody can tell which keys are in use."
        )
    return [
        f"{rows.model} has {rows.keys} from {rows.key_name} = {rows.examples[0].key!r} on"
        f" {shard.alias!r}"
        for rows in scan.misplaced
    ]
