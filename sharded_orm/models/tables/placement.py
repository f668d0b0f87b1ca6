"""The directory: a table with the shard of each key, and the store that reads and writes the table
(Y2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.constants import OnConflict
from django.db.models.sql import InsertQuery

from sharded_orm.autonomous_connections import AutonomousConnections
from sharded_orm.models.fields.text import ExactCharField

BATCH = 500


class Placement(models.Model):
    """A shard key of one group, and the number of the shard that has the rows of the key."""

    group: models.CharField[str, str] = ExactCharField(max_length=64)
    key: models.CharField[str, str] = ExactCharField(max_length=100)
    shard: models.PositiveIntegerField[int, int] = models.PositiveIntegerField()
    placed_at: models.DateTimeField[datetime, datetime] = models.DateTimeField(auto_now_add=True)

    class Meta:
        app_label = "sharded_orm"
        db_table = "sharded_orm_directory"
        constraints = [
            models.UniqueConstraint(fields=["group", "key"], name="sharded_orm_directory_key")
        ]
        indexes = [models.Index(fields=["group", "shard"], name="sharded_orm_directory_shard")]

    def __str__(self) -> str:
        return f"{self.key} of {self.group} on shard {self.shard}"


class DatabaseDirectory:
    """A store of placements (the shards of keys) in the directory table on ``alias``; thread-safe.

    Each statement is autonomous (committed independently of the caller's transaction): that
    transaction can neither hide nor roll back a placement. Inside Django's ``TestCase`` the
    statements are part of the test's transaction, and the returned placements are marked as not
    committed.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._connections = AutonomousConnections()

    def find(self, group: str, keys: Iterable[str]) -> dict[str, tuple[int, bool]]:
        connection, committed = self._connections.get(self._alias)
        return self._find(connection, committed, group, list(keys))

    def place(self, group: str, placements: Mapping[str, int]) -> dict[str, tuple[int, bool]]:
        connection, committed = self._connections.get(self._alias)
        fields = [f for f in Placement._meta.concrete_fields if not f.primary_key]
        rows: list[models.Model] = [
            Placement(group=group, key=k, shard=n) for k, n in sorted(placements.items())
        ]
        for start in range(0, len(rows), BATCH):
            # If several processes insert the same key, the first insert wins. All these processes
            # then read the stored placement with _find().
            query = InsertQuery(Placement, on_conflict=OnConflict.IGNORE)
            query.insert_values(fields, rows[start : start + BATCH])
            query.get_compiler(connection=connection).execute_sql()
        return self._find(connection, committed, group, list(placements))

    def _find(
        self, connection: BaseDatabaseWrapper, committed: bool, group: str, keys: list[str]
    ) -> dict[str, tuple[int, bool]]:
        placements = {}
        for start in range(0, len(keys), BATCH):
            query = (
                Placement.objects.using(self._alias)
                .filter(group=group, key__in=keys[start : start + BATCH])
                .values_list("key", "shard")
                .query
            )
            for key, number in query.get_compiler(connection=connection).results_iter():
                placements[key] = (number, committed)
        return placements
