"""Reads many rows by their primary keys through the cache, usually in one round trip per cache server.

A *guard* is the cache entry that says whether a row's entry is still valid. A process remembers the
rows that it has decoded, with the bytes of their entries and guards. A row that was found valid twice,
with the same bytes, is a *kept* row: for some seconds, only its guards are read. Each write to the row
is announced in one of its guards before it is committed, and guards never return to earlier bytes. So
the kept row is valid as long as the server has the same guards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from sharded_orm.cache.batching import Steps
from sharded_orm.cache.process_cache import DecodedRow
from sharded_orm.cache.requests import HIT, ObjectRequest, RowAddress, RowBatch
from sharded_orm.cache.stores.base import CacheServer, FoundEntry

_Unusable = dict[str, bytes | None]
#: Decides about a request, by the bytes of its guards and its entry. If a guard is missing or broken,
#: all guards of the request are added to the dict.
_Decide = Callable[
    [ObjectRequest, CacheServer, tuple[bytes | None, ...], FoundEntry, _Unusable], None
]

_Addresses = list[tuple[RowBatch, RowAddress]]
_KeptRow = tuple[RowBatch, RowAddress, DecodedRow]


class BatchReader:
    """Reads the rows of batches from one cache server at a time. The threads of a process share it.

    :param decide: decides whether the entry of a request is valid, and sets the request's outcome.
    :param make_guards: makes those guards in a dict that are missing or broken.
    :param monotonic: returns the time of a monotonic clock in seconds.
    :param kept_for: the seconds for which a row is kept. 0 if none is.
    """

    def __init__(
        self,
        decide: _Decide,
        make_guards: Callable[[CacheServer, _Unusable], None],
        monotonic: Callable[[], float],
        kept_for: float,
    ) -> None:
        self._decide = decide
        self._make_guards = make_guards
        self._monotonic = monotonic
        self._kept_for = kept_for

    def steps(self, server: CacheServer, batches: Sequence[RowBatch]) -> Steps:
        """Look for the rows of all ``batches``, whose entries are on ``server``.

        The second round trip is only for kept rows whose guards have changed. If guards are missing, a
        further round trip makes them (more, if they are hundreds).
        """
        began = self._monotonic()
        kept: list[_KeptRow] = []
        others: _Addresses = []
        for batch in batches:
            known = batch.format.decoded.known
            for address in batch.addresses.values():
                seen = known.get(address.name)
                if seen is not None and seen.until > began:
                    kept.append((batch, address, seen))
                else:
                    others.append((batch, address))
        # Read each guard once, because all rows of a shard depend on the guard of their table.
        addresses = [*[address for _, address, _ in kept], *[address for _, address in others]]
        names = _distinct([address.scope.guards for address in addresses])
        raws, entries, _ = yield server, names, [address.name for _, address in others], ()
        guard_of = dict(zip(names, raws, strict=True)).__getitem__
        changed: _Addresses = []
        all_same = self._have_same_guards(kept, guard_of)
        for row in kept:
            batch, address, seen = row
            if all_same or self._have_same_guards([row], guard_of):
                batch.rows[address.name] = seen.row
            else:
                # The next read asks for the entry and the guards together.
                batch.format.decoded.known[address.name] = seen._replace(until=0.0)
                changed.append((batch, address))
        if others:
            self._judge(server, others, guard_of, entries, began)
        if changed:
            began = self._monotonic()
            names = _distinct([address.scope.guards for _, address in changed])
            raws, entries, _ = yield server, names, [address.name for _, address in changed], ()
            guard_of = dict(zip(names, raws, strict=True)).__getitem__
            self._judge(server, changed, guard_of, entries, began)

    @staticmethod
    def _have_same_guards(
        kept: Sequence[_KeptRow], guard_of: Callable[[str], bytes | None]
    ) -> bool:
        """Whether the guards of all these rows still have the bytes with which the rows were valid."""
        names = chain.from_iterable([address.scope.guards for _, address, _ in kept])
        return [*map(guard_of, names)] == [
            *chain.from_iterable([seen.guards for _, _, seen in kept])
        ]

    def _judge(
        self,
        server: CacheServer,
        addresses: _Addresses,
        guard_of: Callable[[str], bytes | None],
        entries: Sequence[FoundEntry],
        began: float,
    ) -> None:
        """Set the row of each address, or a request for it, by its entry.

        :param guard_of: returns the bytes of a guard, by its name.
        :param began: the time on the monotonic clock before the entries were read.
        """
        until = began + self._kept_for
        unusable: _Unusable = {}
        for (batch, address), entry in zip(addresses, entries, strict=True):
            name, known = address.name, batch.format.decoded.known
            guards_read = tuple(map(guard_of, address.scope.guards))
            seen = known.get(name)
            if seen is not None and seen.value == entry.value and seen.guards == guards_read:
                # This process has already read the same bytes of the entry and of its guards, and
                # found the row valid.
                batch.rows[name] = seen.row
                known[name] = DecodedRow(seen.value, seen.stamp, seen.row, seen.guards, until)
                continue
            request = batch.request(address)
            self._decide(request, server, guards_read, entry, unusable)
            if request.outcome == HIT and request.rows is not None:
                batch.rows[name] = request.rows[0]
            else:
                # Of several requests for a row, the first one may have the lease (the permission to store it).
                batch.requests.setdefault(name, request)
        if unusable:
            self._make_guards(server, unusable)


def _distinct(guard_names: Iterable[tuple[str, ...]]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(guard_names)))
