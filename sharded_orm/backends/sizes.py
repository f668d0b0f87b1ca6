"""Types for the sizes of shards and of their tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ShardSize:
    """The size of one shard, as the server reports it without counting rows."""

    #: Total bytes of the shard's tables and indexes (SQLite: of its file).
    bytes: int
    #: Estimated number of rows in all tables of the shard; None if the server has no estimate.
    rows: int | None


@dataclass(frozen=True, slots=True)
class TableSize:
    """The size of one table. Cheap to read: servers estimate the number of rows, and on SQLite,
    rows are counted up to a limit.
    """

    name: str
    rows: int
    #: How exact the number in ``rows`` is. "at least" means that SQLite stopped counting at this
    #: number, so the table may have more rows.
    rows_are: Literal["exact", "estimated", "at least"]
    #: Bytes of the table and its indexes; None if the server does not know.
    bytes: int | None
