"""The tables of the lookups, in the global database."""

from __future__ import annotations

from datetime import datetime

from django.db import models

from sharded_orm.models.fields import ExactCharField


class LookupEntry(models.Model):
    """The shard key of a row that has a certain value, or of a row that may get it.

    Each committed row has its entry. An entry may be without a row: the row is being written or was
    deleted, or its writer has died.
    """

    #: The lookup: ``app.model.field``.
    lookup: models.CharField[str, str] = ExactCharField(max_length=200)
    value: models.CharField[str, str] = ExactCharField(max_length=255)
    #: Empty in a unique lookup; in others, it tells the row from other rows with the same value.
    slot: models.CharField[str, str] = ExactCharField(max_length=64)
    #: The shard key.
    key: models.CharField[str, str] = ExactCharField(max_length=100)
    #: Names the change that has written the entry last.
    token: models.CharField[str, str] = ExactCharField(max_length=32)
    #: Whether the transaction of this change may still be open, as far as the entry tells.
    is_open: models.BooleanField[bool, bool] = models.BooleanField()
    #: The database session of this transaction; empty if it has no identity.
    writer: models.CharField[str, str] = ExactCharField(max_length=64)
    #: When the entry was written, in seconds since 1970.
    written_at: models.FloatField[float, float] = models.FloatField()

    class Meta:
        db_table = "sharded_orm_lookup"
        constraints = [
            models.UniqueConstraint(
                fields=["lookup", "value", "slot"], name="sharded_orm_lookup_row"
            )
        ]
        indexes = [models.Index(fields=["token"], name="sharded_orm_lookup_token")]

    def __str__(self) -> str:
        return f"{self.lookup}={self.value}: key {self.key}"


class LookupState(models.Model):
    """Whether queries may rely on a lookup: all rows have their entries."""

    lookup: models.CharField[str, str] = ExactCharField(max_length=200, primary_key=True)
    served_since: models.DateTimeField[datetime | None, datetime | None] = models.DateTimeField(
        null=True
    )
    #: Whether its entries are those of a unique lookup.
    unique: models.BooleanField[bool, bool] = models.BooleanField()

    class Meta:
        db_table = "sharded_orm_lookup_state"

    def __str__(self) -> str:
        return self.lookup
