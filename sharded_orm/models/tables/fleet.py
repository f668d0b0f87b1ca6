"""Models without tables, which represent shards and topology versions in Django's admin.

The admin needs models for permissions and log entries. Tables for them would only repeat the
topology.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

from django.db import models

M = TypeVar("M", bound=models.Model)


class NoRows(models.Manager[M]):
    """A manager that returns no rows and sends no queries, for models without tables.

    It is needed because admin views such as ``/admin/r/…`` query the manager of any registered
    model.
    """

    def get_queryset(self) -> models.QuerySet[M]:
        return super().get_queryset().none()


class ShardMap(models.Model):
    """Represents a shard, a range of shards or a shard group in the admin.

    ``name`` is, for example, ``photos_00042`` (a shard), ``photos 0-511`` (a range) or ``photos``
    (a group).
    """

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
    """Represents a version of the topology in the admin.

    The versions themselves are stored in the source of the topology, from which processes load it.
    """

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
