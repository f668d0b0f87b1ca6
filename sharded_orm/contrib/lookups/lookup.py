""":class:`Lookup`, for ``ShardMeta.lookups``. Models import this module, so it imports no models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lookup:
    """A declaration in ``ShardMeta.lookups``: rows are found by this field, without the shard key.

    :param field: the name of a field of the model's own table. A bare name in ``ShardMeta.lookups``
        means the same as ``Lookup(name)``.
    :param unique: whether no two rows may have the same value, even if they are on different
        shards. Any number of rows may have NULL.
    :param table: the label ``"app.Model"`` of the model whose table stores the lookup. The model
        derives from :class:`~sharded_orm.contrib.lookups.tables.LookupTable`. None (the default)
        means the table of the global database.
    """

    field: str
    unique: bool = False
    table: str | None = None
