"""Reads and writes the entries of lookups. Each statement is committed at once.

The statements are autonomous: a rollback of the caller's transaction does not undo them, and its
snapshot does not hide entries of others. Inside Django's ``TestCase`` they are a part of the test's
transaction.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from django.db import DEFAULT_DB_ALIAS, connections

from sharded_orm.autonomous_connections import AutonomousConnections
from sharded_orm.backends.write_hooks.session_id import SessionID
from sharded_orm.contrib.lookups.entry_statements import EntryStatements

#: The largest number of entries that one statement writes, and of values that one reads. Old SQLite takes
#: 999 parameters.
BATCH, MAX_VALUES = 100, 500
_connections = AutonomousConnections()


class Place(NamedTuple):
    """What identifies an entry; see :class:`~sharded_orm.contrib.lookups.models.LookupEntry`."""

    lookup: str
    value: str
    slot: str


class StoredEntry(NamedTuple):
    """An entry as it was read."""

    place: Place
    key: str
    token: str
    is_open: bool
    writer: str
    written_at: float


def writer_text(session: Any) -> str:
    """Return the identity of a database session as entries store it; "" if it has none."""
    server, account, number = session
    return f"{server} {account} {number}" if number else ""


def writer_session(text: str) -> SessionID:
    """Return the session of :func:`writer_text`."""
    if not text:
        return SessionID()
    server, account, number = text.split(" ")
    return SessionID(server, account, int(number))


def is_committed_at_once() -> bool:
    """Whether statements are committed at once. False inside Django's ``TestCase``."""
    return _connections.get(DEFAULT_DB_ALIAS).commits


def add(
    places: Sequence[Place], keys: Sequence[str], token: str, writer: str, *, is_open: bool = True
) -> list[int]:
    """Store entries that do not exist yet. One statement per :data:`BATCH` entries.

    :returns: the positions of those entries that exist already, which are left as they are. Costs one
        query more if there are any.
    """
    taken: list[int] = []
    now = time.time()
    for numbers in _batches(range(len(places)), BATCH):
        rows = [(*places[n], keys[n], token, is_open, writer, now) for n in numbers]
        params = [value for row in rows for value in row]
        stored = _run(_statements().insert(len(rows)), params)
        if stored != len(rows):
            own = {entry.place for entry in of_tokens([token])}
            taken += [n for n in numbers if places[n] not in own]
    return taken


def take(
    place: Place,
    key: str,
    token: str,
    writer: str,
    former: StoredEntry | None = None,
    *,
    is_open: bool = True,
) -> bool:
    """Make an existing entry one of the change ``token``, and return whether it was there.

    :param former: the entry as it was read, which must be unchanged; None for any.
    """
    params = [key, token, is_open, writer, time.time(), *place]
    if former is not None:
        params += [former.token, former.written_at]
    return bool(_run(_statements().take(former is not None), params))


def mark(places: Iterable[Place], token: str, writer: str) -> None:
    """Make existing entries those of the change ``token``, whose transaction may remove them."""
    now = time.time()
    by_lookup: dict[str, list[Place]] = {}
    for place in places:
        by_lookup.setdefault(place.lookup, []).append(place)
    for lookup, of_lookup in by_lookup.items():
        for some in _batches(of_lookup, BATCH):
            values = [value for place in some for value in (place.value, place.slot)]
            _run(_statements().mark(len(some)), (token, True, writer, now, lookup, *values))


def remove(tokens: Sequence[str]) -> None:
    """Remove the entries of changes. One statement per :data:`BATCH` changes."""
    for some in _batches(tokens, BATCH):
        _run(_statements().remove(len(some)), some)


def close(tokens: Sequence[str]) -> None:
    """Note that the transactions of these changes have ended, and leave their entries."""
    for some in _batches(tokens, BATCH):
        _run(_statements().close(len(some)), (False, *some))


def entry_at(place: Place) -> StoredEntry | None:
    return next(_read(_statements().at_place(), place), None)


def of_tokens(tokens: Sequence[str]) -> Iterator[StoredEntry]:
    """Return the entries that changes have written last."""
    for some in _batches(tokens, BATCH):
        yield from _read(_statements().of_tokens(len(some)), some)


def renew(tokens: Sequence[str]) -> None:
    """Note that the transactions of these changes are still open."""
    for some in _batches(tokens, BATCH):
        _run(_statements().renew(len(some)), (time.time(), *some))


def of_values(lookup: str, values: Sequence[str]) -> Iterator[StoredEntry]:
    """Return the entries of a lookup with one of ``values``."""
    for some in _batches(values, MAX_VALUES):
        yield from _read(_statements().of_values(len(some)), (lookup, *some))


def keys_of_values(lookup: str, values: Sequence[str]) -> list[str]:
    """Return the shard keys of the entries with one of ``values``, each once.

    :param values: at most :data:`MAX_VALUES`.
    """
    if not values:
        return []
    rows = _rows(_statements().keys_of_values(len(values)), (lookup, *values))
    return [row[0] for row in rows]


def after(lookup: str, last: int, limit: int) -> Iterator[tuple[int, StoredEntry]]:
    """Return the next entries of a lookup with their ids, in the order of the ids.

    :param last: the id of the last entry that was read; 0 at first.
    """
    for number, *row in _rows(_statements().after(limit), (lookup, last)):
        yield int(number), _entry(row)


def count_of(lookup: str) -> int:
    return int(_rows(_statements().count(), (lookup,))[0][0])


def remove_entry(entry: StoredEntry) -> bool:
    """Remove an entry if it is unchanged, and return whether it was."""
    return bool(_run(_statements().remove_entry(), (*entry.place, entry.token, entry.written_at)))


def remove_lookup(lookup: str) -> int:
    """Remove all entries of a lookup, and return their number."""
    return _run(_statements().remove_lookup(), (lookup,))


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _entry(row: Sequence[Any]) -> StoredEntry:
    lookup, value, slot, key, token, is_open, writer, written_at = row
    place = Place(lookup, value, slot)
    return StoredEntry(place, key, token, bool(is_open), writer, float(written_at))


def _read(sql: str, params: Sequence[Any]) -> Iterator[StoredEntry]:
    return map(_entry, _rows(sql, params))


def _rows(sql: str, params: Sequence[Any]) -> Sequence[Any]:
    with _connection().cursor() as cursor:
        cursor.execute(sql, params)
        rows: Sequence[Any] = cursor.fetchall()
        return rows


def _run(sql: str, params: Sequence[Any]) -> int:
    with _connection().cursor() as cursor:
        cursor.execute(sql, params)
        return int(cursor.rowcount)


def _connection() -> Any:
    return _connections.get(DEFAULT_DB_ALIAS).connection


def _statements() -> EntryStatements:
    return EntryStatements.of(connections[DEFAULT_DB_ALIAS].ops)
