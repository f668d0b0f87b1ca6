"""Reads many rows by their primary keys through the cache, usually in one round trip per cache
server.

A *guard* is the cache entry that says whether the entry of a row is still valid. The process
remembers each decoded row, with the bytes of the row's entry and guards. If it finds the same bytes
again, the row becomes a *kept* row: for some seconds, the process reads only the guards of the row,
and not its entry. This is safe, because each write is announced in a guard before it is committed,
and a guard never has the same bytes again. So the row is valid as long as its guards have the
remembered bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from sharded_orm.cache.batching import Steps
from sharded_orm.cache.process_cache import DecodedRow
from sharded_orm.cache.requests import HIT, ObjectRequest, RowAddress, RowBatch
from sharded_orm.cache.stores.base import CacheServer, FoundEntry

_Unusable = dict[str, bytes | None]
#: A function that sets the outcome of a request. Its arguments are the request, the cache server,
#: the bytes of the request's guards, its entry, and a dict. If a guard is missing or broken, the
#: function adds all guards of the request to the dict, so that the caller creates them.
_Decide = Callable[
    [ObjectRequest, CacheServer, tuple[bytes | None, ...], FoundEntry, _Unusable], None
]

_Addresses = list[tuple[RowBatch, RowAddress]]
_KeptRow = tuple[RowBatch, RowAddress, DecodedRow]


class BatchReader:
    """Reads batches of rows, each from one cache server. The threads of a process share it.

    :param decide: sets the outcome of a request, depending on whether its entry is valid.
    :param make_guards: takes a dict of guards, and creates those that are missing or broken.
    :param monotonic: returns the time of a monotonic clock in seconds.
    :param kept_for: for how many seconds after a row's entry was read the process reads only the
        row's guards, and uses the remembered row if they are the same. 0 if it always reads the
        entry, too.
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
        """Look for the rows of all ``batches``. Their entries are all on ``server``.

        Usually takes one round trip, which reads the guards and entries of the rows. Of the *kept*
        rows, whose entries were read a short time ago, it reads only the guards. If guards of kept
        rows have changed, a second round trip reads the entries of these rows. If guards are
        missing, one more round trip creates them (several, if hundreds are missing).
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
        # Read each guard only once. All rows of a shard have the guard of their table in common.
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
                # Set ``until``, the time up to which reads ask for the guards only, to 0. So the
                # next read asks for the entry together with its guards.
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
        """Whether all ``kept`` rows have guards with the same bytes as when the rows were valid."""
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
        """Put each row whose entry is valid into its batch. For each other row, put a request there.

        :param guard_of: takes the name of a guard and returns its bytes.
        :param began: the time on the monotonic clock before the entries were read.
        """
        until = began + self._kept_for
        unusable: _Unusable = {}
        for (batch, address), entry in zip(addresses, entries, strict=True):
            name, known = address.name, batch.format.decoded.known
            guards_read = tuple(map(guard_of, address.scope.guards))
            seen = known.get(name)
            if seen is not None and seen.value == entry.value and seen.guards == guards_read:
                # The process has read the same bytes of the entry and of its guards before, and has
                # found that the row was valid. So it still is.
                batch.rows[name] = seen.row
                known[name] = DecodedRow(seen.value, seen.stamp, seen.row, seen.guards, until)
                continue
            request = batch.request(address)
            self._decide(request, server, guards_read, entry, unusable)
            if request.outcome == HIT and request.rows is not None:
                batch.rows[name] = request.rows[0]
            else:
                # If a row has several requests, keep the first one, because it may have the lease,
                # the permission to store the row.
                batch.requests.setdefault(name, request)
        if unusable:
            self._make_guards(server, unusable)


def _distinct(guard_names: Iterable[tuple[str, ...]]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(guard_names)))
