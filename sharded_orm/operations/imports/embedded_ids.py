"""Refuse imported rows with an id that names the wrong shard.

An embedded id contains the number of a shard. If the row were stored on another shard, no look-up
by the id would find it.
"""

from __future__ import annotations

from sharded_orm.models.fields.generated_id import EmbeddedShardMixin
from sharded_orm.operations.exceptions import ImportRefused
from sharded_orm.operations.imports.source_tables import SourceRow, SourceTable


def refuse_id_of_other_shard(table: SourceTable, row: SourceRow, number: int) -> None:
    """Raise an error if an embedded id of ``row`` contains a shard number other than ``number``.

    :param number: the number of the shard on which the row will be stored.
    :raises ImportRefused: there is such an id. A look-up by this id would go to the wrong shard.
    """
    for column, value in zip(table.columns, row.values, strict=True):
        if not isinstance(column.field, EmbeddedShardMixin) or value is None:
            continue
        shift, bits = column.field.embedded_shard
        embedded = (value >> shift) & ((1 << bits) - 1)
        if embedded != number:
            raise ImportRefused(
                [
                    f"{table.label}(pk={row.pk!r}) has {column.name}={value!r}, an id of shard"
                    f" {embedded!r}, but its key belongs on shard {number!r}: give the row an id of"
                    " that shard"
                ]
            )
