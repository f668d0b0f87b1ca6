"""Flags about each kind of database. The package needs them in addition to Django's features.

The ``DatabaseFeatures`` of each backend in this package inherits the flags of
:class:`ShardFeatures`. Aliases may also use a backend of Django or of a third party, which lacks
the flags. :func:`features_of` returns the flags for any backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from sharded_orm.backends.collations import (
    Collations,
    MySQLCollations,
    PostgreSQLCollations,
    SQLiteCollations,
)


class ShardFeatures:
    """Flags of one kind of database, as class attributes. The values in this class are for unknown
    kinds.
    """

    #: Whether a shard is a file in its node's folder. If so, there is no server.
    shards_are_files: ClassVar[bool] = False
    #: Whether only one transaction at a time can write to a database, so that other writers wait
    #: until it ends. True for SQLite.
    has_one_writer: ClassVar[bool] = False
    #: Whether all shards of a node are schemas of one database. The name of this database is in the
    #: settings of the node. True for PostgreSQL.
    shards_share_database: ClassVar[bool] = False
    #: A part of the error message with which a server refuses connections to a database that a
    #: promotion has closed. An empty string if promotions do not close databases.
    closed_database_error: ClassVar[str] = ""
    #: Whether one statement can read several shards of a node, because it can combine the
    #: ``SELECT`` of each shard's schema by ``UNION ALL``.
    can_union_shards: ClassVar[bool] = False
    #: Whether a node's cursor has the methods ``send()`` and ``receive()``. With them, a thread
    #: sends a query to several nodes before it reads the first result, so that the nodes work at
    #: the same time.
    sends_ahead: ClassVar[bool] = False
    #: Whether SQL can name the columns of a subquery in FROM after the subquery's alias, as in
    #: ``FROM (…) u (a, b)``.
    names_columns_of_subqueries: ClassVar[bool] = False
    #: The largest number of tables that a statement which reads several shards may name; None if
    #: there is no limit. For example, with a limit of 512, a statement that joins three tables can
    #: read 170 shards.
    max_scattered_tables: ClassVar[int | None] = None
    #: The largest number of connection objects that one thread keeps for the shards of a group. If
    #: there are more, idle ones are dropped. The setting ``MAX_IDLE_ALIASES`` can set a lower
    #: number, and is the only limit if this flag is None.
    max_idle_aliases: ClassVar[int | None] = None
    #: How texts from several shards are compared in Python, when sorted rows are merged:
    #:
    #: - "bytes": by their bytes.
    #: - "weights": by their ``WEIGHT_STRING`` (the collation's sort weights), which the server adds
    #:   to each row.
    #: - "ranks": by their positions after a server has sorted them, which costs another query.
    #: - None: such texts cannot be compared.
    text_compared_by: ClassVar[Literal["bytes", "weights", "ranks"] | None] = None
    #: Whether a column's collation can be read from the server. If not, the collation that the
    #: model declares is used.
    can_introspect_collations: ClassVar[bool] = False
    #: The object whose methods return which texts a collation treats as equal.
    collations: ClassVar[Collations] = Collations()
    #: How the database rounds the ``AVG`` of integers and decimal numbers. Averages over several
    #: shards are computed in Python, and have to be rounded in the same way:
    #:
    #: - "fixed": to a fixed number of decimal places more than the sum has.
    #: - "significant": to a number of significant digits.
    #: - None: the database does not round, because its ``AVG`` is a float.
    exact_averages: ClassVar[Literal["fixed", "significant"] | None] = None
    #: Whether ``SUM`` and ``AVG`` of texts, dates or booleans raise an error. If not, the database
    #: converts such values to numbers.
    sums_only_numbers: ClassVar[bool] = False
    #: Whether ``SUM`` of integers raises an error if it has more than 64 bits. True for SQLite.
    limits_sums_of_integers: ClassVar[bool] = False
    #: Whether the server computes with more decimal places, or with greater numbers, than the type
    #: of an expression allows. Such a server fits a value into the type only when it sends or
    #: stores the value. So Python, which adds up values that the shards have sent, may get another
    #: sum than one server would.
    computes_beyond_types: ClassVar[bool] = False
    #: Whether Django casts the average of a ``DurationField`` to an integer, which is a number of
    #: microseconds. True for MySQL.
    averages_durations_to_integers: ClassVar[bool] = False
    #: The value of ``OPTIONS["isolation_level"]`` in ``DATABASES`` that selects READ COMMITTED.
    #: Hints in error messages name it.
    read_committed: ClassVar[str] = ""
    #: Whether a transaction with READ UNCOMMITTED reads rows that other transactions have not
    #: committed. False for PostgreSQL, which treats this level as READ COMMITTED.
    has_read_uncommitted: ClassVar[bool] = False
    #: Whether the database can generate the ids of a ``TimestampedIDField``, by a default of the
    #: column.
    makes_timestamped_ids: ClassVar[bool] = False
    #: A statement that switches foreign key checks off until the transaction ends. An empty string
    #: if Django's ``constraint_checks_disabled()`` can do so without this statement.
    foreign_keys_off: ClassVar[str] = ""
    #: Whether a cursor tells the number that the database has generated for an inserted row
    #: (``lastrowid``).
    has_lastrowid: ClassVar[bool] = False
    #: Whether a failed statement makes its whole transaction fail, so that the transaction can only
    #: be rolled back. True for PostgreSQL.
    errors_end_transactions: ClassVar[bool] = False
    #: Whether an open transaction is committed when autocommit is switched on. False for
    #: PostgreSQL, whose driver then refuses to switch autocommit on.
    autocommit_commits: ClassVar[bool] = True
    #: The dotted path of the subclass of
    #: :class:`~sharded_orm.backends.replication.ReplicationServer` for this kind of server. An
    #: empty string if replicas of this kind cannot be promoted. The value is a path and not the
    #: class, because the module of the class imports a driver.
    replication_server: ClassVar[str] = ""
    #: The dotted path of the class that represents one server of a pair (two servers that replicate
    #: from each other). Both servers have each shard of the pair. One of them takes the shard's
    #: writes, and the other refuses them (:class:`~sharded_orm.backends.side_fence.SideFence`). An
    #: empty string if this kind of server cannot be in a pair.
    pair_side: ClassVar[str] = ""

    @classmethod
    def isolation_level(cls, options: Mapping[str, Any]) -> str | None:
        """Return the isolation level of an alias, in the words of SQL, such as "read committed".

        Return "unknown" if only the server knows it, and None if the kind of database has no
        levels.

        :param options: ``OPTIONS`` of the alias.
        """
        return None


class MySQLFeatures(ShardFeatures):
    """Features of shards on MySQL and MariaDB."""

    can_union_shards = True
    sends_ahead = True
    text_compared_by = "weights"
    can_introspect_collations = True
    collations = MySQLCollations()
    exact_averages = "fixed"
    computes_beyond_types = True
    averages_durations_to_integers = True
    has_lastrowid = True
    has_read_uncommitted = True
    read_committed = "'read committed', Django's default for MySQL"
    replication_server = "sharded_orm.backends.mysql.replication.MySQLReplicationServer"
    pair_side = "sharded_orm.backends.mysql.pair_side.MySQLPairSide"

    @classmethod
    def isolation_level(cls, options: Mapping[str, Any]) -> str | None:
        level = options.get("isolation_level", "read committed")
        # With None or "", Django sets no level. A session then has the server's default level,
        # which is not known here.
        return level.lower() if level and isinstance(level, str) else "unknown"


class SQLiteFeatures(ShardFeatures):
    shards_are_files = True
    has_one_writer = True
    has_lastrowid = True
    # Each idle connection object of SQLite keeps a file open, so keep only a few.
    max_idle_aliases = 128
    text_compared_by = "bytes"
    limits_sums_of_integers = True
    collations = SQLiteCollations()


class PostgreSQLFeatures(ShardFeatures):
    shards_share_database = True
    closed_database_error = "is not currently accepting connections"
    can_union_shards = True
    names_columns_of_subqueries = True
    # The server's process needs about 90 kB of memory for each table that a statement names. So
    # limit the number of tables.
    max_scattered_tables = 512
    text_compared_by = "ranks"
    can_introspect_collations = True
    exact_averages = "significant"
    sums_only_numbers = True
    collations = PostgreSQLCollations()
    makes_timestamped_ids = True
    # On PostgreSQL, triggers enforce foreign keys. This statement switches them off, together with
    # all other triggers except those that are enabled as ALWAYS or REPLICA.
    foreign_keys_off = "SET LOCAL session_replication_role = replica"
    errors_end_transactions = True
    autocommit_commits = False
    read_committed = "IsolationLevel.READ_COMMITTED of django.db.backends.postgresql.psycopg_any"
    replication_server = "sharded_orm.backends.postgresql.replication.PostgreSQLReplicationServer"

    @classmethod
    def isolation_level(cls, options: Mapping[str, Any]) -> str | None:
        # Without the option, the level comes from a setting of the server, the database or the
        # role, and this setting may change at any time. So the level is unknown. With the option,
        # each BEGIN names the level.
        return _POSTGRESQL_LEVELS.get(options.get("isolation_level"), "unknown")


#: Maps the values of psycopg's ``IsolationLevel`` to names. READ UNCOMMITTED (1) is mapped to READ
#: COMMITTED, because PostgreSQL treats it so.
_POSTGRESQL_LEVELS: dict[Any, str] = {
    1: "read committed",
    2: "read committed",
    3: "repeatable read",
    4: "serializable",
}

_BY_VENDOR: dict[str, type[ShardFeatures]] = {
    "mysql": MySQLFeatures,
    "sqlite": SQLiteFeatures,
    "postgresql": PostgreSQLFeatures,
}


def features_of(connection: Any) -> type[ShardFeatures]:
    """Return the flags of the database to which a connection object belongs. Sends no query.

    For a backend outside this package, return the flags for its ``vendor``, or the defaults if the
    vendor is not known.

    :param connection: a connection object or its class.
    """
    features: type = connection.features_class
    if issubclass(features, ShardFeatures):
        return features
    return _BY_VENDOR.get(connection.vendor, ShardFeatures)
