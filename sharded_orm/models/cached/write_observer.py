"""Reports writes to the cache. The database backends call this module for each write of the ORM.

The rows of each write are remembered until COMMIT. Before COMMIT, *markers* are added to entries of
the cache. A marker says that rows are being written (see :mod:`sharded_orm.cache.markers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.apps import apps
from django.db.models.sql.subqueries import DeleteQuery, InsertQuery, UpdateQuery

from sharded_orm import runtime
from sharded_orm.cache.markers import TransactionMarkers
from sharded_orm.models.cached.cached_model import CachedModel, cached_model
from sharded_orm.models.cached.write_tracking import TrackedWrite


def transaction_markers(connection: Any) -> TransactionMarkers:
    """Return the object that collects the writes of the open transaction of ``connection``.

    Before COMMIT, this object puts markers into the cache: entries which say that the rows are
    being written. ``connection`` must be inside of a transaction, and a cache must be configured.
    After this call, reads in the transaction bypass the cache.
    """
    connection.wrote = True
    markers: TransactionMarkers | None = connection.transaction_writes
    if markers is None:
        cache = runtime.cache()
        assert cache is not None
        markers = connection.transaction_writes = TransactionMarkers(cache, connection)
    return markers


class CacheObserver:
    """Records the rows that writes affect, so that the cache learns of the writes before COMMIT.

    Implements :class:`~sharded_orm.backends.write_hooks.observer.WriteObserver`. The app installs
    one instance when it starts.
    """

    cached_model_of = staticmethod(cached_model)

    def write(
        self, cached: CachedModel, compiler: Any, execute: Callable[[], Any], counted: bool
    ) -> Any:
        """Execute a statement inside of a transaction, and record the rows that it affects.

        :param cached: the model whose table is written.
        :param compiler: the compiler of the statement.
        :param execute: executes the statement and returns its result.
        :param counted: whether ``execute`` returns the number of rows that matched.
        :returns: the result of the statement.
        """
        connection = compiler.connection
        if not cached.caches_alias(connection.alias):
            return execute()
        statement = TrackedWrite(cached, compiler, transaction_markers(connection), counted)
        query = compiler.query
        if isinstance(query, InsertQuery):
            return statement.insert(execute)
        if isinstance(query, UpdateQuery | DeleteQuery):
            return statement.change(execute)
        statement.touch_all()
        return execute()

    @contextmanager
    def table_flush(self, connection: Any) -> Iterator[None]:
        """Context manager for a block that empties tables on ``connection``.

        It is not known which tables the block empties. So before the block, announce to the cache
        that all rows of all cached models on ``connection`` are being written. After the block,
        tell the cache that this write is over.
        """
        cache = runtime.cache() if runtime.config().cache is not None else None
        models = [m for m in _cached_models() if m.caches_alias(connection.alias)] if cache else []
        if not models or cache is None:
            yield
            return
        markers = TransactionMarkers(cache, connection)
        for cached in models:
            markers.touch(cached.scope(cached.place(connection.alias), None), None, wide=True)
        try:
            markers.announce()
            yield
        finally:
            markers.over()


def _cached_models() -> list[CachedModel]:
    models = (cached_model(model) for model in apps.get_models())
    # List each CachedModel only once, because a proxy model and its concrete model have the same
    # one.
    return list({id(cached): cached for cached in models if cached is not None}.values())
