"""Django's ``DatabaseFeatures`` for PostgreSQL, with the flags of this package."""

from __future__ import annotations

from django.db.backends.postgresql import features

from sharded_orm.backends.features import PostgreSQLFeatures


class DatabaseFeatures(PostgreSQLFeatures, features.DatabaseFeatures):
    """Django's flags for PostgreSQL, and the flags of
    :class:`~sharded_orm.backends.features.ShardFeatures`.
    """
