"""Test databases of an ordinary alias: Django's, whose rows have names of their own in the cache.

``sharded_orm.testing`` isolates the cache. It is imported only when tests run: the app provides a
function that reaches it (:func:`provide_isolation`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from django.db.backends.base.creation import BaseDatabaseCreation


class CacheIsolation(Protocol):
    """Gives a test run, or one of its processes, names in the cache that no other uses."""

    def isolate(self, alias: str) -> None:
        """A test database for ``alias`` is about to be created."""

    def isolate_worker(self, alias: str) -> None:
        """This process is one of several that run tests in parallel."""

    def release(self, alias: str) -> None:
        """The test database of ``alias`` was dropped."""


# None without the app, which then caches nothing.
_isolation: Callable[[], CacheIsolation] | None = None


def provide_isolation(isolation: Callable[[], CacheIsolation]) -> None:
    """Set the function that returns the isolation; it is called only when tests run."""
    global _isolation
    _isolation = isolation


class IsolatedCacheCreation(BaseDatabaseCreation):
    """First base of each backend's ``DatabaseCreation``.

    Rows of a test database are never cached under the names of other rows.
    """

    def create_test_db(self, *args: Any, **kwargs: Any) -> str:
        # Before anything is migrated: migrations may write rows.
        if _isolation is not None:
            _isolation().isolate(self.connection.alias)
        return super().create_test_db(*args, **kwargs)

    def setup_worker_connection(self, _worker_id: int) -> None:
        # Without isolation, rows in the databases of parallel processes have the same names.
        if _isolation is not None:
            _isolation().isolate_worker(self.connection.alias)
        super().setup_worker_connection(_worker_id)

    def destroy_test_db(self, *args: Any, **kwargs: Any) -> None:
        super().destroy_test_db(*args, **kwargs)
        if _isolation is not None:
            _isolation().release(self.connection.alias)
