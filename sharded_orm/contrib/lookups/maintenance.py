"""Builds lookups, compares their entries with the rows, and repairs them.

If an entry and a row differ, the row counts as right, and the entry is repaired (FriendFeed, FF4).

All functions can run while the site writes rows. A function that was killed can be called again. No
step removes an entry that a row needs. Entries that no row needs may stay, and do no harm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from django.db import connections
from django.db.models import CharField

from sharded_orm import runtime
from sharded_orm.backends.features import features_of
from sharded_orm.cache import request_cache
from sharded_orm.contrib.lookups import entries, states
from sharded_orm.contrib.lookups.declaration import (
    ModelLookup,
    declared_inexact,
    lookups_by_name,
)
from sharded_orm.contrib.lookups.entries import EntryTable, Place, StoredEntry
from sharded_orm.contrib.lookups.exceptions import LookupRefused
from sharded_orm.contrib.lookups.reservation import ATTEMPTS, has_row, is_transaction_over
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.sharding.bound_key import unbound
from sharded_orm.models.sharding.options import target_field
from sharded_orm.models.sharding.rows_of_keys import RowsOfKeys
from sharded_orm.routing.directory import DirectoryStrategy
from sharded_orm.routing.placement_lease import MoveList

#: The number of rows, or of entries, that are read and compared at a time.
BATCH = 500
_EXAMPLES = 10


@dataclass
class LookupDifferences:
    """The differences between the entries of a lookup and the rows: the number of each kind, with a
    few examples.
    """

    lookup: str
    rows: int = 0
    entries: int = 0
    #: Rows without an entry. A query by the lookup misses them.
    missing: int = 0
    #: Entries that no row needs, and whose transactions have ended. They do not change the results
    #: of queries.
    surplus: int = 0
    #: Rows whose value another row has as well, although the lookup is unique.
    duplicates: int = 0
    repaired: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return self.missing + self.surplus + self.duplicates == self.repaired

    def example(self, text: str) -> None:
        if len(self.examples) < _EXAMPLES:
            self.examples.append(text)


@dataclass(frozen=True)
class LookupStatus:
    lookup: str
    unique: bool
    is_served: bool
    entries: int


def selected(names: Sequence[str]) -> list[ModelLookup]:
    """Return the declared lookups that ``names`` lists. If ``names`` is empty, return all of them.

    :raises LookupRefused: there is no such lookup, or its model cannot have it.
    """
    lookups = lookups_by_name()
    for name in names or lookups:
        if name not in lookups:
            raise LookupRefused(
                f"No model declares the lookup {name!r}. There are {sorted(lookups)!r}."
            )
        if (problem := lookups[name].problem) is not None:
            raise LookupRefused(f"The lookup {name!r} {problem}. 'manage.py check' has the remedy.")
    return [lookups[name] for name in names or sorted(lookups)]


def statuses() -> list[LookupStatus]:
    """Return a :class:`LookupStatus` for each declared lookup.

    Costs one query for each table with entries of a lookup, and one more for each lookup on which
    this process does not know that queries can rely.

    :raises LookupRefused: a model cannot have one of its lookups.
    """
    return [
        LookupStatus(
            lookup.name, lookup.unique, states.is_served(lookup), entries.count_of(lookup.name)
        )
        for lookup in selected(())
    ]


def build(lookup: ModelLookup) -> LookupDifferences:
    """Write an entry for each existing row, and then let queries use the lookup.

    First deploy the declaration of the lookup to every process that writes the model, because a
    process without the declaration writes rows without entries. If the entry of any row cannot be
    written, queries still do not use the lookup. Reads each row once.

    :raises LookupRefused: a column treats different texts as equal, or queries rely on entries of
        this lookup in a table that is not the declared table.
    """
    states.refuse_other_table([lookup])
    refuse_inexact(lookup)
    differences = LookupDifferences(lookup.name)
    _compare_rows(lookup, differences, repair=True)
    if differences.is_clean:
        states.serve(lookup)
    return differences


def check(lookup: ModelLookup, *, repair: bool = False) -> LookupDifferences:
    """Compare all rows with the entries, and all entries with the rows.

    Reads each row and each entry once or twice.

    :param repair: whether to write missing entries and to remove superfluous ones.
    """
    refuse_inexact(lookup)
    differences = LookupDifferences(lookup.name)
    _compare_rows(lookup, differences, repair=repair)
    _compare_entries(lookup, differences, repair=repair)
    return differences


def drop(name: str) -> int:
    """Remove the entries of a lookup that no process uses any more, and return their number.

    The entries are in the table that the lookup had when queries used it last. Its declaration may
    name a different table now. The call may be repeated after an error.
    """
    table = states.withdraw(name)
    tables = entries.tables_of(name) if table is None else entries.tables_of_model(table)
    removed = entries.remove_lookup(name, tables)
    states.forget(name)
    return removed


def refuse_inexact(lookup: ModelLookup) -> None:
    """Raise an error if a text column of the lookup treats different texts as equal on some shard.

    Costs one query per shard, or none if the column has numbers or UUIDs, or if the database cannot
    report collations.
    """
    if not isinstance(target_field(lookup.field), CharField):
        return
    table, column = lookup.model._meta.db_table, lookup.field.column
    collation = None
    for shard in _shards(lookup):
        connection: Any = connections[shard.alias]
        features = features_of(connection)
        if not features.can_introspect_collations:
            collation = declared_inexact(lookup, features.collations)
        else:
            types = connection.column_types([shard], [table], [column])
            stored = types.get(shard.alias, {}).get(table.lower(), {}).get(column.lower())
            if stored is not None and not stored.is_exact:
                collation = str(stored.collation)
        if collation is not None:
            raise LookupRefused(
                f"The lookup {lookup.name!r} compares text exactly, and the column {table}.{column} on"
                f" shard {shard.alias!r} has the collation {collation!r}, which does not. Declare the"
                " field as an ExactCharField, then run makemigrations and migrate_shards."
            )


def _shards(lookup: ModelLookup) -> Iterator[Any]:
    group = runtime.group(lookup.options.group)
    for number in range(group.count):
        yield runtime.shard_in(group, number)


def _pages(lookup: ModelLookup, alias: str | None, **conditions: Any) -> Iterator[list[Any]]:
    """Yield the rows whose field is not NULL, in batches of (primary key, shard key, value)."""
    after: dict[str, Any] = {}
    while rows := list(_rows_of(lookup, alias, **conditions, **after).order_by("pk")[:BATCH]):
        after = {"pk__gt": rows[-1][0]}
        yield rows


def _rows_of(lookup: ModelLookup, alias: str | None, **conditions: Any) -> Any:
    """Return a queryset of (primary key, shard key, value) of the rows whose value is not NULL.

    :param alias: the alias of the shard to read. If it is None, ``conditions`` must contain the
        shard key, which decides on the shard.
    """
    rows: Any = ShardedQuerySet(lookup.model, using=alias).uncached()
    value = lookup.field.attname
    return rows.filter(**{f"{value}__isnull": False}, **conditions).values_list(
        "pk", lookup.key.attname, value
    )


def _compare_rows(lookup: ModelLookup, differences: LookupDifferences, *, repair: bool) -> None:
    with unbound(), request_cache.uncached():
        before = _moves_of(lookup, None)
        for shard in _shards(lookup):
            for rows in _pages(lookup, shard.alias):
                rows = _rows_at_home(lookup, shard.number, rows)
                differences.rows += len(rows)
                _compare_batch(lookup, rows, differences, shard.alias, repair=repair)
        if before is not None:
            _compare_moved_rows(lookup, differences, before, repair=repair)


def _moves_of(lookup: ModelLookup, since: int | None) -> MoveList | None:
    """Return the moves of shard keys from one shard to another, during which rows may be missed.

    The list has the moves that are running, and those that have ended after the move with the
    number ``since``. Return None if the keys of the group can never move.
    """
    strategy = runtime.strategy(lookup.options.group)
    if not isinstance(strategy, DirectoryStrategy) or not strategy.moves_keys:
        return None
    return strategy.store.moves(since)


def _compare_moved_rows(
    lookup: ModelLookup, differences: LookupDifferences, before: MoveList, *, repair: bool
) -> None:
    """Compare rows and entries of the shard keys that have moved since ``before`` was read.

    The comparison reads one shard after the other. Meanwhile, a key may move from a shard that was
    not read yet to one that was read already. The comparison misses the rows of such a key, so this
    function compares them afterwards.
    """
    group, done = lookup.options.group, set[Any]()
    moves: MoveList | None = before
    while moves is not None:
        now = [move for move in (*moves.in_flight, *moves.ended) if move.group == group]
        for key in set(RowsOfKeys(group, now).values(lookup.key)) - done:
            for rows in _pages(lookup, None, **{lookup.key.attname: key}):
                _compare_batch(lookup, rows, differences, None, repair=repair)
            done.add(key)
        later = _moves_of(lookup, moves.last)
        moves = later if later is not None and later.last > moves.last else None


def _rows_at_home(
    lookup: ModelLookup, number: int, rows: Sequence[Sequence[Any]]
) -> list[Sequence[Any]]:
    """Return those of ``rows`` whose shard key is assigned to the shard ``number``.

    The other rows are old copies, which stay on a shard for a while after their key has moved away.
    """
    prepared = [lookup.key.get_prep_value(row[1]) for row in rows]
    numbers = runtime.strategy(lookup.options.group).locate_many(prepared)
    return [row for row, key in zip(rows, prepared, strict=True) if numbers.get(key) == number]


def _expected(lookup: ModelLookup, row: Sequence[Any]) -> tuple[Place, str]:
    pk, key, value = row
    key_text = lookup.key_text(lookup.key.get_prep_value(key))
    pk = lookup.model._meta.pk.get_prep_value(pk)
    text = lookup.text(lookup.field.get_prep_value(value))
    return Place(lookup.name, text, lookup.slot(pk, key_text)), key_text


def _compare_batch(
    lookup: ModelLookup,
    rows: Iterable[Sequence[Any]],
    differences: LookupDifferences,
    alias: str | None,
    *,
    repair: bool,
) -> None:
    expected = [(row, *_expected(lookup, row)) for row in rows]
    values = list(dict.fromkeys(place.value for _, place, _ in expected))
    stored = {entry.place: entry for entry in entries.of_values(lookup.name, values)}
    first: dict[Place, Any] = {}
    for row, place, key in expected:
        entry = stored.get(place)
        what = f"{lookup.field.name}={place.value!r} of the row pk={row[0]!r}, key {key!r}"
        if lookup.unique and (place in first or _is_of_other_row(lookup, row, entry, key)):
            # If the row has lost the value since it was read, it is no duplicate.
            if not _still_has(lookup, alias, row):
                continue
            differences.duplicates += 1
            differences.example(f"{what}: another row has the same value")
            continue
        first[place] = row
        own = entry if entry is not None and entry.key == key else None
        # Skip an entry that is correct, unless its transaction may still be open. A rollback of
        # this transaction would remove the entry, although the row needs it. So write such an entry
        # again.
        if own is not None and not (repair and own.is_open):
            continue
        if not _still_has(lookup, alias, row):
            continue
        is_written = repair and _write(lookup, place, key, entry)
        if own is not None and is_written:
            continue
        differences.missing += 1
        differences.repaired += is_written
        pending = (
            ", and an open transaction writes one. Try again" if repair and not is_written else ""
        )
        differences.example(f"{what} has no entry{pending}")


def _is_of_other_row(lookup: ModelLookup, row: Any, entry: StoredEntry | None, key: str) -> bool:
    if entry is None:
        return False
    if entry.key != key:
        return has_row(lookup, entry)
    return any(other[0] != row[0] for other in _rows_at(lookup, entry))


def _rows_at(lookup: ModelLookup, entry: StoredEntry) -> list[Any]:
    """Return the rows that have the value and the shard key of ``entry``.

    One query, or none if no shard has the key.
    """
    key = lookup.key_of_text(entry.key)
    shard = runtime.locate(lookup.options.group, key)
    if shard is None:
        return []
    value = lookup.field.to_python(entry.place.value)
    conditions = {lookup.key.attname: key, lookup.field.attname: value}
    return list(_rows_of(lookup, shard.alias, **conditions))


def _still_has(lookup: ModelLookup, alias: str | None, row: Sequence[Any]) -> bool:
    """Whether the row still has the value that was read before."""
    conditions = {"pk": row[0], lookup.key.attname: row[1], lookup.field.attname: row[2]}
    return bool(_rows_of(lookup, alias, **conditions).exists())


def _write(lookup: ModelLookup, place: Place, key: str, entry: StoredEntry | None) -> bool:
    """Write the entry of a committed row, with a new token.

    An open transaction that has written the entry before removes it only by the old token. So it
    cannot remove the new entry.

    :param place: the columns that identify the entry.
    :param entry: the entry as it was read; None if there was none.
    :returns: whether the entry is stored. False, for example, if another row or an open transaction
        has the value.
    """
    for _ in range(ATTEMPTS):
        if entry is None:
            if not entries.add([place], [key], uuid4().hex, "", is_open=False):
                return True
        elif entry.key == key and not entry.is_open:
            return True
        elif entry.key != key and (
            not is_transaction_over(lookup, entry) or has_row(lookup, entry)
        ):
            return False
        elif entries.take(place, key, uuid4().hex, "", entry, is_open=False):
            return True
        entry = entries.entry_at(place)
    return False


def _compare_entries(lookup: ModelLookup, differences: LookupDifferences, *, repair: bool) -> None:
    with unbound(), request_cache.uncached():
        for table in entries.tables_of(lookup.name):
            _compare_entries_in(table, lookup, differences, repair=repair)


def _compare_entries_in(
    table: EntryTable, lookup: ModelLookup, differences: LookupDifferences, *, repair: bool
) -> None:
    last = 0
    while batch := list(entries.after(table, lookup.name, last, BATCH)):
        last = batch[-1][0]
        differences.entries += len(batch)
        for entry in _without_row(lookup, [entry for _, entry in batch]):
            if not is_transaction_over(lookup, entry):
                continue
            # Look for the row again, because the entry's transaction may have committed it after
            # the first query. That transaction has ended now, so it cannot commit the row after
            # this second query.
            if not has_row(lookup, entry):
                differences.surplus += 1
                differences.example(
                    f"{lookup.field.name}={entry.place.value!r} for the key {entry.key!r}: no row"
                    " has this value"
                )
                if repair:
                    differences.repaired += entries.remove_entry(entry)


def _without_row(lookup: ModelLookup, batch: Sequence[StoredEntry]) -> Iterator[StoredEntry]:
    """Return the entries of the batch that have no row. One query for each shard of their keys."""
    keys = {entry.key: lookup.key_of_text(entry.key) for entry in batch}
    by_alias: dict[str, list[StoredEntry]] = {}
    for entry in batch:
        shard = runtime.locate(lookup.options.group, keys[entry.key])
        if shard is None:
            yield entry
        else:
            by_alias.setdefault(shard.alias, []).append(entry)
    for alias, some in by_alias.items():
        conditions = {
            f"{lookup.key.attname}__in": list({keys[entry.key] for entry in some}),
            f"{lookup.field.attname}__in": list(
                {lookup.field.to_python(entry.place.value) for entry in some}
            ),
        }
        present = {_expected(lookup, row) for row in _rows_of(lookup, alias, **conditions)}
        yield from (entry for entry in some if (entry.place, entry.key) not in present)
