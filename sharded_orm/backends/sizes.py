"""Sizes of shards and of their tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ShardSize:
    """The size of one shard, as its server knows it without counting."""

    #: The size of tables and indexes; on SQLite that of the file.
    bytes: int
    #: An estimate; None if the server has none.
    rows: int | None


@dataclass(frozen=True, slots=True)
class TableSize:
    """The size of one table, as its server knows it within a moment."""

    name: str
    rows: int
    #: How good ``rows`` is: SQLite stops counting at a bound.
    rows_are: Literal["exact", "estimated", "at least"]
    #: The size of the table and its indexes; None if the server does not know it.
    bytes: int | None
