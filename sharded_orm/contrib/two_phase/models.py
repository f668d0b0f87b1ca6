"""The table of commit decisions of transactions in two phases. Each shard has this table."""

from __future__ import annotations

from typing import ClassVar

from django.db import models

from sharded_orm.backends.two_phase.branch import MAX_BYTES, TABLE


class Decision(models.Model):
    """The decision to commit a transaction in two phases.

    The transaction itself inserts this row on its first shard, the decider: if the row is
    committed, so is the transaction on all other shards. Only :mod:`sharded_orm.backends.two_phase`
    and :mod:`sharded_orm.two_phase` use the table, by SQL.
    """

    name: models.CharField[str, str] = models.CharField(max_length=MAX_BYTES, primary_key=True)
    #: The time of the decision, in seconds since 1970, by the clock of the machine that runs
    #: the transaction.
    decided_at: models.BigIntegerField[int, int] = models.BigIntegerField()

    class Meta:
        app_label = "sharded_orm_two_phase"
        db_table = TABLE
        default_permissions: ClassVar = ()

    def __str__(self) -> str:
        return self.name
