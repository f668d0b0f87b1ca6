"""The tables of the lookups, in the global database."""

from __future__ import annotations

from datetime import datetime

from django.db import models

from sharded_orm.contrib.lookups.tables import EntryColumns
from sharded_orm.models.fields import ExactCharField


class LookupEntry(EntryColumns):
    """An entry of a lookup (a value and the shard key of its row) in the global database."""

    class Meta:
        db_table = "sharded_orm_lookup"
        constraints = [
            models.UniqueConstraint(
                fields=["lookup", "value", "slot"], name="sharded_orm_lookup_row"
            )
        ]
        indexes = [models.Index(fields=["token"], name="sharded_orm_lookup_token")]


class LookupState(models.Model):
    """The state of a lookup.

    If ``served_since`` is set, all rows have their entries, and queries may use the lookup.
    """

    lookup: models.CharField[str, str] = ExactCharField(max_length=200, primary_key=True)
    served_since: models.DateTimeField[datetime | None, datetime | None] = models.DateTimeField(
        null=True
    )
    #: Whether the lookup was unique when its entries were built.
    unique: models.BooleanField[bool, bool] = models.BooleanField()
    #: The label of the project's model whose table stores the entries. Empty if the entries are in
    #: the global database.
    table: models.CharField[str, str] = ExactCharField(max_length=200)

    class Meta:
        db_table = "sharded_orm_lookup_state"

    def __str__(self) -> str:
        return self.lookup
