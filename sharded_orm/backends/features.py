"""Features of databases that the package needs to know, in addition to Django's.

The ``DatabaseFeatures`` of each of our backends has the flags of :class:`ShardFeatures`. An alias may
also use a backend of Django or of a third party: :func:`features_of` returns the flags of any.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from sharded_orm.backends.collations import (
    Collations,
    MySQLCollations,
    PostgreSQLCollations,
    SQLiteCollations,
)


class ShardFeatures:
    """Flags of one kind of database, as class attributes; the values here are the defaults."""

    #: A shard is a file in the folder of its node; there is no server.
    shards_are_files: ClassVar[bool] = False
    #: One statement can read several shards of a node (``UNION ALL`` over schemas).
    can_union_shards: ClassVar[bool] = False
    #: The most connection objects of shards that a thread may keep idle, below
    #: ``MAX_IDLE_ALIASES``; None for no bound of its own.
    max_idle_aliases: ClassVar[int | None] = None
    #: How text of several shards is compared in Python: by its bytes, by the ``WEIGHT_STRING``
    #: that the server sends along, or not at all.
    text_compared_by: ClassVar[Literal["bytes", "weights"] | None] = None
    #: The server knows the collation of a column; elsewhere the models do.
    can_introspect_collations: ClassVar[bool] = False
    #: How text compares under each collation.
    collations: ClassVar[Collations] = Collations()
    #: ``AVG`` of integers is a decimal number, not a float.
    averages_integers_exactly: ClassVar[bool] = False
    #: Django casts the average of a ``DurationField`` to an integer.
    averages_durations_to_integers: ClassVar[bool] = False
    #: The isolation level that the server gives a session by default, lower case; None where
    #: ``OPTIONS`` has no ``isolation_level`` in SQL's words.
    default_isolation_level: ClassVar[str | None] = None
    #: The default of a column can make the ids of a ``TimestampedIDField``.
    makes_timestamped_ids: ClassVar[bool] = False
    #: The replica of a node can be promoted.
    supports_promotion: ClassVar[bool] = False


class MySQLFeatures(ShardFeatures):
    """MySQL and MariaDB."""

    can_union_shards = True
    text_compared_by = "weights"
    can_introspect_collations = True
    collations = MySQLCollations()
    averages_integers_exactly = True
    averages_durations_to_integers = True
    default_isolation_level = "repeatable read"
    supports_promotion = True


class SQLiteFeatures(ShardFeatures):
    shards_are_files = True
    # Each idle connection holds an open file.
    max_idle_aliases = 128
    text_compared_by = "bytes"
    collations = SQLiteCollations()


class PostgreSQLFeatures(ShardFeatures):
    collations = PostgreSQLCollations()
    makes_timestamped_ids = True


_BY_VENDOR: dict[str, type[ShardFeatures]] = {
    "mysql": MySQLFeatures,
    "sqlite": SQLiteFeatures,
    "postgresql": PostgreSQLFeatures,
}


def features_of(connection: Any) -> type[ShardFeatures]:
    """Return the flags of a connection object or of its class. Asks no server.

    The flags of a backend that is not ours are those of its vendor, or else the defaults.
    """
    features: type = connection.features_class
    if issubclass(features, ShardFeatures):
        return features
    return _BY_VENDOR.get(connection.vendor, ShardFeatures)
