"""The table of the states of entity indexes, in the global database.

The tables of entities and of their indexes belong to the apps that declare the stores.
"""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

from django.db import models

from sharded_orm.models.fields import ExactCharField


class IndexState(models.Model):
    """The state of an index of entities.

    If an index has no row in this table, processes write to the index and do not read from it.
    """

    #: The names of the store and the index, such as ``feed.index_user``.
    index: models.CharField[str, str] = ExactCharField(max_length=200, primary_key=True)
    #: One of the states in :mod:`~sharded_orm.contrib.entities.index_states`.
    state: models.CharField[str, str] = ExactCharField(max_length=16)
    since: models.DateTimeField[datetime, datetime] = models.DateTimeField()
    #: The value of :attr:`~sharded_orm.contrib.entities.index.Index.declaration` when this state
    #: was stored. It is a hash of the index's declaration in the code.
    declaration: models.CharField[str, str] = ExactCharField(max_length=64, default="")

    class Meta:
        db_table = "sharded_orm_entity_index"
        default_permissions: ClassVar = ()

    def __str__(self) -> str:
        return f"{self.index}: {self.state}"
