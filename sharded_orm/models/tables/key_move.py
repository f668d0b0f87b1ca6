"""The table of key moves: it records which shard keys are moving from one shard to another."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from django.db import models

from sharded_orm.models.fields.text import ExactCharField


class KeyMove(models.Model):
    """The move of one shard key from one shard to another.

    ``in_flight`` is true while the key is moving, and NULL afterwards. The unique constraint on
    group, key and ``in_flight`` ignores NULL, so a key has at most one unfinished move. During the
    move, no process remembers the key's shard.

    One row is not a move and serves only as a lock: its group is empty, and ``in_flight`` is false.
    A process locks this row while it announces moves, so that other processes that announce moves
    wait. (In an empty table, there would be no row to lock.)

    The table is in the database of the directory. So one transaction can change the key's shard and
    record the new phase.
    """

    group: models.CharField[str, str] = ExactCharField(max_length=64)
    #: The text under which the directory, the table with the shard of each key, stores the key.
    key: models.CharField[str, str] = ExactCharField(max_length=100)
    #: The key itself, as text. It can differ from ``key``, because the directory stores some keys
    #: as a digest.
    value: models.TextField[str, str] = models.TextField()
    source: models.PositiveIntegerField[int, int] = models.PositiveIntegerField()
    target: models.PositiveIntegerField[int, int] = models.PositiveIntegerField()
    phase: models.CharField[str, str] = models.CharField(max_length=16, default="announced")
    in_flight: models.BooleanField[bool | None, bool | None] = models.BooleanField(null=True)
    #: The progress of the move, such as counts of rows and chunks. An interrupted move is resumed
    #: from it.
    position: models.JSONField[dict[str, Any], dict[str, Any]] = models.JSONField(default=dict)
    error: models.TextField[str, str] = models.TextField(default="")
    announced_at: models.DateTimeField[datetime, datetime] = models.DateTimeField(auto_now_add=True)
    switched_at: models.DateTimeField[datetime | None, datetime | None] = models.DateTimeField(
        null=True
    )
    finished_at: models.DateTimeField[datetime | None, datetime | None] = models.DateTimeField(
        null=True
    )

    class Meta:
        app_label = "sharded_orm"
        db_table = "sharded_orm_key_move"
        default_permissions: ClassVar = ("view",)
        verbose_name = "move of a key"
        verbose_name_plural = "moves of keys"
        constraints = [
            models.UniqueConstraint(
                fields=["group", "key", "in_flight"], name="sharded_orm_key_move_in_flight"
            )
        ]
        indexes = [models.Index(fields=["in_flight"], name="sharded_orm_key_move_open")]

    def __str__(self) -> str:
        return f"{self.value} of {self.group} from shard {self.source} to {self.target}"
