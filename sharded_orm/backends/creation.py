"""Test databases of an ordinary alias: Django's, with names of their own in the cache.

What isolates the cache is in ``sharded_orm.testing``, which is imported when tests run only: the
app says how to reach it (:func:`provide_isolation`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from django.db.backends.base.creation import BaseDatabaseCreation


class CacheIsolation(Protocol):
    """Names in the cache that no other run and no other process uses."""

    def isolate(self, alias: str) -> None:
        """A test database is about to be made for ``alias``."""

    def isolate_worker(self, alias: str) -> None:
        """This process is one of several that run tests at the same time."""

    def release(self, alias: str) -> None:
        """The test database of ``alias`` is gone."""


# None without the app: then nothing is cached.
_isolation: Callable[[], CacheIsolation] | None = None


def provide_isolation(isolation: Callable[[], CacheIsolation]) -> None:
    """Isolate the cache by what ``isolation`` gives; it is called when tests run only."""
    global _isolation
    _isolation = isolation


class IsolatedCacheCreation(BaseDatabaseCreation):
    """First base of each backend's ``creation``: rows of a test database are never cached under
    the names of other rows."""

    def create_test_db(self, *args: Any, **kwargs: Any) -> str:
        # Before anything is migrated: migrations may write rows.
        if _isolation is not None:
            _isolation().isolate(self.connection.alias)
        return super().create_test_db(*args, **kwargs)

    def setup_worker_connection(self, _worker_id: int) -> None:
        # The databases of parallel processes have the same rows under the same names.
        if _isolation is not None:
            _isolation().isolate_worker(self.connection.alias)
        super().setup_worker_connection(_worker_id)

    def destroy_test_db(self, *args: Any, **kwargs: Any) -> None:
        super().destroy_test_db(*args, **kwargs)
        if _isolation is not None:
            _isolation().release(self.connection.alias)
