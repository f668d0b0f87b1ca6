"""Django's features of MySQL and MariaDB, and ours."""

from __future__ import annotations

from django.db.backends.mysql import features

from sharded_orm.backends.features import MySQLFeatures


class DatabaseFeatures(MySQLFeatures, features.DatabaseFeatures):
    """Django's own, otherwise."""
