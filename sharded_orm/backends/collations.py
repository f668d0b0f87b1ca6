"""Finds out which texts a database treats as equal, from the name of the collation.

Sends no query, except that :meth:`Collations.exact_collation` may query the server's version.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sharded_orm.mysql_flavor import MARIADB, MYSQL, MySQLFlavor


class TextEquality(NamedTuple):
    """How a collation compares texts.

    :param is_exact: whether two texts are equal only if they have the same characters. For example,
        False if "a" equals "A". Trailing spaces are not considered here.
    :param pads: whether trailing spaces are ignored, so that "a" equals "a ".
    """

    is_exact: bool
    pads: bool = False


class Collations:
    """Says how the collations of one kind of database compare texts. The base class knows no
    collation, and is used for unknown kinds of databases.
    """

    #: A collation that system checks recommend for a field by which cached rows are looked up. It
    #: may ignore trailing spaces, because the cache can ignore them, too.
    exact_for_cache = "C"
    #: A collation that system checks recommend for a shard key. It must compare trailing spaces,
    #: because the router may send "a" and "a " to different shards.
    exact_for_shard_key = "C"
    #: The end of a hint of a system check about a shard key that is a text. The hint recommends
    #: ``ExactCharField``, and this text names what can be used instead.
    remedy = ""

    def equality(self, collation: str | None) -> TextEquality:
        """Return whether ``collation`` compares texts exactly, and whether it ignores trailing spaces.

        :param collation: name of the collation; None for the database's default collation.
        """
        return TextEquality(False)

    def is_inexact_key(self, collation: str, *, is_colocated_with_target: bool) -> bool:
        """Whether this collation makes the database treat different texts as the same shard key.
        False if it is not certain.

        :param collation: the collation that a field in the models declares. For a key that is a
            foreign key, this field is the one to which the key refers.
        :param is_colocated_with_target: whether the column of the key is on the same shards as the
            column of that field. For example, False for a foreign key to a table of the global
            database.
        """
        return False

    def exact_collation(self, connection: Any) -> str | None:
        """Return the collation to give to a column, so that it compares every character, including
        trailing spaces.

        Return None if the database's default collation does so, because no collation has to be
        named then. May query the server's version.
        """
        return None

    def exact_column_sql(self, table: str, column: str, definition: str, collation: str) -> str:
        """Return the SQL statement with which an operator gives a column an exact collation.

        :param definition: the column's type and ``NULL`` or ``NOT NULL``, such as ``varchar(20) NOT
            NULL``.
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
    """Which collations of MySQL and MariaDB compare texts exactly, and which ones ignore trailing
    spaces.
    """

    exact_for_cache = "utf8mb4_bin"
    exact_for_shard_key = MARIADB.exact_collation
    remedy = (
        f", or with db_collation={MARIADB.exact_collation!r} (MariaDB)"
        f" or {MYSQL.exact_collation!r} (MySQL)"
    )

    def equality(self, collation: str | None) -> TextEquality:
        # If the column names no collation, the default collation of the table applies. Its name is
        # not known here, and default collations are seldom exact. So the column counts as inexact.
        name = (collation or "").lower()
        if name == "binary":
            return TextEquality(True)
        return TextEquality(name.endswith("_bin"), not ("nopad" in name or "_0900_" in name))

    def is_inexact_key(self, collation: str, *, is_colocated_with_target: bool) -> bool:
        # For a foreign key, ``collation`` is the one that the target field declares. If the
        # target's table is not on the shards, a migration may have given another collation to the
        # column of the foreign key. So the collation is not certain, and the result is False.
        return is_colocated_with_target and not is_exact_collation(collation)

    def exact_collation(self, connection: Any) -> str | None:
        return MySQLFlavor.of(connection).exact_collation

    def exact_column_sql(self, table: str, column: str, definition: str, collation: str) -> str:
        kind = definition.removesuffix(" NOT NULL").removesuffix(" NULL")
        null = definition.removeprefix(kind)
        return f"ALTER TABLE `{table}` MODIFY `{column}` {kind} COLLATE {collation}{null}"


class PostgreSQLCollations(Collations):
    """The collations of PostgreSQL.

    The default collation of a database always compares texts exactly, because PostgreSQL permits
    only a deterministic one. With a deterministic collation, texts are equal only if their bytes
    are equal.
    """

    def equality(self, collation: str | None) -> TextEquality:
        return TextEquality(collation is None or collation.lower() in ("c", "posix", "ucs_basic"))

    def exact_column_sql(self, table: str, column: str, definition: str, collation: str) -> str:
        kind = definition.removesuffix(" NOT NULL").removesuffix(" NULL")
        if not kind.startswith(("character varying", "text")):
            # Change the type to "text", because other types, such as citext, have their own rules
            # of equality.
            kind = "text"
        return f'ALTER TABLE "{table}" ALTER COLUMN "{column}" TYPE {kind} COLLATE "C"'


def is_exact_collation(collation: str) -> bool:
    """Whether a collation of MySQL or MariaDB compares every character, including spaces at the end."""
    name = collation.lower()
    return name == "binary" or name.endswith(("_nopad_bin", "_0900_bin"))
