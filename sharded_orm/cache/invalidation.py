"""Making entries void for writes that are over already: SQL that the library did not see."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sharded_orm.cache import request_cache
from sharded_orm.cache.client import CacheClient
from sharded_orm.cache.guards import closing, new_token
from sharded_orm.cache.keys import Scope
from sharded_orm.cache.stores.base import CacheServer, ServerDown


@dataclass(frozen=True)
class Voided:
    """Rows whose entries are to be void.

    :param scope: what they belong to, down to the isolate key if that is known.
    :param pks: tokens of their primary keys; None for all rows of the scope.
    :param wide: the type has an isolate key, and which values of it are concerned is unknown.
    """

    scope: Scope
    pks: frozenset[str] | None = None
    wide: bool = False


def void(cache: CacheClient, rows: Iterable[Voided]) -> None:
    """Make what the cache holds of ``rows`` void: one packet for each cache server.

    What was read from the database before this call, and is about to be stored, does not
    count any more either. Call it after the write was committed.

    :raises ServerDown: a server did not answer; the others were told.
    """
    objects: dict[CacheServer, list[str]] = {}
    # Of each server, the guards, and whether what they stand for is void as a whole.
    guards: dict[CacheServer, dict[str, bool]] = {}
    rows = list(rows)
    for one in rows:
        scope, names = one.scope, one.scope.guards
        # That of the table, if the key is unknown.
        home = names[min(scope.home, len(names) - 1)]
        whole = one.pks is None or one.wide
        for holder in cache.holders(scope.place):
            known = guards.setdefault(holder.server, {})
            known[home] = known.get(home, False) or whole
            if scope.isolate is not None and holder.lists:
                known.setdefault(names[-1], False)
            if one.pks is not None and holder.objects:
                names_of = map(scope.object_name, sorted(one.pks))
                objects.setdefault(holder.server, []).extend(names_of)
    down: ServerDown | None = None
    for server, wanted in guards.items():
        token = new_token()
        try:
            server.finish(
                objects.get(server, ()),
                [(name, closing(token, void=whole)) for name, whole in wanted.items()],
            )
        except ServerDown as exc:
            down = exc
    for one in rows:
        names = one.scope.guards
        request_cache.forget(names[one.scope.home] if one.scope.home < len(names) else None)
    if down is not None:
        raise down
