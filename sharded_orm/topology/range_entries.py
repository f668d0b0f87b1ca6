"""Reads and changes the entries of ``RANGES`` in a topology document.

An entry names the nodes of its shards in one of two forms:

- ``{"primary": "a", "replica": "b"}``; the replica is optional.
- ``{"pair": ["a", "b"], "active": "a"}`` for a master-master pair (Yupoo, Y9). The node
  ``active`` takes the writes.

With the functions of this module, code can ask for the primary and the replica of either form. This
module uses neither Django nor a database driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Entry = dict[str, Any]


def primary_of(entry: Mapping[str, Any]) -> str:
    """Return the name of the node that takes writes. For a pair, this is the active side."""
    return str(entry["active"] if "pair" in entry else entry["primary"])


def replica_of(entry: Mapping[str, Any]) -> str | None:
    """Return the name of the replica, or of the passive side of a pair; None if there is none."""
    if "pair" not in entry:
        replica = entry.get("replica")
        return None if replica is None else str(replica)
    return next(str(node) for node in entry["pair"] if node != entry["active"])


def entry_of(content: Mapping[str, Any], group: str, number: int) -> Entry | None:
    """Return the entry of the group's ``RANGES`` that contains the shard ``number``, or None.

    :param content: the content of a document.
    """
    for entry in content["groups"].get(group, {}).get("RANGES", ()):
        first, last = entry["range"]
        if first <= number <= last:
            found: Entry = entry
            return found
    return None


def replace_shard(content: Mapping[str, Any], group: str, number: int, entry: Entry) -> None:
    """Give the shard ``number`` the settings of ``entry``. Changes ``content`` in place.

    All shards of a range are on the same nodes. So the range that contains the shard is divided,
    and neighbouring ranges with the same settings are joined.

    :param content: the content of a document, in which a range contains the shard.
    :param entry: the new entry of the shard. Its ``range`` is ignored.
    """
    old = entry_of(content, group, number)
    assert old is not None
    ranges: list[Entry] = []
    for each in content["groups"][group]["RANGES"]:
        ranges += _divided(each, number, entry) if each is old else [each]
    content["groups"][group]["RANGES"] = _joined(ranges)


def _divided(old: Entry, number: int, entry: Entry) -> Iterator[Entry]:
    first, last = old["range"]
    if first < number:
        yield {**old, "range": [first, number - 1]}
    yield {**entry, "range": [number, number]}
    if number < last:
        yield {**old, "range": [number + 1, last]}


def _joined(ranges: Iterable[Entry]) -> list[Entry]:
    """Join neighbouring ranges whose entries differ only in the numbers of the shards."""
    joined: list[Entry] = []
    for entry in sorted(ranges, key=lambda entry: entry["range"][0]):
        if joined and _without_shards(joined[-1]) == _without_shards(entry):
            joined[-1] = {**joined[-1], "range": [joined[-1]["range"][0], entry["range"][1]]}
        else:
            joined.append(entry)
    return joined


def _without_shards(entry: Entry) -> Entry:
    defaults = {"replica": None, "open": True, "weight": 1, "pinned": False, "epoch": 0}
    return {**defaults, **{key: value for key, value in entry.items() if key != "range"}}
