"""Read and check ``SHARDED_ORM["GROUPS"]``: the shard groups and their ranges of shards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from sharded_orm.conf.values import flag, unknown_keys
from sharded_orm.topology.model import MAX_WEIGHT, ShardGroup, ShardRange, is_weight

KEYS = {
    "STRATEGY", "STRATEGY_OPTIONS", "RANGES", "DATABASE_NAME", "ATOMIC_REQUESTS", "CHECK_NEW_KEYS",
    "FORMER_MODELS",
}  # fmt: skip
RANGE_KEYS = {
    "range", "primary", "replica", "pair", "active", "epoch", "open", "weight", "pinned",
}  # fmt: skip
# The name of a shard group must not end like this, because it could be mistaken for the alias of
# another database. For example, "photos_00042" is a shard of the group "photos", and
# "photos_template" is the schema from which the group's test shards are cloned. More than five
# digits are refused as well.
_TAKEN_NAMES = re.compile(r"_(template|\d{5,})\Z")


def parse_groups(raw: Any, problems: list[str]) -> dict[str, ShardGroup]:
    if not isinstance(raw, Mapping):
        problems.append(f"GROUPS must be a dict, not {type(raw).__name__}")
        return {}
    groups = {}
    for name, group in raw.items():
        where = f"group {name!r}: "
        if not isinstance(name, str):
            problems.append(f"{where}its name must be text")
            continue
        if not isinstance(group, Mapping):
            problems.append(
                f"{where}must be a dict such as {{'STRATEGY': 'directory', 'RANGES': […]}}, not {group!r}"
            )
            continue
        if _TAKEN_NAMES.search(name):
            problems.append(
                f"{where}its alias could be another group's shard or template; do not end the name"
                " in _template or in _ and five digits or more"
            )
        groups[name] = _group(where, name, group, problems)
    return groups


def _group(where: str, name: str, group: Mapping[str, Any], problems: list[str]) -> ShardGroup:
    problems += unknown_keys(where, group, KEYS)
    if not isinstance(group.get("STRATEGY"), str):
        problems.append(
            f"{where}STRATEGY must be 'directory', 'modulo', 'range', 'embedded' or a dotted"
            f" path, not {group.get('STRATEGY')!r}"
        )
    options = group.get("STRATEGY_OPTIONS", {})
    if not isinstance(options, Mapping):
        problems.append(f"{where}STRATEGY_OPTIONS must be a dict, not {options!r}")
        options = {}
    ranges = list(_ranges(where, group.get("RANGES", ()), problems))
    return ShardGroup(
        name=name,
        ranges=tuple(sorted(ranges, key=lambda r: (r.first, r.last))),
        strategy=str(group.get("STRATEGY")),
        strategy_options=dict(options),
        database_name=group.get("DATABASE_NAME", "{group}_{shard:05d}"),
        atomic_requests=flag(where, "ATOMIC_REQUESTS", group, False, problems),
        former_models=_models(where, group.get("FORMER_MODELS", ()), problems),
        check_new_keys=flag(where, "CHECK_NEW_KEYS", group, True, problems),
    )


def _ranges(where: str, raw: Any, problems: list[str]) -> Iterator[ShardRange]:
    if not isinstance(raw, (list, tuple)):
        problems.append(f"{where}RANGES must be a list of dicts, not {raw!r}")
        return
    for entry in raw:
        if not isinstance(entry, Mapping):
            problems.append(f"{where}each of RANGES must be a dict, not {entry!r}")
            continue
        where_range = f"{where}range {entry.get('range')!r}: "
        problems += unknown_keys(where_range, entry, RANGE_KEYS)
        match entry.get("range"):
            case (int() as first, int() as last) if (
                first >= 0 and not isinstance(first, bool) and not isinstance(last, bool)
            ):
                pass
            case _:
                first = last = -1
        nodes = _nodes(where_range, entry, problems) if first >= 0 else None
        if nodes is None:
            problems.append(
                f"{where}a range needs 'range': (first, last) and 'primary': a node (or 'pair': two nodes"
                f" and 'active': one of them), not {dict(entry)!r}"
            )
            continue
        weight = entry.get("weight", 1.0)
        if not is_weight(weight):
            problems.append(
                f"{where_range}weight must be a number from 0 to {MAX_WEIGHT:,}, not {weight!r}"
            )
            weight = 1.0
        is_open = flag(where_range, "open", entry, True, problems)
        is_pinned = flag(where_range, "pinned", entry, False, problems)
        is_pair, epoch = "pair" in entry, entry.get("epoch", 0)
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
            problems.append(f"{where_range}epoch must be a number from 0, not {epoch!r}")
            epoch = 0
        elif epoch and not is_pair:
            problems.append(f"{where_range}only a range with 'pair' has an epoch; remove it")
        yield ShardRange(
            first, last, *nodes, is_open, weight, is_pinned, is_pair=is_pair, epoch=epoch
        )


def _nodes(
    where: str, entry: Mapping[str, Any], problems: list[str]
) -> tuple[str, str | None] | None:
    """Return the primary and the replica of a range; None if the entry does not name them in one of
    the permitted forms.

    For a range on a pair (two servers that replicate from each other), the active side, which takes
    writes, counts as the primary, and the passive side as the replica.
    """
    match entry:
        case {"pair": (str() as one, str() as other), "active": str() as active}:
            if both := sorted({"primary", "replica"} & set(entry)):
                problems.append(
                    f"{where}it has 'pair' and {both!r}; a pair needs only 'active', its side that takes"
                    " writes"
                )
            if one == other:
                problems.append(f"{where}pair names {one!r} twice; a pair has two servers")
            elif active not in (one, other):
                problems.append(
                    f"{where}active must be one of the pair {[one, other]!r}, not {active!r}"
                )
            else:
                return active, other if active == one else one
            return one, None
        case {"pair": _} | {"active": _}:
            return None
        case {"primary": str() as primary}:
            replica = entry.get("replica")
            if replica is not None and not isinstance(replica, str):
                problems.append(f"{where}replica must be a node, not {replica!r}")
                replica = None
            return primary, replica
    return None


def _models(where: str, raw: Any, problems: list[str]) -> frozenset[tuple[str, str]]:
    labels = raw if isinstance(raw, (list, tuple)) else (raw,)
    models = [str(label).lower().split(".") for label in labels]
    if not all(isinstance(label, str) for label in labels) or not all(
        len(parts) == 2 and all(parts) for parts in models
    ):
        problems.append(
            f"{where}FORMER_MODELS must be a list of names such as 'photos.Photo', not {raw!r}"
        )
        return frozenset()
    return frozenset((app, model) for app, model in models)
