"""Create SQLite test databases. Their cached rows have keys that no other database uses."""

from __future__ import annotations

from typing import Any

from django.db.backends.base.creation import TEST_DATABASE_PREFIX
from django.db.backends.sqlite3 import creation as stock

from sharded_orm.backends.creation import IsolatedCacheCreation


class DatabaseCreation(IsolatedCacheCreation, stock.DatabaseCreation):
    """Creates test databases like Django's class, but also works with pytest-xdist.

    Rows of a test database are cached under separate keys.
    """

    def _get_test_db_name(self) -> str:
        # Ignore a TEST["NAME"] that pytest-django has set. With xdist, pytest-django sets this name
        # for every engine except Django's own SQLite engine: "test_", then NAME, then a suffix.
        # Here NAME is a path, so no file with that name can be created.
        settings = self.connection.settings_dict
        prefix = f"{TEST_DATABASE_PREFIX}{settings['NAME']}_"
        if str(settings["TEST"]["NAME"] or "").startswith(prefix):
            settings["TEST"]["NAME"] = None
        # The variable has the type Any, because Django's type stubs leave out the method.
        creation: Any = super()
        return str(creation._get_test_db_name())
