"""Delivers written rows of a source to its mirrors.

Each write of a source leaves a row in the outbox. The id of the outbox row is a part of the
version of the write. A delivery first determines the version, then reads the row of the source, and
writes it to the mirrors with that version. So a mirror never stores an old state under a new
version.

A mirror ignores a version that is not higher than the one that it has stored. So it does no harm if
rows are delivered twice, late, or in a different order. At the end, the mirror has the state of the
highest version, which is the last one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.db import InterfaceError, OperationalError

from sharded_orm import runtime
from sharded_orm.contrib.mirrors.declaration import Mirror, text_of
from sharded_orm.contrib.mirrors.exceptions import MirrorRaced
from sharded_orm.contrib.mirrors.mirror_rows import MirrorRow, write_rows
from sharded_orm.contrib.mirrors.outbox import BATCH, OutboxEntry
from sharded_orm.contrib.mirrors.source_reads import aliases_of, values_of, wanted_rows
from sharded_orm.exceptions import KeyMoved, ShardMoved
from sharded_orm.models.moves.repetition import repeated
from sharded_orm.models.sharding import row_placement
from sharded_orm.models.sharding.bound_key import unbound


@dataclass(frozen=True)
class RowToDeliver:
    """A row of a source that must be delivered to its mirrors.

    The outbox may have several records of the row, for example of an INSERT and of an UPDATE. One
    object of this class combines them.
    """

    pk: Any
    key: Any
    version: int
    mirror_keys: Mapping[str, frozenset[Any]]
    is_new: bool
    inserted: Mapping[str, Any] | None = None


def rows_to_deliver(entries: Iterable[OutboxEntry]) -> list[RowToDeliver]:
    """Return one :class:`RowToDeliver` for each row of a source that has records in ``entries``.

    It gets the highest version of these records. Rows with the same id under different shard keys
    are different rows.
    """
    by_row: dict[tuple[Any, Any], list[OutboxEntry]] = defaultdict(list)
    for entry in entries:
        by_row[entry.written.pk, entry.written.key].append(entry)
    rows = []
    for (pk, key), same in by_row.items():
        keys: dict[str, frozenset[Any]] = {}
        for entry in same:
            for name, values in entry.written.mirror_keys.items():
                keys[name] = keys.get(name, frozenset()) | values
        last = max(same, key=lambda entry: entry.version)
        is_new = len(same) == 1 and last.written.is_new
        inserted = last.written.inserted if is_new else None
        rows.append(RowToDeliver(pk, key, last.version, keys, is_new, inserted))
    return rows


def deliver(rows: Sequence[RowToDeliver], mirrors: Sequence[Mirror]) -> dict[Any, Exception]:
    """Write the current state of ``rows`` to ``mirrors``. Must be called outside of a transaction.

    Several calls with the same rows do no harm, even at the same time. If a shard does not answer,
    or does not accept a row, the other rows are still delivered.

    Costs for each mirror and 500 rows: a read of the source's shards, and a transaction on each
    shard that has or had the rows.

    :returns: the ids of rows that did not reach every mirror, each with the first error.
    """
    failures: dict[Any, Exception] = {}
    for mirror in mirrors:
        for batch in _batches(rows):
            failures = _deliver_batch(mirror, batch) | failures
    return failures


def _batches(rows: Sequence[RowToDeliver]) -> Iterator[list[RowToDeliver]]:
    """Yield all rows in batches. Rows with the same id are in different batches, because a delivery
    keeps its rows in a dict by id, which has only one row for each id.
    """
    by_pk: dict[Any, list[RowToDeliver]] = defaultdict(list)
    for row in rows:
        by_pk[row.pk].append(row)
    while by_pk:
        each_once = [same.pop(0) for same in by_pk.values()]
        for start in range(0, len(each_once), BATCH):
            yield each_once[start : start + BATCH]
        by_pk = {pk: same for pk, same in by_pk.items() if same}


def _deliver_batch(mirror: Mirror, rows: Sequence[RowToDeliver]) -> dict[Any, Exception]:
    try:
        # If a key or a shard moves to another server during the delivery, the whole delivery is
        # repeated. This does no harm, because rows may be delivered twice.
        return repeated(
            mirror.options.group,
            partial(_deliver_to, mirror, rows),
            nothing_written=lambda _: True,
        )
    except Exception as exc:
        if len(rows) == 1 or is_outage(exc):
            return dict.fromkeys((row.pk for row in rows), exc)
    # The batch failed. Deliver its rows one by one, to find out which of them fail.
    failures: dict[Any, Exception] = {}
    for row in rows:
        failures |= _deliver_batch(mirror, [row])
    return failures


def _deliver_to(mirror: Mirror, rows: Sequence[RowToDeliver]) -> dict[Any, Exception]:
    # First ask for the shards of the keys, and then read the source. In the other order, a key
    # could move to another shard in between. Then the old state, read before the move, would be
    # written to the new shard, which has stored no version by which it could refuse the old state.
    attname = mirror.key.attname
    aliases = aliases_of(mirror, {key for row in rows for key in row.mirror_keys.get(attname, ())})
    states = read_source(mirror, rows, aliases)
    while unknown := {key for key, _ in states.values() if key not in aliases}:
        aliases |= _placed(mirror, unknown)
        if runtime.strategy(mirror.options.group).moves_keys:
            states = read_source(mirror, rows, aliases)
    by_alias: dict[str, list[MirrorRow]] = defaultdict(list)
    for row in rows:
        key, values = states.get(row.pk, (None, None))
        home = None if values is None else aliases[key]
        former = {aliases.get(k) for k in row.mirror_keys.get(attname, ())}
        for alias in {home, *former} - {None}:
            assert alias is not None
            there = values if alias == home else None
            by_alias[alias].append(MirrorRow(row.pk, row.key, row.version, there, row.is_new))
    failures: dict[Any, Exception] = {}
    for alias, rows_there in sorted(by_alias.items()):
        failures = _write_on_shard(mirror, alias, rows_there) | failures
    return failures


def _write_on_shard(mirror: Mirror, alias: str, rows: Sequence[MirrorRow]) -> dict[Any, Exception]:
    """Write ``rows`` on one shard; one by one if the shard refuses one of them.

    :returns: the ids of rows that were not written, with the errors.
    """
    try:
        write_rows(mirror, alias, rows)
    except (KeyMoved, ShardMoved):
        raise
    except Exception as exc:
        if len(rows) == 1 or is_outage(exc):
            return dict.fromkeys((row.pk for row in rows), exc)
    else:
        return {}
    # The shard has refused the rows together. Write them one by one, to find out which of them it
    # refuses.
    failures: dict[Any, Exception] = {}
    for row in rows:
        failures |= _write_on_shard(mirror, alias, [row])
    return failures


def is_outage(exc: Exception) -> bool:
    """Whether ``exc`` has a cause outside of the row, for example a server that is down, or locks
    of other processes. The same write may then succeed later.
    """
    return isinstance(exc, OperationalError | InterfaceError | MirrorRaced)


def _placed(mirror: Mirror, keys: Iterable[Any]) -> dict[Any, str]:
    """Return a dict that maps each of ``keys`` to the alias of its shard.

    A key that has no shard yet is assigned to one.
    """
    options = mirror.options
    assert options.key is not None
    prepared = {key: options.key.get_prep_value(key) for key in keys}
    numbers = row_placement.place_keys(options, dict.fromkeys(prepared.values()))
    return {
        key: runtime.shard(options.group, numbers[value]).alias for key, value in prepared.items()
    }


def read_source(
    mirror: Mirror, rows: Sequence[RowToDeliver], aliases: Mapping[Any, str]
) -> dict[Any, tuple[Any, tuple[Any, ...]]]:
    """Return a dict that maps primary keys to pairs (shard key in the mirror, values).

    The values are in the order of :attr:`Mirror.names`. The dict lacks rows that the mirror must
    not have, such as deleted rows and rows that do not match ``condition``.

    No query is sent if the mirror has no ``condition``, if all rows are new and their ``inserted``
    has the values of their INSERT, and if none of their shard keys in the mirror has ever moved.
    Then these values are returned. The values are never older than the version of the row.

    :param aliases: maps shard keys of the mirror to aliases of shards. Keys that have no shard yet
        are left out.
    """
    source = mirror.source
    if mirror.condition is None and all(row.inserted is not None for row in rows):
        states = {}
        for row in rows:
            attributes = row.inserted
            assert attributes is not None
            values = tuple(attributes[name] for name in mirror.names)
            if (key := attributes[mirror.key.attname]) is not None:
                states[row.pk] = mirror.key.to_python(key), values
        # If a key has moved, the versions of its rows have stayed on its former shard. A row may
        # have been changed or deleted since its INSERT, and the present shard has no version by
        # which it could refuse the values of the INSERT.
        if not any(key in aliases and mirror.has_moved(key) for key, _ in states.values()):
            return states
    keys = list(dict.fromkeys(row.key for row in rows))
    with unbound():
        matching = wanted_rows(mirror).filter(
            **{f"{source.key.attname}__in": keys, "pk__in": [row.pk for row in rows]}
        )
        found = values_of(mirror, matching, (*mirror.names, source.key.attname))
    pk_at = mirror.names.index(source.pk.attname)
    key_at = mirror.names.index(mirror.key.attname)
    key_texts = {row.pk: text_of(source.key, row.key) for row in rows}
    return {
        values[pk_at]: (values[key_at], tuple(values))
        for *values, key in found
        # The source may have several rows with the same id, under different shard keys. Only the
        # row with the wanted shard key is returned.
        if text_of(source.key, key) == key_texts.get(values[pk_at])
    }
