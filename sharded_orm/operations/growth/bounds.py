"""Check the lower bounds of the keys on new shards, for groups that divide keys by ranges
(``BOUNDS``).

For example, a new shard is to get the lower bound 5000, and the key 6000 is in use. Its rows are on
an older shard, but with the new bound, queries would look for them on the new shard. So the bound
is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sharded_orm import runtime
from sharded_orm.operations.exceptions import GrowthRefused
from sharded_orm.operations.growth.new_range import NewRange
from sharded_orm.operations.nodes import node_connection
from sharded_orm.operations.shards.misplaced_rows import RowScan
from sharded_orm.topology.model import ShardGroup
from sharded_orm.topology.transitions import KeyRouting


def parse_bounds(name: str, texts: Sequence[str]) -> list[Any]:
    """Convert bounds from a command line to the type of the group's existing bounds.

    :param name: the name of the group.
    :raises GrowthRefused: a text cannot be converted, or the existing bounds are neither integers
        nor texts.
    """
    bounds = runtime.group(name).strategy_options.get("BOUNDS") or [""]
    kind = type(bounds[-1])
    if kind not in (int, str):
        raise GrowthRefused(
            f"Bounds of type {kind.__name__} cannot be given to a command; change BOUNDS where they"
            " stand."
        )
    # Check the text before int(), because int() also accepts the digits of other alphabets, and
    # raises an error if there are thousands of digits.
    number = re.compile(r"-?\d{1,100}", re.ASCII)
    wrong = [text for text in texts if kind is int and not number.fullmatch(text)]
    if wrong:
        raise GrowthRefused(f"Bounds of group {name!r} are whole numbers, not {wrong!r}.")
    return [kind(text) for text in texts]


def add_bounds(entry: dict[str, Any], new: NewRange, kind: KeyRouting) -> None:
    """Add the bounds of the new range to ``entry``.

    Do nothing if neither the new range nor the group has bounds.

    :param entry: the group's entry in ``GROUPS``.
    :param kind: how the group finds the shard of a key.
    :raises GrowthRefused: ``new`` has bounds but the group has no ``BOUNDS``; or the group has
        ``BOUNDS``, but ``new`` does not have exactly one bound for each new shard.
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
    """Return sentences about keys that are in use although they belong to the new shards.

    Before the range was added, the last of the older shards took all keys above its lower bound. So
    only this shard can have rows with such keys. This function reads all shard keys on it. The list
    is empty if there are no such keys, if the group has no ``BOUNDS``, or if there are no older
    shards. The process must already use the topology with the new range.

    :raises GrowthRefused: the shard could not be read.
    """
    group: ShardGroup = runtime.group(new.group)
    if "BOUNDS" not in group.strategy_options or new.first == 0:
        # No key in use can belong to the new shards. Either there are no older shards, or the group
        # has no bounds but a ``SIZE``, the number of keys per shard. In a group with a ``SIZE``,
        # keys beyond the last shard have always been refused.
        return []
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
