"""The base class of reference models, and the tables with the versions of their rows and copies."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from django.db import models

from sharded_orm.contrib.references.backend import require_hooks
from sharded_orm.models.fields.text import ExactCharField
from sharded_orm.models.global_models import GlobalModel


class ReferenceModel(GlobalModel):
    """A model whose rows are in the global database, with a copy of each row on every shard.

    Sharded models refer to it by ordinary foreign keys, with a database constraint, and their
    queries may join it. All writes go to the global database, even if the instance was read from a
    copy. After the commit, the writes reach the copies.
    """

    _has_copies_on_shards: ClassVar[bool] = True

    class Meta:
        abstract = True

    def save_base(self, *args: Any, **kwargs: Any) -> None:
        require_hooks()
        super().save_base(*args, **kwargs)

    save_base.alters_data = True  # type: ignore[attr-defined]  # as in Model


class TableVersion(models.Model):
    """A version of the rows of reference tables.

    - The global database has one row, with an empty name. Each transaction that writes reference
      tables raises its version immediately before the commit. Whoever writes copies locks this row.
    - A shard has one row for each reference table: its copies have all changes up to this version.
    """

    _has_copies_on_shards: ClassVar[bool] = True

    #: The label of a reference model, such as ``geo.Country``; empty in the global database.
    name: models.CharField[str, str] = ExactCharField(max_length=100, primary_key=True)
    version: models.BigIntegerField[int, int] = models.BigIntegerField()
    #: A random number that identifies the sequence of versions. After a flush, a new sequence
    #: begins.
    history: models.BigIntegerField[int, int] = models.BigIntegerField()
    #: JSON: primary keys, as text, of copies that were removed before their rows in the global
    #: database. If a row is not deleted soon, its copy has to be restored.
    removed: models.TextField[str, str] = models.TextField(default="[]")

    #: A hash of the names of the columns that were copied. If the running code copies different
    #: columns, all rows must be compared.
    columns: models.CharField[str, str] = models.CharField(max_length=64, default="")

    class Meta:
        default_permissions: ClassVar = ()

    def __str__(self) -> str:
        return f"{self.name or 'global rows'}: {self.version}"


class ChangedRow(models.Model):
    """The version at which a row of a reference table was last changed in the global database.

    This record is kept after the row was deleted.
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
