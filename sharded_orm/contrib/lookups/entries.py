"""Reads and writes entries: the rows of a lookup, each with a value and a shard key.

For example, the entry ``(email "a@example.org", key 7)`` says that the row with this address is on
the shard of the key 7.

Each statement on entries is committed at once, on a separate connection. So it stays even if the
caller's transaction is rolled back, and a read sees the entries that others have just committed.
Inside Django's ``TestCase``, the statements are a part of the test's transaction.

The entries of a lookup are in one table of the global database, or in a table of the project on the
shards of a group. In the second case, the value of an entry determines the entry's shard.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

from django.db import DEFAULT_DB_ALIAS, connections

from sharded_orm import runtime
from sharded_orm.autonomous_connections import AutonomousConnections, is_in_test_case
from sharded_orm.backends.features import features_of
from sharded_orm.backends.write_hooks.session_id import SessionID
from sharded_orm.contrib.lookups.declaration import lookups_by_name, table_options
from sharded_orm.contrib.lookups.entry_statements import EntryStatements
from sharded_orm.contrib.lookups.exceptions import LookupRefused
from sharded_orm.contrib.lookups.models import LookupEntry

#: One statement writes at most ``BATCH`` entries, and one query looks for at most ``MAX_VALUES``
#: values. The limits are low because old versions of SQLite accept only 999 parameters.
BATCH, MAX_VALUES = 100, 500
#: If a value has fewer entries than this, Python removes repeated shard keys from the result. The
#: query then needs no DISTINCT, which would take a fifth of its time.
FEW_ENTRIES = 20
_connections = AutonomousConnections()
R = TypeVar("R")


class EntryTable(NamedTuple):
    """A table in one database that holds entries of lookups.

    :param alias: the alias of the database.
    :param name: the name of the table.
    :param group: the shard group of the database; "" for the global database.
    """

    alias: str
    name: str
    group: str = ""


#: The table of all lookups that declare no table of their own.
GLOBAL_TABLE: Final = EntryTable(DEFAULT_DB_ALIAS, LookupEntry._meta.db_table)


class Place(NamedTuple):
    """The columns that identify an entry: the name of its lookup, its value, and its slot.

    The slot tells apart the entries of several rows with the same value. See
    :class:`.tables.EntryColumns`.
    """

    lookup: str
    value: str
    slot: str


class StoredEntry(NamedTuple):
    """An entry of a lookup (a value and the shard key of its row), as it was when it was read."""

    place: Place
    key: str
    token: str
    is_open: bool
    writer: str
    written_at: float


def writer_text(session: Any) -> str:
    """Return the text that is stored in an entry to name the database session that has written it.

    With the text, others can ask the database whether the session still exists.

    The text is empty if the database, such as SQLite, does not number its sessions.
    """
    server, account, number = session
    return f"{server} {account} {number}" if number else ""


def writer_session(text: str) -> SessionID:
    """Return the database session that ``text`` names. The reverse of :func:`writer_text`."""
    if not text:
        return SessionID()
    server, account, number = text.split(" ")
    return SessionID(server, account, int(number))


def table_of(lookup: str, value: str) -> EntryTable:
    """Return the table in which a lookup has the entries of ``value``.

    :param lookup: the name of the lookup.
    """
    declared = lookups_by_name().get(lookup)
    options = None if declared is None else declared.table
    if options is None:
        return GLOBAL_TABLE
    shard = runtime.locate(options.group, value)
    assert shard is not None  # The strategy computes it.
    return EntryTable(shard.alias, options.model._meta.db_table, options.group)


def tables_of(lookup: str) -> list[EntryTable]:
    """Return all tables that have entries of the lookup with this name."""
    declared = lookups_by_name().get(lookup)
    return tables_of_model("" if declared is None else declared.table_name or "")


def tables_of_model(model: str) -> list[EntryTable]:
    """Return the tables of a model that stores entries of lookups, one per shard.

    Returns an empty list if no such model is installed any more.

    :param model: the label of the model; "" for the table of the global database.
    """
    if not model:
        return [GLOBAL_TABLE]
    options = table_options(model)
    if options is None:
        return []
    name, group = options.model._meta.db_table, runtime.group(options.group)
    return [
        EntryTable(runtime.shard_in(group, number).alias, name, options.group)
        for number in range(group.count)
    ]


def is_committed_at_once() -> bool:
    """Whether each statement on entries is committed at once, on a separate connection.

    False inside Django's ``TestCase``, where it is a part of the test's transaction. Sends no
    query.
    """
    return not is_in_test_case(DEFAULT_DB_ALIAS)


def refuse_own_lock(table: EntryTable) -> None:
    """Raise an error if a write of entries would wait forever for this thread's own transaction.

    An SQLite file has one writer at a time. If this thread has a transaction open on the file with
    the entries, a write on another connection waits for the end of the transaction, and the thread
    waits for the write. Sends no query.

    :raises LookupRefused: this thread has a transaction open on such a database.
    """
    if blocking_transaction(table.alias) is not None:
        raise LookupRefused(
            f"This thread has a transaction open on {table.alias!r}, which has one writer at a time, and"
            " entries of lookups are committed there by another connection. It would wait for the"
            " transaction for ever. End the transaction before, or give the lookup a table in"
            " another file: Lookup(…, table=…)."
        )


def blocking_transaction(alias: str) -> Any:
    """Return this thread's connection if it has an open transaction that may block all other
    writers.

    This can only happen on a database with one writer at a time, such as SQLite. Return None for
    other databases, or if no transaction is open.

    The connection is also returned if its transaction has not written yet, although it then holds
    no lock. So the same code of a program always fails, and not only if the program happens to have
    written before.
    """
    if not _has_one_writer(alias) or is_in_test_case(alias):
        return None
    connection: Any = connections[alias]
    if connection.in_atomic_block:
        return connection
    # Without a connection to the database, there is no transaction. Do not call get_autocommit()
    # then, because it would connect.
    is_connected = connection.connection is not None
    return connection if is_connected and not connection.get_autocommit() else None


@cache
def _has_one_writer(alias: str) -> bool:
    return features_of(connections[alias]).has_one_writer


def add(
    places: Sequence[Place], keys: Sequence[str], token: str, writer: str, *, is_open: bool = True
) -> list[int]:
    """Insert entries for the rows that one statement writes. Existing entries stay as they are.

    Costs one statement per table and :data:`BATCH` entries, and one more query if some of the
    entries exist already.

    :param places: the columns that identify each entry.
    :param keys: the shard key that each entry stores, in the order of ``places``.
    :param token: the random name of the statement that writes the rows.
    :param writer: the text for the database session of this statement.
    :param is_open: whether the transaction of this statement may still be open.
    :returns: the positions in ``places`` of the entries that exist already.
    """
    taken: list[int] = []
    now = time.time()
    positions: defaultdict[EntryTable, list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        positions[table_of(place.lookup, place.value)].append(number)
    for table, of_table in positions.items():
        for numbers in _batches(of_table, BATCH):
            rows = [(*places[n], keys[n], token, is_open, writer, now) for n in numbers]
            params = [value for row in rows for value in row]
            if _run(table, _statements(table).insert(len(rows)), params) != len(rows):
                own = {entry.place for entry in of_tokens(table, [token])}
                taken += [n for n in numbers if places[n] not in own]
    return sorted(taken)


def take(
    place: Place,
    key: str,
    token: str,
    writer: str,
    former: StoredEntry | None = None,
    *,
    is_open: bool = True,
) -> bool:
    """Take over an existing entry for a row that a statement writes. Return whether this was done.

    For example, the entry is left over from a row that was deleted, and now a new row has its
    value. The entry gets a new shard key, token and writer.

    :param key: the shard key of the new row.
    :param token: the random name of the statement that writes the row.
    :param writer: the text for the database session of this statement.
    :param former: the entry as it was read. If it has changed since, it is not taken over. With
        None (the default), it is taken over in any case.
    :param is_open: whether the transaction of the statement may still be open.
    """
    table = table_of(place.lookup, place.value)
    params = [key, token, is_open, writer, time.time(), *place]
    if former is not None:
        params += [former.token, former.written_at]
    return bool(_run(table, _statements(table).take(former is not None), params))


def mark(places: Iterable[Place], token: str, writer: str) -> None:
    """Mark the entries of values that rows lose by an UPDATE or DELETE.

    The entries get the ``token`` of the statement, by which they are found and removed after the
    commit. Until then they stay, because the transaction may be rolled back.
    """
    now = time.time()
    groups: defaultdict[tuple[EntryTable, str], list[Place]] = defaultdict(list)
    for place in places:
        groups[table_of(place.lookup, place.value), place.lookup].append(place)
    for (table, lookup), of_table in groups.items():
        for some in _batches(of_table, BATCH):
            values = [value for place in some for value in (place.value, place.slot)]
            params = (token, True, writer, now, lookup, *values)
            _run(table, _statements(table).mark(len(some)), params)


def remove(table: EntryTable, tokens: Sequence[str]) -> None:
    """Remove the entries that were last written by one of several statements.

    Costs one SQL statement per :data:`BATCH` tokens.

    :param tokens: the tokens of the statements. Each entry holds the token of the statement that
        has written it.
    """
    for some in _batches(tokens, BATCH):
        _run(table, _statements(table).remove(len(some)), some)


def remove_places(table: EntryTable, places: Sequence[Place], token: str) -> None:
    """Remove the entries at ``places``, except those that another statement has written since.

    Costs one statement per lookup and :data:`BATCH` entries.

    :param places: the columns that identify each entry.
    :param token: the name of the statement that wrote the entries last. Entries that have another
        token now are not removed.
    """
    by_lookup: defaultdict[str, list[str]] = defaultdict(list)
    for place in places:
        by_lookup[place.lookup] += (place.value, place.slot)
    for lookup, values in by_lookup.items():
        for some in _batches(values, 2 * BATCH):
            _run(table, _statements(table).remove_places(len(some) // 2), (token, lookup, *some))


def close(table: EntryTable, tokens: Sequence[str]) -> None:
    """Record that the transactions of some statements have ended, in the entries that these
    statements have written.

    :param tokens: the tokens of the statements. Each entry holds the token of the statement that
        has written it.
    """
    for some in _batches(tokens, BATCH):
        _run(table, _statements(table).close(len(some)), (False, *some))


def entry_at(place: Place) -> StoredEntry | None:
    table = table_of(place.lookup, place.value)
    return next(_read(table, _statements(table).at_place(), place), None)


def of_tokens(table: EntryTable, tokens: Sequence[str]) -> Iterator[StoredEntry]:
    """Yield the entries that were last written by one of several statements.

    :param tokens: the tokens of the statements. Each entry holds the token of the statement that
        has written it.
    """
    for some in _batches(tokens, BATCH):
        yield from _read(table, _statements(table).of_tokens(len(some)), some)


def renew(table: EntryTable, tokens: Sequence[str]) -> None:
    """Set the time of the entries of some statements to now, because their transactions still run.

    Without this, other transactions could take over the entries after some minutes, on a database
    that cannot report whether a transaction still runs.

    :param tokens: the tokens of the statements. Each entry holds the token of the statement that
        has written it.
    """
    for some in _batches(tokens, BATCH):
        _run(table, _statements(table).renew(len(some)), (time.time(), *some))


def of_values(lookup: str, values: Sequence[str]) -> Iterator[StoredEntry]:
    """Yield the entries of ``lookup`` that have one of ``values``."""
    by_table: defaultdict[EntryTable, list[str]] = defaultdict(list)
    for value in values:
        by_table[table_of(lookup, value)].append(value)
    for table, of_table in by_table.items():
        for some in _batches(of_table, MAX_VALUES):
            yield from _read(table, _statements(table).of_values(len(some)), (lookup, *some))


def keys_of_values(lookup: str, values: Sequence[str]) -> list[str] | None:
    """Return the distinct shard keys that a lookup has for ``values``.

    Costs one query, or two for one value with many entries.

    :param values: at most :data:`MAX_VALUES`.
    :returns: the keys as texts; None if the entries of these values are in several tables.
    """
    if not values:
        return []
    table, *others = {table_of(lookup, value) for value in values}
    if others:
        return None
    statements, params = _statements(table), (lookup, *values)
    if len(values) == 1:
        rows = _rows(table, statements.some_keys_of_value(FEW_ENTRIES), params)
        if len(rows) < FEW_ENTRIES:
            return list(dict.fromkeys(row[0] for row in rows))
    rows = _rows(table, statements.keys_of_values(len(values)), params)
    return [row[0] for row in rows]


def after(
    table: EntryTable, lookup: str, last: int, limit: int
) -> Iterator[tuple[int, StoredEntry]]:
    """Yield the next entries of a lookup in one table, as pairs (id of the row, entry).

    :param last: the id at which the previous call has ended; 0 at first.
    :param limit: the largest number of pairs.
    """
    for number, *row in _rows(table, _statements(table).after(limit), (lookup, last)):
        yield int(number), _entry(row)


def count_of(lookup: str) -> int:
    """Return the number of entries of a lookup. One query per table."""
    return sum(
        int(_rows(table, _statements(table).count(), (lookup,))[0][0])
        for table in tables_of(lookup)
    )


def remove_entry(entry: StoredEntry) -> bool:
    """Remove an entry, unless another process has changed it since it was read.

    Return whether the entry was removed.
    """
    table = table_of(entry.place.lookup, entry.place.value)
    params = (*entry.place, entry.token, entry.written_at)
    return bool(_run(table, _statements(table).remove_entry(), params))


def remove_lookup(lookup: str, tables: Iterable[EntryTable]) -> int:
    """Remove all entries of a lookup from ``tables``, and return their number. One statement per table."""
    return sum(_run(table, _statements(table).remove_lookup(), (lookup,)) for table in tables)


def outside_transactions(run: Callable[[], R]) -> R:
    """Return the result of ``run``, which is called in a separate thread. There it uses other
    connections, outside of this thread's transactions.
    """
    results: list[R] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(run())
        except BaseException as exc:
            errors.append(exc)
        finally:
            connections.close_all()

    thread = threading.Thread(target=call, name="sharded_orm lookups")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _entry(row: Sequence[Any]) -> StoredEntry:
    lookup, value, slot, key, token, is_open, writer, written_at = row
    place = Place(lookup, value, slot)
    return StoredEntry(place, key, token, bool(is_open), writer, float(written_at))


def _read(table: EntryTable, sql: str, params: Sequence[Any]) -> Iterator[StoredEntry]:
    return map(_entry, _rows(table, sql, params))


def _rows(table: EntryTable, sql: str, params: Sequence[Any]) -> Sequence[Any]:
    def read(cursor: Any) -> Sequence[Any]:
        cursor.execute(sql, params)
        rows: Sequence[Any] = cursor.fetchall()
        return rows

    own = blocking_transaction(table.alias)
    if own is not None and own.transaction_mode == "EXCLUSIVE":
        # In SQLite's mode EXCLUSIVE, no other connection can read while this thread's transaction
        # is open. So send the query in that transaction. It reads committed rows, because nobody
        # else can have written since it began.
        with own.cursor() as cursor:
            return read(cursor)
    return _with_cursor(table, read)


def _run(table: EntryTable, sql: str, params: Sequence[Any]) -> int:
    refuse_own_lock(table)

    def run(cursor: Any) -> int:
        cursor.execute(sql, params)
        return int(cursor.rowcount)

    return _with_cursor(table, run)


def _with_cursor(table: EntryTable, use: Callable[[Any], R]) -> R:
    if not table.group:
        with _connections.get(table.alias).connection.cursor() as cursor:
            return use(cursor)

    def use_shard() -> R:
        with connections[table.alias].cursor() as cursor:
            return use(cursor)

    group: Any = connections[table.group]
    if group.is_in_transaction() and is_committed_at_once():
        return outside_transactions(use_shard)
    return use_shard()


@cache
def _statements(table: EntryTable) -> EntryStatements:
    return EntryStatements.of(connections[table.alias].ops, table.name)
