"""Django's features of SQLite, and ours."""

from __future__ import annotations

from django.db.backends.sqlite3 import features

from sharded_orm.backends.features import SQLiteFeatures


class DatabaseFeatures(SQLiteFeatures, features.DatabaseFeatures):
    """Django's own, otherwise."""
