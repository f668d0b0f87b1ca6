"""The default settings: everything on SQLite, no server."""

from __future__ import annotations

import tempfile
from pathlib import Path

from sharded_orm.topology.aliases import sharded_databases
from tests.settings.base import *  # noqa: F403
from tests.settings.base import GLOBAL_ALIASES, sharded_orm

# Test databases are in memory; the files exist only for commands that are run by hand.
FOLDER = Path(tempfile.gettempdir()) / "sharded_orm_tests"

DATABASES = sharded_databases(
    {
        alias: {
            # Cached models are in the first alias; the others use Django's stock backend.
            "ENGINE": "sharded_orm.backends.sqlite3"
            if alias == "default"
            else "django.db.backends.sqlite3",
            "NAME": str(FOLDER / f"{alias}.sqlite3"),
        }
        for alias in GLOBAL_ALIASES
    }
)
SHARDED_ORM = sharded_orm(
    {
        node: {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": str(FOLDER / node)}
        for node in ("local_1", "local_2")
    }
)
