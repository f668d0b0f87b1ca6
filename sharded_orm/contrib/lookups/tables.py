"""The columns of the entries of lookups.

Also the base class for a model of the project whose table holds entries on shards (Pinterest, P11).
"""

from __future__ import annotations

from django.db import models

from sharded_orm.models import ShardedModel
from sharded_orm.models.fields import ExactCharField


class EntryColumns(models.Model):
    """An entry of a lookup, which says that a row with a certain value has a certain shard key.

    Each committed row has its entry. An entry may be without a row. The row may not be committed
    yet, it may have been deleted, or its writer may have died before it stored the row.
    """

    #: The lookup: ``app.model.field``.
    lookup: models.CharField[str, str] = ExactCharField(max_length=200)
    value: models.CharField[str, str] = ExactCharField(max_length=255)
    #: Empty in a unique lookup. In other lookups, a text that distinguishes the row's entry from
    #: the entries of other rows with the same value.
    slot: models.CharField[str, str] = ExactCharField(max_length=64)
    #: The shard key.
    key: models.CharField[str, str] = ExactCharField(max_length=100)
    #: A random name of the statement that has written the entry last.
    token: models.CharField[str, str] = ExactCharField(max_length=32)
    #: Whether the transaction that has written the entry last may still be open. The end of the
    #: transaction may be recorded some seconds late.
    is_open: models.BooleanField[bool, bool] = models.BooleanField()
    #: The database session that has written the entry; empty if the database does not identify
    #: sessions.
    writer: models.CharField[str, str] = ExactCharField(max_length=64)
    #: The time when the entry was written, in seconds since 1970.
    written_at: models.FloatField[float, float] = models.FloatField()

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.lookup}={self.value}: key {self.key}"


class LookupTable(ShardedModel, EntryColumns):
    """Base class of a project's model with the entries of lookups, sharded by the value itself.

    ::

        class EmailEntry(LookupTable):
            class ShardMeta(LookupTable.ShardMeta):
                group = "emails"

    The group has the strategy ``"modulo"``: the md5 of a value determines the shard of its entries.
    The rows that are found by the entries are in a different group. Only the lookups write to the
    table.
    """

    id: models.BigAutoField[int, int] = models.BigAutoField(primary_key=True)
    ids_are_internal = True
    #: So the admin offers no changes, which would make the lookup miss rows.
    _is_written_by_library = True

    class Meta:
        abstract = True
        constraints = [
            models.UniqueConstraint(
                fields=["lookup", "value", "slot"], name="%(app_label)s_%(class)s_row"
            )
        ]
        indexes = [models.Index(fields=["token"], name="%(app_label)s_%(class)s_token")]

    class ShardMeta:
        shard_key = "value"
