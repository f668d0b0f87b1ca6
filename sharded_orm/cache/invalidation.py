"""Makes cache entries void after SQL statements that the library has not seen, such as raw SQL."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sharded_orm.cache import request_cache
from sharded_orm.cache.client import CacheClient
from sharded_orm.cache.guards import closing, new_token
from sharded_orm.cache.keys import Scope
from sharded_orm.cache.stores.base import CacheServer, ServerDown


@dataclass(frozen=True)
class VoidRows:
    """Rows whose cache entries must become void.

    :param scope: the smallest known set of rows that contains them. This is the rows of an isolate
        key, of a shard key, or of the table.
    :param pks: tokens of the rows' primary keys (the form that keys have in names of entries); None
        (the default) for all rows of the scope.
    :param wide: True if the model has an isolate key, and its values in the rows are not known.
        Then all entries of the shard key or table become void. Default: False.
    """

    scope: Scope
    pks: frozenset[str] | None = None
    wide: bool = False


def void(cache: CacheClient, targets: Iterable[VoidRows]) -> None:
    """Make the cache entries of the rows in ``targets`` void. Costs one round trip per cache server.

    Call this after the write was committed. A reader that queried the database before this call
    can no longer store its result.

    :raises ServerDown: a server did not answer, and its entries may still be valid. The entries
        on the other servers are void.
    """
    objects: dict[CacheServer, list[str]] = {}
    # Maps each server to its guards that must change. In the inner dict, the name of a guard maps
    # to True if all entries that depend on the guard must become void.
    guards: dict[CacheServer, dict[str, bool]] = {}
    targets = list(targets)
    for rows in targets:
        scope, names = rows.scope, rows.scope.guards
        # The guard that says whether the objects are valid. This is the guard of the shard key. If
        # the model is global, or if the shard key is not known, it is the guard of the table.
        home = names[min(scope.home, len(names) - 1)]
        is_whole = rows.pks is None or rows.wide
        for holder in cache.holders(scope.place):
            server_guards = guards.setdefault(holder.server, {})
            server_guards[home] = server_guards.get(home, False) or is_whole
            if scope.isolate is not None and holder.lists:
                server_guards.setdefault(names[-1], False)
            if rows.pks is not None and holder.objects:
                object_names = map(scope.object_name, sorted(rows.pks))
                objects.setdefault(holder.server, []).extend(object_names)
    error: ServerDown | None = None
    for server, server_guards in guards.items():
        token = new_token()
        try:
            server.finish(
                objects.get(server, ()),
                [(name, closing(token, void=is_whole)) for name, is_whole in server_guards.items()],
            )
        except ServerDown as exc:
            error = exc
    for rows in targets:
        names, home_index = rows.scope.guards, rows.scope.home
        request_cache.forget(names[home_index] if home_index < len(names) else None)
    if error is not None:
        raise error
