"""Django's ``DatabaseFeatures`` for MySQL and MariaDB, with this package's flags added."""

from __future__ import annotations

from django.db.backends.mysql import features

from sharded_orm.backends.features import MySQLFeatures


class DatabaseFeatures(MySQLFeatures, features.DatabaseFeatures):
    """Django's flags for MySQL, and the flags of
    :class:`~sharded_orm.backends.features.ShardFeatures`.
    """
