"""The tables of mirrors: an outbox of writes, and the versions of rows. Every shard has both tables."""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

from django.db import models

from sharded_orm.models.fields.text import ExactCharField


class OutboxRow(models.Model):
    """Records that a row of a source was written, and that its mirrors may not have the change yet.

    The transaction of the write inserts this record on the shard of the source. The record has the
    id of the row but not its new values, because a delivery reads the row.

    If a row is written several times, the last commit has the highest ``id``, because the database
    assigns the id while the write holds the lock of the row.
    """

    id: models.BigAutoField[int, int] = models.BigAutoField(primary_key=True)
    #: The label of the source, such as ``photos.comment``.
    source: models.CharField[str, str] = ExactCharField(max_length=100)
    #: The primary key of the source's row that was written, as text.
    row: models.CharField[str, str] = ExactCharField(max_length=255)
    #: The shard key of the row, as text. A relay needs it to find the row, because the key may have
    #: moved to another shard since.
    key: models.CharField[str, str] = ExactCharField(max_length=255)
    #: JSON that maps attributes of the source to lists of values, as text. The attributes are the
    #: shard keys of mirrors. For example, ``{"author_id": ["3", "7"]}`` says that the write may
    #: have changed ``author_id`` from 3 to 7.
    mirror_keys: models.TextField[str, str] = models.TextField(default="{}")
    #: A number that grows each time the shard key moves to another shard. It is the upper part of
    #: the version. So the versions after a move are higher than those before it, although the
    #: outbox of the new shard may have lower ids.
    epoch: models.BigIntegerField[int, int] = models.BigIntegerField(default=0)
    written_at: models.DateTimeField[datetime, datetime] = models.DateTimeField()
    #: The number of times that relays have failed to deliver the row. Outages do not count.
    attempts: models.PositiveSmallIntegerField[int, int] = models.PositiveSmallIntegerField(
        default=0
    )
    error: models.TextField[str, str] = models.TextField(default="")

    class Meta:
        default_permissions: ClassVar = ()

    def __str__(self) -> str:
        return f"{self.source} {self.row}, written at {self.written_at}"


class RowVersion(models.Model):
    """The version of one row of a mirror on this shard. It stays after the row was removed, so that
    a late delivery does not insert the row again.

    A writer of the mirror locks this version first, and writes the row only if its own version is
    higher. Each shard of the source numbers its writes by itself, so versions of different shard
    keys cannot be compared.
    """

    pk = models.CompositePrimaryKey("mirror", "row")
    #: The label of the mirror.
    mirror: models.CharField[str, str] = ExactCharField(max_length=100)
    row: models.CharField[str, str] = ExactCharField(max_length=255)
    #: The shard key of the source's row at the time of the write, as text; NULL if not known.
    key: models.CharField[str | None, str | None] = ExactCharField(max_length=255, null=True)
    version: models.BigIntegerField[int, int] = models.BigIntegerField()

    class Meta:
        default_permissions: ClassVar = ()

    def __str__(self) -> str:
        return f"{self.mirror} {self.row}: {self.version}"
