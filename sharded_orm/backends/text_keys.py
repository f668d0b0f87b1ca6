"""The hook between the backends and the collations of keys, and what a database tells of a column.

Before the first statement on a table of a shard, somebody above this layer may want to know how
the database compares the text that the router takes for a key. That is provided by the app when
it is ready; the compilers (:mod:`sharded_orm.backends.write_hooks.compilers`) and the scatter ask it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sharded_orm.backends.collations import is_exact_collation

if TYPE_CHECKING:
    from sharded_orm.topology.model import Shard

#: Schemas that one statement asks.
BATCH = 500
_TEXT_TYPES = frozenset({"varchar", "tinytext", "text", "mediumtext", "longtext"})


@dataclass(frozen=True)
class ColumnType:
    """A column as MySQL's ``information_schema`` describes it.

    :param data_type: ``varchar``, ``bigint``, …
    :param collation: None where values are not compared by one: numbers, bytes.
    :param length: of text: the most characters (of ``*text``: bytes) that fit.
    :param definition: type and NULL, as they stand in SQL.
    """

    data_type: str
    collation: str | None
    length: int | None
    definition: str

    @property
    def is_exact(self) -> bool:
        """Whether two texts are equal for the database only if they are the same.

        A binary collation is not enough: most of them pad, so that 'Ada' = 'Ada '. Nor is the type
        ``CHAR``, from which spaces at the end are dropped.
        """
        if self.collation is None:
            return True
        return self.data_type in _TEXT_TYPES and is_exact_collation(self.collation)

    def holds(self, text: str) -> bool:
        """Whether ``text`` fits. Spaces that do not fit are dropped, in every mode of the server."""
        if self.length is None or self.collation is None:
            return True
        size = len(text) if self.data_type == "varchar" else len(text.encode(errors="replace"))
        return size <= self.length


#: Alias of a shard -> table -> column.
ColumnTypes = dict[str, dict[str, dict[str, ColumnType]]]


class KeyGuard(Protocol):
    """Who knows the keys of models."""

    def check(self, connection: Any, shards: Sequence[Shard], tables: Iterable[str]) -> None:
        """Raise unless ``tables`` on ``shards`` compare keys as the router does.

        Called before each statement: it is cheap once the tables were looked at.

        :param connection: of the node of ``shards``; of the shard itself if there is one only.
        """

    def check_rows(self, shard: Shard, query: Any) -> None:
        """Raise if a key of the rows that ``query`` inserts is stored in part only.

        Called after :meth:`check` of the table.
        """


_guard: KeyGuard | None = None


def provide_guard(guard: KeyGuard) -> None:
    """Tell who knows the keys of models. The app does so when it is ready."""
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
