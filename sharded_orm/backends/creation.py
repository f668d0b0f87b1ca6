"""Test databases of an ordinary alias: Django's, with names of their own in the cache.

What is done is in ``sharded_orm.testing``, which is imported when tests run only.
"""

from __future__ import annotations

from typing import Any

from django.db.backends.base.creation import BaseDatabaseCreation
from django.utils.module_loading import import_string

_IMPLEMENTATION = "sharded_orm.testing.caching"


class IsolatedCacheCreation(BaseDatabaseCreation):
    """First base of each backend's ``creation``: rows of a test database are never cached under
    the names of other rows."""

    def create_test_db(self, *args: Any, **kwargs: Any) -> str:
        # Before anything is migrated: migrations may write rows.
        import_string(f"{_IMPLEMENTATION}.isolate")(self.connection.alias)
        return super().create_test_db(*args, **kwargs)

    def setup_worker_connection(self, _worker_id: int) -> None:
        # The databases of parallel processes have the same rows under the same names.
        import_string(f"{_IMPLEMENTATION}.isolate_worker")(self.connection.alias)
        super().setup_worker_connection(_worker_id)

    def destroy_test_db(self, *args: Any, **kwargs: Any) -> None:
        super().destroy_test_db(*args, **kwargs)
        import_string(f"{_IMPLEMENTATION}.release")(self.connection.alias)
