""":class:`Lookup`, for ``ShardMeta.lookups``. Models import this module, so it imports no models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lookup:
    """A declaration in ``ShardMeta.lookups``: rows are found by this field, without the shard key.

    :param field: name of a field of the model's own table. The bare name in ``lookups`` means the same
        as ``Lookup(name)``.
    :param unique: whether no two rows may have the same value, on any shards. NULL is not a value.
    :param table: name of the model with the entries, ``"app.Model"``, which derives from
        :class:`~sharded_orm.contrib.lookups.tables.LookupTable`. None (the default) means the table of
        the global database.
    """

    field: str
    unique: bool = False
    table: str | None = None
