"""The hook that checks, before each statement, how the database compares shard keys that are text.

A collation may treat two texts as equal that the router sends to different shards. This layer does
not know which columns are shard keys. So the app provides a :class:`KeyGuard`, which the compilers
(:mod:`sharded_orm.backends.write_hooks.compilers`) and ``sharded_orm.scatter`` call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sharded_orm.topology.model import Shard

#: The largest number of schemas whose column types one query reads.
BATCH = 500


@dataclass(frozen=True)
class ColumnType:
    """The type of a column, as the server's catalog describes it.

    :param data_type: name of the type: ``varchar``, ``bigint``, … For a domain of PostgreSQL, the name
        of its base type.
    :param collation: name of the collation; None for types without one, such as numbers and bytes.
    :param length: the most characters that fit (bytes for ``tinytext``, ``text``, …); None for types
        without a length, such as numbers.
    :param definition: the type and ``NULL`` or ``NOT NULL``, in SQL.
    :param is_exact: whether the database treats two texts in this column as equal only if they are the
        same. Also True for a column without a collation.
    """

    data_type: str
    collation: str | None
    length: int | None
    definition: str
    is_exact: bool

    def holds(self, text: str) -> bool:
        """Whether the column can store ``text`` with all its characters.

        If a text is too long, the server drops trailing spaces without an error, in any SQL mode.
        """
        if self.length is None or self.collation is None:
            return True
        size = len(text) if self.data_type == "varchar" else len(text.encode(errors="replace"))
        return size <= self.length


#: The types of columns, as a nested dict: alias of a shard -> name of a table -> name of a column
#: -> type.
ColumnTypes = dict[str, dict[str, dict[str, ColumnType]]]


class KeyGuard(Protocol):
    """Checks shard keys that are text. A layer that knows the models implements it."""

    def guards(self, group: str, tables: Iterable[str]) -> bool:
        """Whether one of ``tables``, of a shard group, has a shard key that is text.

        If not, :meth:`check` has nothing to check for these tables in this process.
        """

    def check(self, connection: Any, shards: Sequence[Shard], tables: Iterable[str]) -> None:
        """Raise an error if the database and the router compare a shard key of ``tables`` differently.

        Called before each statement. Cheap, except before the first statement on a table.

        :param shards: the shards that the statement uses, all on one node.
        :param connection: a connection object of that node. If there is only one shard, it is that
            shard's connection object.
        """

    def check_rows(self, shard: Shard, query: Any) -> None:
        """Raise an error if ``query`` inserts a row whose text shard key would be truncated.

        Called after :meth:`check` for the table of ``query``.
        """


_guard: KeyGuard | None = None


def provide_guard(guard: KeyGuard) -> None:
    """Set the object whose methods :func:`check` and :func:`check_rows` call to check shard keys.

    The app calls this function once when it is ready.
    """
    global _guard
    _guard = guard


def guards(group: str, tables: Iterable[str]) -> bool:
    """Return what :meth:`KeyGuard.guards` of the object that the app has provided returns.

    If there is none yet, return True, because it may be provided later.
    """
    return _guard is None or _guard.guards(group, tables)


def check(connection: Any, shards: Sequence[Shard], tables: Iterable[str]) -> None:
    """Call :meth:`KeyGuard.check` of the object that the app has provided. Does nothing if there is
    none.
    """
    if _guard is not None:
        _guard.check(connection, shards, tables)


def check_rows(shard: Shard, query: Any) -> None:
    """Call :meth:`KeyGuard.check_rows` of the object that the app has provided. Does nothing if there
    is none.
    """
    if _guard is not None:
        _guard.check_rows(shard, query)
