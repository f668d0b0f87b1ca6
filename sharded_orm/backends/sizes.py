"""How large a shard is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardSize:
    """Of one shard, as its server tells without counting."""

    #: Of tables and indexes; on SQLite of the file.
    bytes: int
    #: An estimate; None where the server has none.
    rows: int | None
