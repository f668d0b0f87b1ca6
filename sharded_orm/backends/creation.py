"""Creates the test databases of ordinary aliases, which are not shard groups.

Tests must not read cached rows of the live site. So the rows of a test database are cached under
keys of their own. ``sharded_orm.testing`` changes the cache keys. This module does not import
``sharded_orm.testing``, which must be imported only when tests run. Instead, the app passes a
function to :func:`provide_isolation`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from django.db.backends.base.creation import BaseDatabaseCreation


class CacheIsolation(Protocol):
    """Gives each process of a test run its own cache keys, so that it never reads the cached rows
    of another process or of another run.
    """

    def isolate(self, alias: str) -> None:
        """Make this process use cache keys of its own. Called before the test database of ``alias``
        is created.
        """

    def isolate_worker(self, alias: str) -> None:
        """Make this process, one worker of a parallel test run, use cache keys of its own.

        :param alias: an alias that has a test database.
        """

    def release(self, alias: str) -> None:
        """Record that the test database of ``alias`` was dropped.

        When the last test database of this process was dropped, the process uses the usual cache
        keys again.
        """


# A function that returns the CacheIsolation. None if the package's Django app is not in
# INSTALLED_APPS. Nothing is cached then, so no separate keys are needed.
_isolation: Callable[[], CacheIsolation] | None = None


def provide_isolation(isolation: Callable[[], CacheIsolation]) -> None:
    """Set the function that returns the :class:`CacheIsolation`. The function is called only in
    tests.
    """
    global _isolation
    _isolation = isolation


class IsolatedCacheCreation(BaseDatabaseCreation):
    """First base class of each backend's ``DatabaseCreation``. It makes each process of a test run
    use its own cache keys, so that tests never read or change the cached rows of the live site.
    """

    def create_test_db(self, *args: Any, **kwargs: Any) -> str:
        # Switch to the cache keys of the test run before the migrations run. Migrations may write
        # rows, and must not touch the cache of the live site.
        if _isolation is not None:
            _isolation().isolate(self.connection.alias)
        return super().create_test_db(*args, **kwargs)

    def setup_worker_connection(self, _worker_id: int) -> None:
        # Give each parallel test process its own cache keys. Otherwise, two processes would use the
        # same cache keys for rows of different databases.
        if _isolation is not None:
            _isolation().isolate_worker(self.connection.alias)
        super().setup_worker_connection(_worker_id)

    def destroy_test_db(self, *args: Any, **kwargs: Any) -> None:
        super().destroy_test_db(*args, **kwargs)
        if _isolation is not None:
            _isolation().release(self.connection.alias)
