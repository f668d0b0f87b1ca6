"""Finds out which texts a database treats as equal, from the name of the collation.

Sends no query, except that :meth:`Collations.exact_collation` may query the server's version.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sharded_orm.mysql_flavor import MARIADB, MYSQL, MySQLFlavor


class TextEquality(NamedTuple):
    """Which texts a collation treats as equal.

    :param is_exact: whether two texts are equal only if they have the same characters. If ``pads`` is
        True, trailing spaces do not count.
    :param pads: whether trailing spaces are ignored.
    """

    is_exact: bool
    pads: bool = False


class Collations:
    """The collations of one kind of database. The base class is for unknown kinds."""

    #: The collation to declare for a field by which a cached model is looked up. It may ignore trailing
    #: spaces, because the cache can ignore them, too.
    exact_for_cache = "C"
    #: The collation to declare for a shard key. It must not ignore trailing spaces, because the router
    #: does not ignore them.
    exact_for_shard_key = "C"
    #: The last part of a hint on how to declare a shard key. It names what can be used instead of
    #: ``ExactCharField``.
    remedy = ""

    def equality(self, collation: str | None) -> TextEquality:
        """Return whether ``collation`` compares texts exactly, and whether it ignores trailing spaces.

        :param collation: name of the collation; None for the database's default collation.
        """
        return TextEquality(False)

    def is_inexact_key(self, collation: str, *, is_colocated_with_target: bool) -> bool:
        """Whether the database certainly treats different texts as the same shard key, because of
        this collation. False in doubt.

        :param is_colocated_with_target: whether the key's column is on the same shards as the field
            that declares the collation. For a key that is a foreign key, this is the field to which
            the key refers, whose table may be on other databases.
        """
        return False

    def exact_collation(self, connection: Any) -> str | None:
        """Return the collation that compares every character, including trailing spaces.

        Return None if the database's default collation does so. May query the server's version.
        """
        return None

    def exact_column_sql(self, table: str, column: str, definition: str, collation: str) -> str:
        """Return the SQL statement with which an operator gives a column an exact collation.

        :param definition: the column's type and ``NULL`` or ``NOT NULL``, in SQL.
        :param collation: the collation that :meth:`exact_collation` returns; "" if it returns None.
        """
        raise NotImplementedError


class SQLiteCollations(Collations):
    exact_for_cache = exact_for_shard_key = "BINARY"
    remedy = ", or with no db_collation"

    def equality(self, collation: str | None) -> TextEquality:
        return TextEquality(collation is None or collation.upper() == "BINARY")

    def is_inexact_key(self, collation: str, *, is_colocated_with_target: bool) -> bool:
        return not self.equality(collation).is_exact


class MySQLCollations(Collations):
    """The exact collations of MySQL and MariaDB, and which texts other collations treat as equal."""

    exact_for_cache = "utf8mb4_bin"
    exact_for_shard_key = MARIADB.exact_collation
    remedy = (
        f", or with db_collation={MARIADB.exact_collation!r} (MariaDB)"
        f" or {MYSQL.exact_collation!r} (MySQL)"
    )

    def equality(self, collation: str | None) -> TextEquality:
        # Without the name of a collation, the default collation of the table applies. It is unknown
        # here and seldom exact, so it counts as inexact.
        name = (collation or "").lower()
        if name == "binary":
            return TextEquality(True)
        return TextEquality(name.endswith("_bin"), not ("nopad" in name or "_0900_" in name))

    def is_inexact_key(self, collation: str, *, is_colocated_with_target: bool) -> bool:
        # For a foreign key, ``collation`` is that of its target. If the target's table is not on
        # the shards, the collation of the key's own column is uncertain, because a migration of the
        # key's app may have made it exact. So the result is False.
        return is_colocated_with_target and not is_exact_collation(collation)

    def exact_collation(self, connection: Any) -> str | None:
        return MySQLFlavor.of(connection).exact_collation

    def exact_column_sql(self, table: str, column: str, definition: str, collation: str) -> str:
        kind = definition.removesuffix(" NOT NULL").removesuffix(" NULL")
        null = definition.removeprefix(kind)
        return f"ALTER TABLE `{table}` MODIFY `{column}` {kind} COLLATE {collation}{null}"


class PostgreSQLCollations(Collations):
    """The collations of PostgreSQL.

    The default collation of a database is always exact: PostgreSQL permits only a deterministic
    one, which treats texts as equal only if their bytes are equal.
    """

    def equality(self, collation: str | None) -> TextEquality:
        return TextEquality(collation is None or collation.lower() in ("c", "posix", "ucs_basic"))

    def exact_column_sql(self, table: str, column: str, definition: str, collation: str) -> str:
        kind = definition.removesuffix(" NOT NULL").removesuffix(" NULL")
        if not kind.startswith(("character varying", "text")):
            # Change the type to "text", because other text types, such as citext, compare in their
            # own way.
            kind = "text"
        return f'ALTER TABLE "{table}" ALTER COLUMN "{column}" TYPE {kind} COLLATE "C"'


def is_exact_collation(collation: str) -> bool:
    """Whether a collation of MySQL or MariaDB compares every character, including spaces at the end."""
    name = collation.lower()
    return name == "binary" or name.endswith(("_nopad_bin", "_0900_bin"))
