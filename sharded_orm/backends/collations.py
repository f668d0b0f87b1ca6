"""Which texts a kind of database takes for equal, judged by the name of the collation. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple


class TextEquality(NamedTuple):
    """How a collation compares text.

    :param is_exact: equal texts have the same characters, but for spaces at the end if it pads.
    :param pads: spaces at the end do not count.
    """

    is_exact: bool
    pads: bool = False


class Collations:
    """The collations of a database that we do not know."""

    #: The collation to declare for keys of a cached model, and for shard keys. They differ if one
    #: pads: the cache takes padding into account, the router does not.
    exact_for_cache = "C"
    exact_for_shard_key = "C"
    #: How to declare an exact shard key without ``ExactCharField``, as the end of a sentence.
    remedy = ""

    def equality(self, collation: str | None) -> TextEquality:
        """Return how text of ``collation`` compares; None is the default of the database."""
        return TextEquality(False)

    def is_inexact_key(self, collation: str, *, is_colocated_with_target: bool) -> bool:
        """Whether a shard key with this declared ``collation`` is certainly not compared exactly.

        :param is_colocated_with_target: migrations of the field that declares it run on the key's shards.
        """
        return False

    def exact_collation(self, connection: Any) -> str | None:
        """Return the collation that compares every character, spaces at the end among them.

        None if the default does. May ask the server for its version.
        """
        return None


class SQLiteCollations(Collations):
    exact_for_cache = exact_for_shard_key = "BINARY"
    remedy = ", or with no db_collation"

    def equality(self, collation: str | None) -> TextEquality:
        return TextEquality(collation is None or collation.upper() == "BINARY")

    def is_inexact_key(self, collation: str, *, is_colocated_with_target: bool) -> bool:
        return not self.equality(collation).is_exact


class MySQLCollations(Collations):
    """MySQL and MariaDB."""

    exact_for_cache = "utf8mb4_bin"
    exact_for_shard_key = "utf8mb4_nopad_bin"
    remedy = ", or with db_collation='utf8mb4_nopad_bin' (MariaDB) or 'utf8mb4_0900_bin' (MySQL)"

    def equality(self, collation: str | None) -> TextEquality:
        # The default of the table is not known here, and is seldom exact.
        name = (collation or "").lower()
        if name == "binary":
            return TextEquality(True)
        return TextEquality(name.endswith("_bin"), not ("nopad" in name or "_0900_" in name))

    def is_inexact_key(self, collation: str, *, is_colocated_with_target: bool) -> bool:
        # Otherwise a migration on the shards may have changed the column alone.
        return is_colocated_with_target and not is_exact_collation(collation)

    def exact_collation(self, connection: Any) -> str | None:
        # MySQL has it from 8.0.17 on.
        return "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"


class PostgreSQLCollations(Collations):
    """The default of a database is exact: it cannot be a nondeterministic collation."""

    def equality(self, collation: str | None) -> TextEquality:
        return TextEquality(collation is None or collation.lower() in ("c", "posix", "ucs_basic"))


def is_exact_collation(collation: str) -> bool:
    """Whether a collation of MySQL or MariaDB compares every character, spaces at the end among them."""
    name = collation.lower()
    return name == "binary" or name.endswith(("_nopad_bin", "_0900_bin"))
