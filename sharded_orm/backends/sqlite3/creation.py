"""Create test databases with SQLite. Their rows are cached under cache keys that no other database
uses, so that tests never read cached rows of the live site.
"""

from __future__ import annotations

from typing import Any

from django.db.backends.base.creation import TEST_DATABASE_PREFIX
from django.db.backends.sqlite3 import creation as stock

from sharded_orm.backends.creation import IsolatedCacheCreation


class DatabaseCreation(IsolatedCacheCreation, stock.DatabaseCreation):
    """Creates test databases as Django's class does, but also under pytest-xdist.

    The cache keys of a test database have a prefix that no other database uses.
    """

    def _get_test_db_name(self) -> str:
        # Ignore a TEST["NAME"] that pytest-django has set for xdist, such as "test_", NAME and
        # "_gw0". Here NAME is the path of a file, so no file with this name can be created.
        # (pytest-django recognizes only Django's own SQLite engine.)
        settings = self.connection.settings_dict
        prefix = f"{TEST_DATABASE_PREFIX}{settings['NAME']}_"
        if str(settings["TEST"]["NAME"] or "").startswith(prefix):
            settings["TEST"]["NAME"] = None
        # Django's type stubs do not know the method, so use the type Any.
        creation: Any = super()
        return str(creation._get_test_db_name())
