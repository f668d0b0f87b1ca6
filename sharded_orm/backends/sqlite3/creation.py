"""Django's test databases, whose rows have names of their own in the cache."""

from __future__ import annotations

from typing import Any

from django.db.backends.base.creation import TEST_DATABASE_PREFIX
from django.db.backends.sqlite3 import creation as stock

from sharded_orm.backends.creation import IsolatedCacheCreation


class DatabaseCreation(IsolatedCacheCreation, stock.DatabaseCreation):
    """Django's own, otherwise."""

    def _get_test_db_name(self) -> str:
        # Overrides DatabaseCreation._get_test_db_name. With xdist, pytest-django recognizes Django's
        # engine by its name and keeps its databases in memory. For any other engine it builds a name
        # from NAME, which is a path here, so such a file cannot be created.
        settings = self.connection.settings_dict
        prefix = f"{TEST_DATABASE_PREFIX}{settings['NAME']}_"
        if str(settings["TEST"]["NAME"] or "").startswith(prefix):
            settings["TEST"]["NAME"] = None
        creation: Any = super()  # The stubs leave the method out.
        return str(creation._get_test_db_name())
