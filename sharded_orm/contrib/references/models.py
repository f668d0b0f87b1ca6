"""The base class of reference models, and two tables: the versions of reference tables, and the
rows that were changed.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from django.db import models

from sharded_orm.contrib.references.backend import require_hooks
from sharded_orm.models.fields.text import ExactCharField
from sharded_orm.models.global_models import GlobalModel


class ReferenceModel(GlobalModel):
    """A model whose rows are in the global database, with a copy of each row on every shard.

    Sharded models refer to it by ordinary foreign keys with a database constraint, and their
    queries may join it. All writes go to the global database, even if the instance was read from a
    copy. The copies are updated after the commit.
    """

    _has_copies_on_shards: ClassVar[bool] = True

    class Meta:
        abstract = True

    def save_base(self, *args: Any, **kwargs: Any) -> None:
        require_hooks()
        super().save_base(*args, **kwargs)

    save_base.alters_data = True  # type: ignore[attr-defined]  # as in Model


class TableVersion(models.Model):
    """A version of the reference tables: a number that each transaction that writes them raises.

    - In the global database, this table has one row, with an empty name. It has the current version
      of all reference tables. A transaction that writes reference tables raises it immediately
      before its commit. A process that writes copies locks the row.
    - On each shard, this table has one row for each reference table. It has the version of the
      shard's copies: they have all changes up to this version.
    """

    _has_copies_on_shards: ClassVar[bool] = True

    #: The label of a reference model, such as ``geo.Country``; empty in the global database.
    name: models.CharField[str, str] = ExactCharField(max_length=100, primary_key=True)
    version: models.BigIntegerField[int, int] = models.BigIntegerField()
    #: A random number that a flush of the global database replaces. A flush also starts the
    #: versions anew. So two versions can be compared only if they have the same random number.
    history: models.BigIntegerField[int, int] = models.BigIntegerField()
    #: A JSON list of the primary keys of copies that were deleted on this shard. To delete a row of
    #: a reference table, its copies are deleted first, and then the row in the global database. If
    #: the row stays after all, for example because the transaction is rolled back, the next update
    #: of the shard finds the copy in this list and restores it.
    removed: models.TextField[str, str] = models.TextField(default="[]")

    #: A hash of the names of the columns that the copies have. If the running code copies other
    #: columns, all rows must be compared.
    columns: models.CharField[str, str] = models.CharField(max_length=64, default="")

    class Meta:
        default_permissions: ClassVar = ()

    def __str__(self) -> str:
        return f"{self.name or 'global rows'}: {self.version}"


class ChangedRow(models.Model):
    """Records the version at which a row of a reference table was last written or deleted.

    Only the global database has such records. To update the copies on a shard, a process reads here
    which rows have changed since the version of these copies.
    """

    pk = models.CompositePrimaryKey("name", "row")
    #: The label of the model.
    name: models.CharField[str, str] = ExactCharField(max_length=100)
    #: The primary key of the row, as text.
    row: models.CharField[str, str] = ExactCharField(max_length=255)
    version: models.BigIntegerField[int, int] = models.BigIntegerField()
    changed_at: models.DateTimeField[datetime, datetime] = models.DateTimeField()

    class Meta:
        default_permissions: ClassVar = ()
        indexes: ClassVar = [
            models.Index(fields=["name", "version"], name="sharded_orm_changed_row")
        ]

    def __str__(self) -> str:
        return f"{self.name} {self.row}: {self.version}"
