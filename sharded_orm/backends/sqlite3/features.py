"""Django's ``DatabaseFeatures`` for SQLite, with the flags of this package."""

from __future__ import annotations

from django.db.backends.sqlite3 import features

from sharded_orm.backends.features import SQLiteFeatures


class DatabaseFeatures(SQLiteFeatures, features.DatabaseFeatures):
    """The feature flags of Django, and those of
    :class:`~sharded_orm.backends.features.ShardFeatures`.
    """
