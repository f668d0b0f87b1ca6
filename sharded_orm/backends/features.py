"""Flags about kinds of databases that this package needs in addition to Django's features.

The ``DatabaseFeatures`` of each backend in this package has the flags of :class:`ShardFeatures`. An
alias may also use a backend of Django or of a third party: :func:`features_of` returns the flags for
any backend.
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
    """The flags of one kind of database, as class attributes. The values here are the defaults."""

    #: Whether a shard is a file in the folder of its node, without a server.
    shards_are_files: ClassVar[bool] = False
    #: Whether one statement can read several shards of a node (``UNION ALL`` over schemas).
    can_union_shards: ClassVar[bool] = False
    #: The most idle connection objects of a group's shards that a thread keeps, even if the setting
    #: ``MAX_IDLE_ALIASES`` allows more; None if only the setting counts.
    max_idle_aliases: ClassVar[int | None] = None
    #: How text from several shards is sorted and compared in Python: by its bytes, or by the
    #: ``WEIGHT_STRING`` that the server sends along. None if it cannot be compared.
    text_compared_by: ClassVar[Literal["bytes", "weights"] | None] = None
    #: Whether the collation of a column can be read from the server. If not, the models declare it.
    can_introspect_collations: ClassVar[bool] = False
    #: Which texts each collation takes for equal.
    collations: ClassVar[Collations] = Collations()
    #: Whether ``AVG`` of integers is a decimal number rather than a float.
    averages_integers_exactly: ClassVar[bool] = False
    #: Whether Django casts the average of a ``DurationField`` to an integer.
    averages_durations_to_integers: ClassVar[bool] = False
    #: The isolation level of a session by default, in SQL's words and lower case. None if ``OPTIONS``
    #: does not take an ``isolation_level`` in SQL's words.
    default_isolation_level: ClassVar[str | None] = None
    #: Whether a column default in the database can generate the ids of a ``TimestampedIDField``.
    makes_timestamped_ids: ClassVar[bool] = False
    #: Whether the replica of a node can be promoted to primary.
    supports_promotion: ClassVar[bool] = False


class MySQLFeatures(ShardFeatures):
    """The flags of MySQL and MariaDB."""

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
    # Each idle connection keeps a file open.
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
    """Return the flags for a connection object, or for a connection object's class. Asks no server.

    For a backend outside this package, return the flags of its vendor. If the vendor is not known,
    return the defaults.
    """
    features: type = connection.features_class
    if issubclass(features, ShardFeatures):
        return features
    return _BY_VENDOR.get(connection.vendor, ShardFeatures)
