"""Reports for an operator: which moves a group has, and which shards have rows of a key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sharded_orm import runtime
from sharded_orm.exceptions import MoveRefused
from sharded_orm.models.tables.key_move import KeyMove
from sharded_orm.operations.moves import preflight, record
from sharded_orm.operations.moves.group_keys import GroupKeys
from sharded_orm.operations.moves.request import keys_text
from sharded_orm.operations.moves.shard_sessions import ShardSessions
from sharded_orm.operations.moves.tables import tables_of_group
from sharded_orm.operations.moves.verification import NAMED, row_names
from sharded_orm.operations.relations import batched

_LOOK_UPS = 500


@dataclass(frozen=True)
class MoveStatus:
    """The state of one move of a key.

    :param phase: "announced", "copying" or "switching" while the source owns the key; "switched" or
        "settled" when the target owns the key; or "aborted".
    :param fenced: whether triggers on the source (the old shard) still refuse writes of the key.
    :param kept_until: the time until which the old rows are kept; None if there are none.
    """

    number: int
    key: str
    source: int
    target: int
    phase: str
    in_flight: bool
    announced_at: datetime
    switched_at: datetime | None
    fenced: bool
    kept_until: str | None
    error: str


def moves_of(group: str, last: int) -> list[MoveStatus]:
    """Return all unfinished moves of ``group``, and some finished ones, newest first. Two queries.

    A move is finished if it has ended and has left nothing on a shard.

    :param last: the largest number of finished moves to return.
    """
    preflight.check_group(group)
    rows = record.rows().filter(group=group)
    shown = [*rows.filter(finished_at=None), *rows.exclude(finished_at=None).order_by("-pk")[:last]]
    return [_status(row) for row in sorted(shown, key=lambda row: -row.pk)]


def _status(row: KeyMove) -> MoveStatus:
    return MoveStatus(
        row.pk,
        row.value,
        row.source,
        row.target,
        row.phase,
        bool(row.in_flight),
        row.announced_at,
        row.switched_at,
        bool(row.position.get("fenced")),
        row.position.get("kept_until"),
        row.error,
    )


@dataclass(frozen=True)
class KeyRows:
    """How many rows of a key are on which shards.

    :param shard: the number of the key's shard, according to the directory (the table that records
        the shard of each key).
    :param rows: number of rows on that shard.
    :param elsewhere: the other shards that have rows of the key. Maps the number of each such shard
        to the number of the key's rows there.
    :param examples: maps the number of each such shard to some of the key's rows there. Each row is
        a text with the table and the primary key.
    """

    key: str
    shard: int
    rows: int
    elsewhere: dict[int, int]
    examples: dict[int, list[str]]


def verify(group: str, keys: Iterable[Any]) -> list[KeyRows]:
    """Count the rows of keys on every shard of ``group``.

    Costs one statement per key, table and shard, so name few keys.

    :raises MoveRefused: a key is being moved or has no shard, so there is nothing to compare.
    """
    group_keys: GroupKeys = preflight.check_group(group)
    tables = tables_of_group(group)
    strategy: Any = runtime.strategy(group)
    values = {group_keys.text(value): value for value in map(group_keys.value, keys)}
    places: dict[str, int] = {}
    for texts in batched(values, _LOOK_UPS):
        found = strategy.store.find(group, texts)
        places |= {text: placement.shard for text, placement in found.items()}
    flying = set(record.in_flight(group).values_list("key", flat=True))
    problems = []
    if unplaced := [str(value) for text, value in values.items() if text not in places]:
        problems.append(f"the directory has no shard of {keys_text(unplaced)}")
    if moving := [str(value) for text, value in values.items() if text in flying]:
        problems.append(f"{keys_text(moving)} are being moved: wait until that has ended")
    if problems:
        raise MoveRefused(problems)
    counts: dict[str, dict[int, int]] = {text: {} for text in values}
    examples: dict[str, dict[int, list[str]]] = {text: {} for text in values}
    with ShardSessions(group) as sessions:
        for number in range(runtime.group(group).count):
            copy = sessions.copy(number)
            for text, value in values.items():
                stored = group_keys.stored(value)
                digests = {table: copy.key_digests(table, stored) for table in tables}
                counts[text][number] = sum(digest.count for digest in digests.values())
                if number != places[text] and counts[text][number]:
                    examples[text][number] = [
                        f"{table.name} {name}"
                        for table, digest in digests.items()
                        if digest.count
                        for name in row_names(copy.key_rows(table, stored))
                    ][:NAMED]
            # Close the sessions on this shard before the next shard's turn. Otherwise sessions on
            # all shards would be open in the end.
            sessions.close()
    return [
        KeyRows(
            str(value),
            places[text],
            counts[text].pop(places[text]),
            {number: count for number, count in counts[text].items() if count},
            examples[text],
        )
        for text, value in values.items()
    ]
