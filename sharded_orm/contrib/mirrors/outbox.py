"""The outbox of a shard, a table of rows of sources that were written.

A row stays in the table at least until it was delivered to its mirrors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connections
from django.db.models import QuerySet

from sharded_orm.contrib.mirrors.declaration import Source, text_of, value_of
from sharded_orm.contrib.mirrors.exceptions import VersionsExhausted
from sharded_orm.contrib.mirrors.insert_statements import insert_outbox_row
from sharded_orm.contrib.mirrors.models import OutboxRow
from sharded_orm.database_clock import DatabaseClock

# A version has 63 bits. The upper 27 bits are the epoch, which grows when the shard key moves. The
# lower 36 bits are the id of the outbox row. So a shard can have 2**36 writes, and a key 2**27
# moves.
_NUMBER_BITS, _EPOCH_BITS = 36, 27
#: The number of outbox rows that one statement reads, writes or deletes.
BATCH = 500


@dataclass(frozen=True)
class WrittenRow:
    """A row of a source that a statement has changed.

    :param pk: the primary key of the row.
    :param key: the shard key of the row.
    :param mirror_keys: the old and new shard keys of the row in its mirrors. For example,
        ``{"author_id": {3, 7}}`` if ``author_id`` is the shard key of a mirror, and the statement
        may have changed it from 3 to 7.
    :param epoch: a number that grows each time the shard key moves to another shard.
    :param is_new: whether the statement was an INSERT. Not stored in the outbox.
    :param inserted: maps attributes to the values that the INSERT has stored; None if they are not
        known. Not stored in the outbox.
    """

    pk: Any
    key: Any
    mirror_keys: Mapping[str, frozenset[Any]]
    epoch: int
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


#: A function that returns the recorded rows as outbox entries. Call it after the commit.
Recorded = Callable[[], list[OutboxEntry]]


def record(source: Source, alias: str, rows: Sequence[WrittenRow]) -> Recorded:
    """Write ``rows`` into the outbox of the shard ``alias``, in the transaction that has changed
    them.

    Costs one statement per 500 rows. If the database cannot return the ids of many new rows, it
    costs one statement per row.

    :returns: a function that returns the entries of the outbox. Call it after the commit, because a
        database may assign the id of an outbox row only then. It raises VersionsExhausted if an id
        has too many bits for a version.
    """
    if len(rows) == 1 or not connections[alias].features.can_return_rows_from_bulk_insert:
        recorded = [(_record_one(source, alias, row), row) for row in rows]
        return lambda: [_entry(number(), row) for number, row in recorded]
    stored = [
        OutboxRow(
            source=source.label,
            row=text_of(source.pk, row.pk),
            key=text_of(source.key, row.key),
            mirror_keys=_keys_text(source, row.mirror_keys),
            epoch=row.epoch,
            written_at=DatabaseClock(),
        )
        for row in rows
    ]
    outbox_rows(alias).bulk_create(stored, batch_size=BATCH)
    entries = [_entry(row.id, written) for row, written in zip(stored, rows, strict=True)]
    return lambda: entries


def _record_one(source: Source, alias: str, row: WrittenRow) -> Callable[[], int]:
    return insert_outbox_row(
        alias,
        source.label,
        text_of(source.pk, row.pk),
        text_of(source.key, row.key),
        _keys_text(source, row.mirror_keys),
        row.epoch,
    )


def _entry(number: int, row: WrittenRow) -> OutboxEntry:
    return OutboxEntry(number, _version(number, row.epoch), row)


def entry_of(source: Source, row: OutboxRow) -> OutboxEntry:
    """Return the outbox entry that is stored in ``row``."""
    fields = {field.attname: field for field in source.mirror_keys}
    keys: dict[str, list[str]] = json.loads(row.mirror_keys)
    written = WrittenRow(
        value_of(source.pk, row.row),
        value_of(source.key, row.key),
        {
            name: frozenset(value_of(fields[name], text) for text in texts)
            for name, texts in keys.items()
            # Skip an attribute that is no mirror's shard key any more. The mirror was removed from
            # the project after the write.
            if name in fields
        },
        row.epoch,
    )
    return _entry(row.id, written)


def remove(alias: str, numbers: Iterable[int]) -> None:
    """Delete delivered rows from the outbox of ``alias``. Sends one statement per 500 rows."""
    ordered = sorted(numbers)
    for start in range(0, len(ordered), BATCH):
        rows: Any = outbox_rows(alias).filter(pk__in=ordered[start : start + BATCH])
        # delete() would first look for rows with foreign keys to these rows. There are none, so
        # _raw_delete() sends the DELETE alone.
        rows._raw_delete(alias)


def _keys_text(source: Source, keys: Mapping[str, frozenset[Any]]) -> str:
    fields = {field.attname: field for field in source.mirror_keys}
    return json.dumps(
        {
            name: sorted(text_of(fields[name], value) for value in keys[name])
            for name in sorted(keys)
        }
    )


def _version(number: int, epoch: int) -> int:
    if number >> _NUMBER_BITS or epoch >> _EPOCH_BITS:
        raise VersionsExhausted(
            f"Row {number!r} of an outbox, in epoch {epoch!r}, makes no version of {_NUMBER_BITS} and"
            f" {_EPOCH_BITS} bits. Import the keys of the shard into a new group."
        )
    return epoch << _NUMBER_BITS | number
