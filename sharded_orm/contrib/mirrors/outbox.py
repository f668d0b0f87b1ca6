"""The outbox of a shard: a record of the rows of sources that were written and not delivered yet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connections
from django.db.models import QuerySet

from sharded_orm import runtime
from sharded_orm.contrib.mirrors.declaration import Source, text_of, value_of
from sharded_orm.contrib.mirrors.exceptions import VersionsExhausted
from sharded_orm.contrib.mirrors.models import OutboxRow
from sharded_orm.contrib.mirrors.statements import insert_outbox_row
from sharded_orm.database_clock import DatabaseClock

# A version has the epoch, the number of moves of the shard key, in its upper bits. It has the id of
# the outbox row in its lower bits. So there may be 2**36 writes per shard, and 2**27 moves of keys.
_NUMBER_BITS, _EPOCH_BITS = 36, 27
#: The number of outbox rows that one statement reads, writes or deletes.
BATCH = 500


@dataclass(frozen=True)
class WrittenRow:
    """A row of a source that a statement has changed.

    :param pk: the primary key of the row.
    :param key: the shard key of the row.
    :param mirror_keys: the shard keys in the mirrors that the row may have had before, or has now,
        by the attribute of the source. Keys that are not known are left out.
    :param is_new: whether the statement was an INSERT. Not stored in the outbox.
    :param inserted: the values that the INSERT has stored, by attribute; None if they are not
        known. Not stored in the outbox.
    """

    pk: Any
    key: Any
    mirror_keys: Mapping[str, frozenset[Any]]
    is_new: bool = False
    inserted: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class OutboxEntry:
    """A row of an outbox, as an object in memory."""

    number: int
    version: int
    written: WrittenRow


def outbox_rows(alias: str) -> QuerySet[OutboxRow]:
    return QuerySet(OutboxRow, using=alias)


def record(source: Source, alias: str, rows: Sequence[WrittenRow]) -> list[OutboxEntry]:
    """Write ``rows`` into the outbox of the shard ``alias``, in the transaction that has changed them.

    Costs one statement per 500 rows.

    :returns: the entries of the outbox.
    :raises VersionsExhausted: the id of an outbox row is too large for a version.
    """
    if len(rows) == 1 or not connections[alias].features.can_return_rows_from_bulk_insert:
        return [_record_one(source, alias, row) for row in rows]
    stored = [
        OutboxRow(
            source=source.label,
            row=text_of(source.pk, row.pk),
            key=text_of(source.key, row.key),
            mirror_keys=_keys_text(source, row.mirror_keys),
            epoch=_epoch(source, row.key),
            written_at=DatabaseClock(),
        )
        for row in rows
    ]
    outbox_rows(alias).bulk_create(stored, batch_size=BATCH)
    return [
        OutboxEntry(row.id, _version(row.id, row.epoch), written)
        for row, written in zip(stored, rows, strict=True)
    ]


def _record_one(source: Source, alias: str, row: WrittenRow) -> OutboxEntry:
    epoch = _epoch(source, row.key)
    number = insert_outbox_row(
        alias,
        source.label,
        text_of(source.pk, row.pk),
        text_of(source.key, row.key),
        _keys_text(source, row.mirror_keys),
        epoch,
    )
    return OutboxEntry(number, _version(number, epoch), row)


def entry_of(source: Source, row: OutboxRow) -> OutboxEntry:
    """Return the entry that a stored row of an outbox represents."""
    fields = {field.attname: field for field in source.mirror_keys}
    keys: dict[str, list[str]] = json.loads(row.mirror_keys)
    written = WrittenRow(
        value_of(source.pk, row.row),
        value_of(source.key, row.key),
        {
            name: frozenset(value_of(fields[name], text) for text in texts)
            for name, texts in keys.items()
            # An attribute that is not among the fields belonged to a mirror that was removed.
            if name in fields
        },
    )
    return OutboxEntry(row.id, _version(row.id, row.epoch), written)


def remove(alias: str, numbers: Iterable[int]) -> None:
    """Delete rows that were delivered from the outbox of ``alias``. One statement per 500 rows."""
    ordered = sorted(numbers)
    for start in range(0, len(ordered), BATCH):
        rows: Any = outbox_rows(alias).filter(pk__in=ordered[start : start + BATCH])
        # _raw_delete() does not read the rows first, which is not necessary because nothing refers
        # to them.
        rows._raw_delete(alias)


def _keys_text(source: Source, keys: Mapping[str, frozenset[Any]]) -> str:
    fields = {field.attname: field for field in source.mirror_keys}
    return json.dumps(
        {
            name: sorted(text_of(fields[name], value) for value in keys[name])
            for name in sorted(keys)
        }
    )


def _epoch(source: Source, key: Any) -> int:
    strategy = runtime.strategy(source.options.group)
    return strategy.version(source.key.get_prep_value(key)) if strategy.moves_keys else 0


def _version(number: int, epoch: int) -> int:
    if number >> _NUMBER_BITS or epoch >> _EPOCH_BITS:
        raise VersionsExhausted(
            f"Row {number!r} of an outbox, in epoch {epoch!r}, makes no version of {_NUMBER_BITS} and"
            f" {_EPOCH_BITS} bits. Import the keys of the shard into a new group."
        )
    return epoch << _NUMBER_BITS | number
