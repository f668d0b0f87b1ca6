"""How large a shard is, and its tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ShardSize:
    """Of one shard, as its server tells without counting."""

    #: Of tables and indexes; on SQLite of the file.
    bytes: int
    #: An estimate; None where the server has none.
    rows: int | None


@dataclass(frozen=True, slots=True)
class TableSize:
    """One table of a shard, as its server tells within a moment."""

    name: str
    rows: int
    #: What ``rows`` is: counting is given up at a bound.
    rows_are: Literal["exact", "estimated", "at least"]
    #: Of the table and its indexes; None where the server does not know.
    bytes: int | None
