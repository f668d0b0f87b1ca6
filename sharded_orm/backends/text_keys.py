"""The hook by which statements check how the database compares shard keys that are text.

A collation may take texts for equal that the router sends to different shards. The models above
this layer know which columns are keys, so the app provides a :class:`KeyGuard` when it is ready.
Before each statement, the compilers (:mod:`sharded_orm.backends.write_hooks.compilers`) and the
scatter, which reads many shards, call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sharded_orm.backends.collations import is_exact_collation

if TYPE_CHECKING:
    from sharded_orm.topology.model import Shard

#: The most schemas that one statement reads.
BATCH = 500
_TEXT_TYPES = frozenset({"varchar", "tinytext", "text", "mediumtext", "longtext"})


@dataclass(frozen=True)
class ColumnType:
    """A column as MySQL's ``information_schema`` describes it.

    :param data_type: ``varchar``, ``bigint``, …
    :param collation: None for values without one, such as numbers and bytes.
    :param length: the most characters of text (for ``*text``: bytes) that fit.
    :param definition: type and NULL, in SQL.
    """

    data_type: str
    collation: str | None
    length: int | None
    definition: str

    @property
    def is_exact(self) -> bool:
        """Whether the database takes two texts for equal only if they are the same.

        Most binary collations are not exact: they pad, so that 'Ada' = 'Ada '. Nor is the type
        ``CHAR``, which drops spaces at the end.
        """
        if self.collation is None:
            return True
        return self.data_type in _TEXT_TYPES and is_exact_collation(self.collation)

    def holds(self, text: str) -> bool:
        """Whether ``text`` fits. In every mode, the server drops spaces that do not."""
        if self.length is None or self.collation is None:
            return True
        size = len(text) if self.data_type == "varchar" else len(text.encode(errors="replace"))
        return size <= self.length


#: Alias of a shard -> table -> column.
ColumnTypes = dict[str, dict[str, dict[str, ColumnType]]]


class KeyGuard(Protocol):
    """Checks shard keys of text; it knows the models."""

    def check(self, connection: Any, shards: Sequence[Shard], tables: Iterable[str]) -> None:
        """Raise unless ``tables`` on ``shards`` compare keys as the router does.

        Called before each statement; cheap after the first on a table.

        :param connection: of the node of ``shards``; of the shard itself if there is only one.
        """

    def check_rows(self, shard: Shard, query: Any) -> None:
        """Raise if a key of a row that ``query`` inserts would be truncated.

        Called after :meth:`check` of the table.
        """


_guard: KeyGuard | None = None


def provide_guard(guard: KeyGuard) -> None:
    """Set the guard. The app calls this when it is ready."""
    global _guard
    _guard = guard


def check(connection: Any, shards: Sequence[Shard], tables: Iterable[str]) -> None:
    """See :meth:`KeyGuard.check`."""
    if _guard is not None:
        _guard.check(connection, shards, tables)


def check_rows(shard: Shard, query: Any) -> None:
    """See :meth:`KeyGuard.check_rows`."""
    if _guard is not None:
        _guard.check_rows(shard, query)
