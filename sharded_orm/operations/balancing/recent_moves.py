"""Find the shards that have moved a short time ago, in the history of the topology."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from sharded_orm import runtime
from sharded_orm.operations.exceptions import BalanceRefused
from sharded_orm.topology.document import Document
from sharded_orm.topology.model import Topology
from sharded_orm.topology.range_entries import primary_of, replica_of
from sharded_orm.topology.sources.base import Revision

#: The history of the topology may be long, so only this many of the latest entries are read at
#: first. If the oldest of them is too recent, twice as many entries are read, and so on.
_FIRST = 100
#: The version number of the first topology document that is ever published.
_FIRST_VERSION = 1

_Nodes = tuple[Any, Any]


def recent_moves(topology: Topology, now: datetime, cool_down: timedelta) -> frozenset[str]:
    """Return the aliases of shards that have moved to another node in the last ``cool_down``.

    The history of the topology contains every move, by any process. A promotion, in which a replica
    takes over, is not a move. Costs at least one round trip to the source of the topology, and one
    more for each version of the topology in that time.

    :raises BalanceRefused: the history does not reach back for the whole ``cool_down``.
    :raises TopologyError: the source does not answer.
    """
    if not cool_down:
        return frozenset()
    versions = [revision.version for revision in _revisions(now - cool_down)]
    source = runtime.source()
    try:
        documents = [source.revision(version) for version in versions]
    except LookupError as exc:
        raise BalanceRefused(
            [f"the history of the topology was shortened meanwhile ({exc}): try again"]
        ) from exc
    moved: set[str] = set()
    for name, group in topology.groups.items():
        places = [_nodes(document, name) for document in documents]
        for after, before in pairwise(places):
            for number, (new, old) in enumerate(zip(after, before, strict=False)):
                # If the new primary is the former replica, the shard was not moved but its replica
                # was promoted.
                if new[0] != old[0] and new[0] != old[1] and number in group:
                    moved.add(group.shard(number).alias)
    return frozenset(moved)


def _revisions(since: datetime) -> list[Revision]:
    """Return the versions of the topology that were in use since ``since``, the newest first.

    The last item is the version that was in use at the time ``since``.
    """
    source = runtime.source()
    limit = _FIRST
    while True:
        history = source.history(limit)
        for count, revision in enumerate(history, start=1):
            if revision.published_at is None:
                break
            if revision.published_at <= since or revision.version <= _FIRST_VERSION:
                return history[:count]
        else:
            if len(history) == limit:
                limit *= 2
                continue
        raise BalanceRefused([_no_history(source.describe(), history, since)])


def _no_history(source: str, history: Sequence[Revision], since: datetime) -> str:
    if not history:
        why = f"{source} keeps no history of the topology"
        remedy = ""
    else:
        moment = since.isoformat(sep=" ", timespec="minutes")
        why = f"the history of the topology in {source} does not reach back to {moment}"
        remedy = " give a shorter --cool-down (in hours), or"
    return (
        f"{why}, so nobody knows which shards have moved a short time ago, and a plan might move them"
        f" back:{remedy} give --cool-down 0 if you know that none has moved"
    )


def _nodes(document: Document, group: str) -> list[_Nodes]:
    """Return pairs (primary, replica) of node names, one for each shard, by number."""
    ranges: Iterable[Mapping[str, Any]] = document.groups.get(group, {}).get("RANGES", ())
    nodes: list[_Nodes] = []
    for entry in sorted(ranges, key=lambda entry: entry["range"][0]):
        first, last = entry["range"]
        nodes += [(primary_of(entry), replica_of(entry))] * (last + 1 - first)
    return nodes
