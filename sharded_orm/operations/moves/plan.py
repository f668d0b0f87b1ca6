"""The plan of a move of keys: which keys move, and from which shard to which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sharded_orm import runtime
from sharded_orm.exceptions import MoveRefused
from sharded_orm.operations.moves import preflight, record
from sharded_orm.operations.moves.group_keys import GroupKeys
from sharded_orm.operations.moves.request import AUTO, KeyToMove, keys_text
from sharded_orm.operations.moves.shard_sessions import ShardSessions
from sharded_orm.operations.moves.tables import tables_of_group
from sharded_orm.operations.relations import batched
from sharded_orm.routing.directory import DirectoryStrategy

#: With the target ``auto``, an open shard is drawn at random for each key, and drawn again if it is
#: the shard on which the key is already. After this many draws without another shard, there
#: probably is no other open shard.
_DRAWS = 100
_LOOK_UPS = 500


@dataclass
class MovePlan:
    """Which keys move, and notes that an operator should read before the move.

    :param already: keys, as text, that are on their target now.
    :param notes: sentences for the operator. For example, one says which tables belong to no model.
    """

    group: str
    keys: list[KeyToMove] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_moves(group: str, keys: Iterable[Any], to: int | str) -> MovePlan:
    """Check that ``keys`` can move, and return the plan of their moves. Changes nothing.

    :param keys: shard keys, as values or as text.
    :param to: the number of a shard, or ``"auto"``.
    :raises MoveRefused: the keys cannot be moved. Every reason is listed.
    :raises InvalidShardKey: no row can have one of the keys.

    Costs one query per 500 keys, some queries per shard, and two per table and key.
    """
    group_keys = preflight.check_group(group)
    values = {group_keys.text(value): value for value in map(group_keys.value, keys)}
    plan = MovePlan(group)
    problems = list(_target_problems(group, to))
    if not problems:
        problems = list(_place(plan, group_keys, values, to))
    if problems:
        raise MoveRefused(problems)
    tables = tables_of_group(group)
    with ShardSessions(group) as sessions:
        numbers = {number for key in plan.keys for number in (key.source, key.target)}
        plan.notes += preflight.check_shards(group, numbers, tables, sessions)
        problems = []
        for key in plan.keys:
            problems += preflight.taken_on_target(
                group, key, group_keys.stored(key.value), tables, sessions
            )
    if problems:
        raise MoveRefused(problems)
    return plan


def _target_problems(group: str, to: int | str) -> Iterator[str]:
    found = runtime.group(group)
    if to == AUTO:
        if not found.open_ranges:
            yield f"no shard of group {group!r} is open for keys"
        return
    if not isinstance(to, int) or isinstance(to, bool) or to not in found:
        yield f"group {group!r} has no shard {to!r}: its shards are 0 to {found.count - 1}"
    elif found.range_of(to) not in found.open_ranges:
        yield (
            f"shard {to} of group {group!r} is closed for new keys: open its range by 'manage.py"
            " shards open', or choose another shard"
        )


def _place(
    plan: MovePlan, group_keys: GroupKeys, values: dict[str, Any], to: int | str
) -> Iterator[str]:
    strategy: Any = runtime.strategy(plan.group)
    sources: dict[str, int] = {}
    flying: list[str] = []
    for texts in batched(values, _LOOK_UPS):
        stored = strategy.store.find(plan.group, texts)
        sources |= {text: placement.shard for text, placement in stored.items()}
        rows = record.in_flight(plan.group).filter(key__in=texts)
        flying += rows.values_list("value", flat=True)
    if unplaced := [str(value) for text, value in values.items() if text not in sources]:
        yield f"the directory has no shard of {keys_text(unplaced)}, so there is nothing to move"
    if flying:
        yield (
            f"{keys_text(flying)} are being moved already: wait, or run 'manage.py keys repair"
            f" {plan.group}' if no process does so"
        )
    for text, value in values.items():
        source = sources.get(text)
        if source is None:
            continue
        target = _draw(strategy, source) if to == AUTO else int(to)
        if target is None:
            yield f"no shard but {source} of group {plan.group!r} is open for keys"
            return
        if target == source:
            plan.already.append(str(value))
        else:
            plan.keys.append(KeyToMove(value, text, source, target))


def _draw(strategy: DirectoryStrategy, source: int) -> int | None:
    return next((n for n in (strategy.draw() for _ in range(_DRAWS)) if n != source), None)


def shards_of(keys: Sequence[KeyToMove]) -> dict[tuple[int, int], int]:
    """Return how many keys move between two shards: maps (number of the source, number of the
    target) to the number of keys.
    """
    counts: dict[tuple[int, int], int] = {}
    for key in keys:
        counts[key.source, key.target] = counts.get((key.source, key.target), 0) + 1
    return counts
