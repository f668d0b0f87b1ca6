"""The tables of mirrors: an outbox of writes, and the versions of rows. Every shard has both tables."""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

from django.db import models

from sharded_orm.models.fields.text import ExactCharField


class OutboxRow(models.Model):
    """A record that a row of a source was written, and that its mirrors may not have the change
    yet.

    The transaction of the write inserts the record, on the shard of the source. The record names
    the row and not the new values: a delivery reads the row.

    Among the records of one row, ``id`` grows in the order of the commits: the write holds the lock
    of the row when the database assigns the id.
    """

    id: models.BigAutoField[int, int] = models.BigAutoField(primary_key=True)
    #: The label of the source, such as ``photos.comment``.
    source: models.CharField[str, str] = ExactCharField(max_length=100)
    #: The primary key of the source's row that was written, as text.
    row: models.CharField[str, str] = ExactCharField(max_length=255)
    #: The shard key of the row, as text. A relay needs it to find the row, which may have moved to
    #: another shard with its key.
    key: models.CharField[str, str] = ExactCharField(max_length=255)
    #: JSON: for each attribute of the source that is the shard key of a mirror, the values that the
    #: row may have had before the write, or has after it.
    mirror_keys: models.TextField[str, str] = models.TextField(default="{}")
    #: A number that grows each time the shard key moves to another shard. Versions begin with it,
    #: because the values of ``id`` in the outbox of the new shard may be lower.
    epoch: models.BigIntegerField[int, int] = models.BigIntegerField(default=0)
    written_at: models.DateTimeField[datetime, datetime] = models.DateTimeField()
    #: How many deliveries of the row by relays have failed. Failures because of an outage do not
    #: count.
    attempts: models.PositiveSmallIntegerField[int, int] = models.PositiveSmallIntegerField(
        default=0
    )
    error: models.TextField[str, str] = models.TextField(default="")

    class Meta:
        default_permissions: ClassVar = ()

    def __str__(self) -> str:
        return f"{self.source} {self.row}, written at {self.written_at}"


class RowVersion(models.Model):
    """The version of a row of a mirror on this shard. It is kept after the row was removed.

    A row of the mirror is written only while its RowVersion is locked, and only with a higher
    version. Each shard of the source numbers its writes by itself, so versions of different shard
    keys cannot be compared.
    """

    pk = models.CompositePrimaryKey("mirror", "row")
    #: The label of the mirror.
    mirror: models.CharField[str, str] = ExactCharField(max_length=100)
    row: models.CharField[str, str] = ExactCharField(max_length=255)
    #: The shard key that the row of the source had, as text; NULL if it was not known.
    key: models.CharField[str | None, str | None] = ExactCharField(max_length=255, null=True)
    version: models.BigIntegerField[int, int] = models.BigIntegerField()

    class Meta:
        default_permissions: ClassVar = ()

    def __str__(self) -> str:
        return f"{self.mirror} {self.row}: {self.version}"
