"""Checks, before each statement, that the database distinguishes all texts that the router
distinguishes as shard keys.

The router treats "a" and "A" as different keys. If the collation of the column treats them as
equal, a query for the key "a" also finds rows of the key "A". The backends do not know which
columns are shard keys. So the app provides a :class:`KeyGuard`, which the compilers
(:mod:`sharded_orm.backends.write_hooks.compilers`) and ``sharded_orm.scatter`` call through this
module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sharded_orm.topology.model import Shard

#: The number of shards whose column types one query reads, at most.
BATCH = 500


@dataclass(frozen=True)
class ColumnType:
    """The type of a column, as the server's catalog describes it.

    :param data_type: the name of the type: ``varchar``, ``bigint``, … For a domain of PostgreSQL,
        the name of its base type.
    :param collation: the name of the collation; None for types without one, such as numbers and
        bytes.
    :param length: the largest number of characters that fit (of bytes for ``tinytext``, ``text``,
        …); None for types without a length, such as numbers.
    :param definition: the type and ``NULL`` or ``NOT NULL``, in SQL.
    :param is_exact: whether the database treats two texts in this column as equal only if they are
        the same. Also True for a column without a collation.
    """

    data_type: str
    collation: str | None
    length: int | None
    definition: str
    is_exact: bool

    def holds(self, text: str) -> bool:
        """Whether ``text`` fits into the column with all its characters.

        False even if only trailing spaces do not fit. The server would drop them without an error,
        in any SQL mode, and so would store another text.
        """
        if self.length is None or self.collation is None:
            return True
        size = len(text) if self.data_type == "varchar" else len(text.encode(errors="replace"))
        return size <= self.length


#: The types of columns of several shards. For example, ``types["photos_00042"]["photo"]["owner"]``
#: is the type of the column ``owner`` of the table ``photo`` on one shard.
ColumnTypes = dict[str, dict[str, dict[str, ColumnType]]]


class KeyGuard(Protocol):
    """Checks shard keys that are texts. ``sharded_orm.models``, which knows the models, implements
    it.
    """

    def guards(self, group: str, tables: Iterable[str]) -> bool:
        """Whether the shard key of any of ``tables`` is a text, such as a ``CharField``.

        If False, :meth:`check` need not be called for these tables in this process.
        """

    def check(self, connection: Any, shards: Sequence[Shard], tables: Iterable[str]) -> None:
        """Raise an error if the router distinguishes two shard keys, such as "a" and "A", that are
        equal for the database in a column of ``tables``.

        Called before each statement. Cheap, except before the first statement on a table.

        :param connection: a connection object of the node of ``shards``. If there is only one
            shard, it is that shard's connection object.
        :param shards: the shards that the statement uses, all on one node.
        """

    def check_rows(self, shard: Shard, query: Any) -> None:
        """Raise an error if ``query`` inserts a row whose shard key is a text that is too long for
        its column. The database would cut it, and so store another key.

        Called after :meth:`check` for the table of ``query``.
        """


_guard: KeyGuard | None = None


def provide_guard(guard: KeyGuard) -> None:
    """Set the object that :func:`guards`, :func:`check` and :func:`check_rows` call.

    The app calls this function once when it is ready.
    """
    global _guard
    _guard = guard


def guards(group: str, tables: Iterable[str]) -> bool:
    """Whether :func:`check` must be called for statements on ``tables``; see
    :meth:`KeyGuard.guards`.

    True as long as the app has not provided a :class:`KeyGuard`, because it may do so later.
    """
    return _guard is None or _guard.guards(group, tables)


def check(connection: Any, shards: Sequence[Shard], tables: Iterable[str]) -> None:
    """Call :meth:`KeyGuard.check` of the object that the app has provided. Before that, do nothing."""
    if _guard is not None:
        _guard.check(connection, shards, tables)


def check_rows(shard: Shard, query: Any) -> None:
    """Call :meth:`KeyGuard.check_rows` of the object that the app has provided. Before that, do
    nothing.
    """
    if _guard is not None:
        _guard.check_rows(shard, query)
