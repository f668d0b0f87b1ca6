"""Django's ``DatabaseFeatures`` for MySQL and MariaDB, with the flags of this package."""

from __future__ import annotations

from django.db.backends.mysql import features

from sharded_orm.backends.features import MySQLFeatures


class DatabaseFeatures(MySQLFeatures, features.DatabaseFeatures):
    """Django's flags and those of :class:`~sharded_orm.backends.features.ShardFeatures`."""
