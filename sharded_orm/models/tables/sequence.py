"""The table of the sequences of ids on a ticket server, one row per sequence (Flickr, F1)."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class TicketSequence(models.Model):
    """The last id, and other state, of one sequence of ids on one ticket server.

    Read-only; query it with ``using()`` and the alias of a ticket server.
    ``manage.py tickets create`` creates the table. The model is not managed by Django. Otherwise a test
    that flushes the database would empty the table, and the sequence would return the same ids once
    more.
    """

    name: models.CharField[str, str] = models.CharField(max_length=100, primary_key=True)
    form: models.CharField[str, str] = models.CharField(max_length=10)
    step: models.BigIntegerField[int, int] = models.BigIntegerField()
    position: models.BigIntegerField[int, int] = models.BigIntegerField()
    value: models.BigIntegerField[int, int] = models.BigIntegerField()
    partner_mark: models.BigIntegerField[int, int] = models.BigIntegerField()

    class Meta:
        app_label = "sharded_orm"
        db_table = "sharded_orm_sequence"
        managed = False
        default_permissions: ClassVar = ("view",)
        verbose_name = "ticket sequence"
        verbose_name_plural = "tickets"

    def __str__(self) -> str:
        return f"{self.name} at {self.value}"
