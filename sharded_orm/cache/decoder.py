"""Decodes cache entries into rows and lists.

An entry that cannot be used is treated as missing. If the entry is broken, it is also counted in
the statistics.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol, cast

from sharded_orm.cache import values
from sharded_orm.cache.process_cache import Listed
from sharded_orm.cache.requests import CacheRequest, ListRequest, ObjectRequest
from sharded_orm.cache.stores.base import FoundEntry
from sharded_orm.cache.values import Row, Unusable

_TOKENS = re.compile(r"(?:[0-9A-Za-z_.%~]{1,64}(?:,|\Z))*")


class Counters(Protocol):
    def add(self, type_name: str, **deltas: int) -> None: ...


def listed_rows(request: ListRequest, revision: str, pks: Iterable[str]) -> Listed:
    """Return the :class:`Listed` of a list of rows. In this form, the process remembers the list.

    :param revision: the digest of the list's guards at the time when the list was stored.
    :param pks: tokens of the rows' primary keys (their form in names of entries), in the order of
        the list.
    """
    pks = tuple(pks)
    return Listed(revision, pks, tuple(map(request.scope.object_name, pks)), None)


class EntryDecoder:
    """Decodes cache entries into rows and lists. Thread-safe.

    :param counters: the statistics that count broken entries.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def row(
        self,
        request: ObjectRequest,
        entry: FoundEntry,
        stamp: str,
        guards: tuple[bytes, ...],
    ) -> Row | None:
        """Return the row of a cached object; None if the object cannot be used. See :meth:`rows`.

        :param guards: the bytes of the object's guards. The process remembers them with the row. If
            a later read finds the same guards and the same entry, it uses the row without decoding
            the entry. Pass an empty tuple if a guard says that a write is under way, because the
            guards must not be remembered then.
        """
        if entry.value is None:
            request.fillable[request.name] = entry
            return None
        rows = self.rows(request, (request.name,), (entry,), stamp)
        if rows is None:
            return None
        if guards:
            request.format.decoded.note(request.name, entry.value, stamp, rows[0], guards)
        return rows[0]

    def rows(
        self,
        request: CacheRequest,
        names: Sequence[str],
        entries: Sequence[FoundEntry],
        stamp: str,
    ) -> list[Row] | None:
        """Return the rows of the cached objects ``names``; None if at least one of them cannot be
        used.

        If None is returned, ``request.fillable`` says which objects the caller may store. It maps
        the name of each unusable object to the entry that was found, and the name of each valid
        object to None.

        :param entries: the entries that were read under ``names``, in the same order.
        :param stamp: the text that a valid object contains. It is made from the guards, and changes
            when a write makes the object void.
        """
        format = request.format
        decoded = format.decoded
        known = decoded.known
        rows: list[Row | None] = []
        unread = []
        for index, (name, entry) in enumerate(zip(names, entries, strict=True)):
            seen = known.get(name)
            if seen is not None and seen.value == entry.value and seen.stamp == stamp:
                rows.append(seen.row)
            else:
                rows.append(None)
                unread.append(index)
        if not unread:
            return cast("list[Row]", rows)
        new_entries = [entries[index] for index in unread]
        new_names = [names[index] for index in unread]
        unpacked = self._unpacked(request, new_names, new_entries, stamp)
        if unpacked is None:
            request.fillable |= {name: None for name in names if name not in request.fillable}
            return None
        new_rows = format.values(unpacked)
        for index, entry, name, row in zip(unread, new_entries, new_names, new_rows, strict=True):
            rows[index] = row
            if entry.value is not None:
                decoded.note(name, entry.value, stamp, row)
        return cast("list[Row]", rows)

    def _unpacked(
        self,
        request: CacheRequest,
        names: Sequence[str],
        entries: Sequence[FoundEntry],
        stamp: str,
    ) -> list[Row] | None:
        format = request.format
        rows = values.unpack_objects(
            [entry.value for entry in entries], names, format.fingerprint, stamp, format.width
        )
        if Unusable.MISS not in rows and Unusable.BROKEN not in rows:
            return cast("list[Row]", rows)
        for name, entry, row in zip(names, entries, rows, strict=True):
            request.fillable[name] = entry if isinstance(row, Unusable) else None
            if row is Unusable.BROKEN:
                self._count_broken(request)
        return None

    def listed(
        self, request: ListRequest, name: str, entry: bytes | None, revision: str
    ) -> Listed | None:
        """Return the list or the number of the entry ``name``; None if the entry cannot be used.

        :param entry: the entry that was read under ``name``; None if it is missing.
        :param revision: the digest of the list's guards, a part of ``name``. It changes with each
            write to the list's rows.
        """
        items = values.unpack_list(entry, name, request.format.fingerprint)
        if isinstance(items, Unusable):
            if items is Unusable.BROKEN:
                self._count_broken(request)
            return None
        if request.scalar:
            if len(items) == 1 and type(items[0]) is int:
                return Listed(revision, (), (), items[0])
        elif request.numbers:
            if all(type(item) is int for item in items):
                return Listed(revision, (), (), tuple(items))
        elif all(type(pk) is str for pk in items) and _TOKENS.fullmatch(",".join(items)):
            # Check that each item has the form of a primary key, because the items become parts of
            # entry names. Do not trust the entry: other programs can write to the cache server.
            return listed_rows(request, revision, items)
        self._count_broken(request)
        return None

    def _count_broken(self, request: CacheRequest) -> None:
        self._counters.add(request.scope.type.name, broken=1)
