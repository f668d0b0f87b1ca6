"""Find the shards to which imported rows belong."""

from __future__ import annotations

from collections.abc import Sequence

from sharded_orm import runtime
from sharded_orm.models.sharding import row_placement
from sharded_orm.operations.exceptions import ImportRefused
from sharded_orm.operations.imports.embedded_ids import refuse_id_of_other_shard
from sharded_orm.operations.imports.source_tables import SourceRow, SourceTable


def rows_by_alias(table: SourceTable, rows: Sequence[SourceRow]) -> dict[str, list[SourceRow]]:
    """Return lists of ``rows``, keyed by the alias of the shard to which their shard key belongs.

    If a key has no shard yet, a shard is chosen for the key and recorded.
    """
    for row in rows:
        if row.key is None:
            raise ImportRefused([f"{table.label}(pk={row.pk!r}) has no shard key"])
    group = runtime.group(table.options.group)
    numbers = row_placement.place_keys(table.options, {row.key for row in rows})
    by_alias: dict[str, list[SourceRow]] = {}
    for row in rows:
        shard = runtime.shard_in(group, numbers[row.key])
        refuse_id_of_other_shard(table, row, shard.number)
        by_alias.setdefault(shard.alias, []).append(row)
    return by_alias
