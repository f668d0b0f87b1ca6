"""Set whether a range of shards takes new keys, and how often the range is chosen for a new key."""

from __future__ import annotations

from typing import Any

from sharded_orm import runtime
from sharded_orm.operations import topology
from sharded_orm.operations.exceptions import GrowthRefused
from sharded_orm.routing.base import key_routing_of
from sharded_orm.topology.document import Document
from sharded_orm.topology.transitions import KeyRouting

#: Words for the comment of a topology version.
_CHANGES = {("open", True): "opened", ("open", False): "closed"}


def set_open(name: str, first: int, last: int, is_open: bool) -> Document:
    """Open a range of shards for new keys, or close it. Keys on its shards stay there.

    Yupoo does the same (row Y3 of docs/explanation/designs).

    :param name: the name of the group.
    :param first: the number of the range's first shard; ``last`` is the number of its last shard.
    :param is_open: True opens the range, False closes it.
    :return: the topology document with the change.
    :raises GrowthRefused: the group has no such range, or its strategy never chooses a shard for a
        new key.
    :raises TopologyError: the new topology could not be published. The old one is still in force.
    """
    return _set(name, first, last, "open", is_open)


def set_weight(name: str, first: int, last: int, weight: float) -> Document:
    """Set how often each shard of a range gets a new key, relative to the weights of other ranges.

    The arguments ``name``, ``first`` and ``last``, the returned document and the errors are the
    same as for :func:`set_open`.

    :param weight: for example, a shard of a range with the weight 2 gets twice as many new keys as
        a shard of a range with the weight 1.
    """
    return _set(name, first, last, "weight", weight)


def _set(name: str, first: int, last: int, setting: str, value: Any) -> Document:
    group = runtime.group(name)
    if key_routing_of(group) not in (KeyRouting.PLACED, KeyRouting.EMBEDDED):
        raise GrowthRefused(
            f"Group {name!r} has the strategy {group.strategy!r}, which never chooses a shard for a"
            f" key: {setting!r} of a range means nothing there."
        )

    def edit(document: Document) -> Document:
        content = document.content()
        ranges = content["groups"].get(name, {}).get("RANGES", [])
        for entry in ranges:
            if tuple(entry["range"]) == (first, last):
                entry[setting] = value
                return Document.from_content(content)
        listing = ", ".join("{}-{}".format(*entry["range"]) for entry in ranges)
        raise GrowthRefused(
            f"Group {name!r} has no range {first}-{last}; its ranges are {listing}."
        )

    change = _CHANGES.get((setting, value), f"{setting} {value}")
    return topology.change(edit, f"range {name} {first}-{last}: {change}")
