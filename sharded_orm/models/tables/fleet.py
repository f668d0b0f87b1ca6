"""Models without tables, which stand for shards and topology versions in the admin.

The admin's pages about shards and topology need these models for permissions and log entries. Rows
would only repeat the topology.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

from django.db import models

M = TypeVar("M", bound=models.Model)


class NoRows(models.Manager[M]):
    """A manager that returns no rows and sends no queries, for admin views such as ``/admin/r/…``."""

    def get_queryset(self) -> models.QuerySet[M]:
        return super().get_queryset().none()


class ShardMap(models.Model):
    """A shard or a range of shards, named like ``photos_00042`` or ``photos 0-511``."""

    name: models.CharField[str, str] = models.CharField(max_length=200, primary_key=True)

    objects: ClassVar[NoRows[ShardMap]] = NoRows()

    class Meta:
        app_label = "sharded_orm"
        managed = False
        base_manager_name = "objects"
        default_permissions: ClassVar = ("view", "change")
        verbose_name = "shard"
        verbose_name_plural = "shards"

    def __str__(self) -> str:
        return self.name


class TopologyVersion(models.Model):
    """A version of the topology. The versions themselves are stored by the topology's source."""

    version: models.BigIntegerField[int, int] = models.BigIntegerField(primary_key=True)

    objects: ClassVar[NoRows[TopologyVersion]] = NoRows()

    class Meta:
        app_label = "sharded_orm"
        managed = False
        base_manager_name = "objects"
        default_permissions: ClassVar = ("view", "change")
        verbose_name = "topology version"
        verbose_name_plural = "topology"

    def __str__(self) -> str:
        return f"version {self.version}"
