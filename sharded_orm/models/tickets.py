"""The table of a ticket server: one row per sequence (Flickr, F1)."""

from __future__ import annotations

from django.db import models


class Ticket(models.Model):
    """How far one sequence has come on one ticket server."""

    name: models.CharField[str, str] = models.CharField(max_length=100, primary_key=True)
    value: models.BigIntegerField[int, int] = models.BigIntegerField()

    class Meta:
        app_label = "sharded_orm"
        db_table = "sharded_orm_ticket"

    def __str__(self) -> str:
        return f"{self.name} at {self.value}"
