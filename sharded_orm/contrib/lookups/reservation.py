"""Reserves values in lookups for rows that a transaction writes.

A reservation is an entry that is committed before the row. So each committed row has its entry, and
only one of two transactions can get the same value of a unique lookup.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from django.db import connections

from sharded_orm import runtime
from sharded_orm.contrib.lookups import entries
from sharded_orm.contrib.lookups.declaration import ModelLookup
from sharded_orm.contrib.lookups.entries import Place, StoredEntry
from sharded_orm.contrib.lookups.exceptions import LookupValueTaken
from sharded_orm.contrib.lookups.states import (
    is_served,
    refuse_other_table,
)
from sharded_orm.contrib.lookups.transaction import (
    QUARANTINE,
    EntryChange,
    TransactionEntries,
    ended_changes,
)
from sharded_orm.models.moves.confirmation import in_transaction
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.bound_key import unbound

R = TypeVar("R")

#: How often a process tries to take over an entry, if others change the entry between its read and
#: its write.
ATTEMPTS = 5


def reserve(
    connection: Any,
    watcher: TransactionEntries,
    change: EntryChange,
    rows: Mapping[Place, tuple[ModelLookup, str]],
) -> None:
    """Write the entries of the rows that a statement writes. One statement per 100 entries.

    :param connection: the connection object of the rows' shard.
    :param watcher: the record of the transaction.
    :param change: the record of the statement that writes the rows.
    :param rows: maps the columns that identify each entry to a pair (lookup, text of the row's
        shard key).
    :raises LookupValueTaken: another row has the value of a unique lookup, or an open transaction
        may write such a row.
    :raises LookupRefused: the table in the lookup's declaration was changed, and queries still rely
        on the old table.
    :raises ScatterError: the lookup is not built yet, so all shards are searched for the value, and
        a shard does not answer.
    """
    waiting = [
        lookup for lookup in {lookup for lookup, _ in rows.values()} if not is_served(lookup)
    ]
    refuse_other_table(waiting)
    # Sort the entries. If all processes write entries in the same order, no two of them can run
    # into a deadlock.
    places = sorted(rows)
    change.note_tables(places)
    change.has_fresh, change.places = True, places
    keys = [rows[place][1] for place in places]
    stored = entries.add(places, keys, change.fresh, watcher.writer)
    # ``stored`` has the positions of entries that existed already. For each of them, the loop below
    # decides whether this statement can take the entry over.
    inserted = set(places).difference(places[number] for number in stored)
    change.tokens_by_place.update(dict.fromkeys(inserted, change.fresh))
    for number in stored:
        place = places[number]
        lookup, key = rows[place]
        change.has_taken = True
        if lookup.unique:
            _take_over_if_free(connection, watcher, change, lookup, place, key)
        else:
            _take_over(change, watcher, place, key)
    if waiting:
        _refuse_values_of_rows_without_entries(connection, rows)


def _refuse_values_of_rows_without_entries(
    connection: Any, rows: Mapping[Place, tuple[ModelLookup, str]]
) -> None:
    """Raise an error if another row has a value of a unique lookup that is not built yet.

    Until a lookup is built, older rows may have no entries. So search all shards for rows with the
    values. The entries of the new rows are committed before this search, so a later transaction
    with the same value finds them. Costs one query on each shard for 500 values, or none if the
    lookup is built.
    """
    places_by_lookup: dict[ModelLookup, list[Place]] = {}
    for place, (lookup, _) in rows.items():
        if lookup.unique:
            places_by_lookup.setdefault(lookup, []).append(place)
    for lookup, places in places_by_lookup.items():
        if is_served(lookup):
            continue
        for start in range(0, len(places), entries.MAX_VALUES):
            batch = {place.value: place for place in places[start : start + entries.MAX_VALUES]}
            for value in _values_of_rows(connection, lookup, list(batch)):
                raise value_taken(
                    lookup, batch[value], "a row that is older than the lookup has it"
                )


def _values_of_rows(connection: Any, lookup: ModelLookup, values: Sequence[str]) -> set[str]:
    """Return those of ``values`` that other rows have already, on any shard.

    The open transaction of this connection has written one new row for each value, on this shard.
    So a value is returned if two rows on this shard have it, or one row on another shard.
    """
    conditions = {
        f"{lookup.field.attname}__in": [lookup.field.to_python(value) for value in values]
    }
    columns = lookup.key.attname, lookup.field.attname

    def elsewhere() -> set[str]:
        rows: Any = ShardedQuerySet(lookup.model).scatter().uncached().filter(**conditions)
        prepared = (
            (lookup.key.get_prep_value(key), value) for key, value in rows.values_list(*columns)
        )
        return {
            text(value)
            for key, value in prepared
            if (shard := runtime.locate(lookup.options.group, key)) is None
            or shard.alias != connection.alias
        }

    def text(value: Any) -> str:
        return lookup.text(lookup.field.get_prep_value(value))

    with unbound():
        rows: Any = ShardedQuerySet(lookup.model, using=connection.alias).uncached()
        here = Counter(text(value) for _, value in rows.filter(**conditions).values_list(*columns))
    return _outside_transactions(elsewhere) | {value for value, count in here.items() if count > 1}


def _take_over(change: EntryChange, watcher: TransactionEntries, place: Place, key: str) -> None:
    # This is called for a lookup that is not unique. There, the slot of an entry identifies its
    # row, so the existing entry with this slot belongs to the same row, which has had the value
    # before. So take the entry over without looking for another owner.
    for _ in range(ATTEMPTS):
        if entries.take(place, key, change.taken, watcher.writer):
            change.tokens_by_place[place] = change.taken
            return
        if _insert_entry(change, watcher, place, key):
            return
    raise _value_contended(place)


def _insert_entry(change: EntryChange, watcher: TransactionEntries, place: Place, key: str) -> bool:
    """Insert an entry. Return False if an entry with the same identity exists already.

    :param place: the columns that identify the entry in the table of the lookup.
    """
    if entries.add([place], [key], change.fresh, watcher.writer):
        return False
    change.tokens_by_place[place] = change.fresh
    return True


def _take_over_if_free(
    connection: Any,
    watcher: TransactionEntries,
    change: EntryChange,
    lookup: ModelLookup,
    place: Place,
    key: str,
) -> None:
    for _ in range(ATTEMPTS):
        entry = entries.entry_at(place)
        if entry is None:
            if _insert_entry(change, watcher, place, key):
                return
            continue
        if watcher.owns(entry.token):
            # The entry is from an earlier statement of this transaction, which has since deleted
            # the row or undone its INSERT by a rollback to a savepoint. So the value is probably
            # free again.
            if entry.key != key:
                raise value_taken(
                    lookup,
                    place,
                    f"this transaction has used it for a row of {lookup.key.name}={entry.key!r}",
                )
            if _count_rows(connection, lookup, place) > 1:
                raise value_taken(lookup, place, "a row of this transaction has it")
        else:
            if not is_transaction_over(lookup, entry):
                raise value_taken(
                    lookup, place, "a row has it, or an open transaction may give it to one"
                )
            # Look for a row only now, when it is certain that the entry's transaction has ended. If
            # that transaction were still open, it could commit a row with the value after this
            # query.
            if has_row(lookup, entry):
                raise value_taken(lookup, place, f"a row of {lookup.key.name}={entry.key!r} has it")
        if entries.take(place, key, change.taken, watcher.writer, entry):
            change.tokens_by_place[place] = change.taken
            return
    raise _value_contended(place)


def value_taken(lookup: ModelLookup, place: Place, why: str) -> LookupValueTaken:
    """Return the error that says that a value of a unique lookup is taken.

    :param why: the part of the message that says which row or transaction has the value.
    """
    return LookupValueTaken(
        f"{lookup.model.__name__}.{lookup.field.name}={place.value!r} is unique over all shards, and"
        f" {why}. Choose another value."
    )


def _value_contended(place: Place) -> LookupValueTaken:
    return LookupValueTaken(
        f"{place.lookup}={place.value!r} is written by others again and again. Try again."
    )


def is_transaction_over(lookup: ModelLookup, entry: StoredEntry) -> bool:
    """Whether it is certain that the transaction that has written ``entry`` has ended.

    Costs at most two queries.
    """
    if not entry.is_open or entry.token in ended_changes:
        return True
    writer = entries.writer_session(entry.writer)
    shard = runtime.locate(lookup.options.group, lookup.key_of_text(entry.key))
    if shard is not None and writer.connection:
        connection: Any = connections[shard.alias]
        if connection.judges(writer):
            return writer in connection.sessions_gone([writer])
    return entry.written_at < time.time() - QUARANTINE


def has_row(lookup: ModelLookup, entry: StoredEntry) -> bool:
    """Whether a committed row has the value and the shard key of ``entry``. One query on a shard."""
    key, value = lookup.key_of_text(entry.key), lookup.field.to_python(entry.place.value)
    prepared = lookup.model._meta.pk.get_prep_value

    def read() -> bool:
        rows: Any = ShardedQuerySet(lookup.model)
        conditions = {lookup.key.attname: key, lookup.field.attname: value}
        pks = rows.filter(**conditions).uncached().values_list("pk", flat=True)
        return any(lookup.slot(prepared(pk), entry.key) == entry.place.slot for pk in pks)

    if in_transaction(lookup.options.group):
        return _outside_transactions(read)
    with unbound():
        return read()


def _count_rows(connection: Any, lookup: ModelLookup, place: Place) -> int:
    """Return the number of rows with a value on one shard, as its open transaction sees them."""
    rows: Any = ShardedQuerySet(lookup.model, using=connection.alias)
    with unbound():
        return int(rows.filter(**{lookup.field.attname: place.value}).uncached().count())


def _outside_transactions(read: Callable[[], R]) -> R:
    """Return the result of ``read``, run outside of this thread's transactions.

    Inside a transaction, the read might see an older state of the rows, and rows that are not
    committed yet.
    """
    if not entries.is_committed_at_once():
        with unbound():
            # Read in this thread, because a different thread would not see what Django's TestCase
            # has written.
            return read()
    return entries.outside_transactions(read)
