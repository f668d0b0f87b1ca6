"""Columns that the models of all sides share."""

from __future__ import annotations

from django.db import models


class PhotoFields(models.Model):
    user_id = models.BigIntegerField()
    album_id = models.BigIntegerField()
    title = models.CharField(max_length=200)
    description = models.TextField()
    posted_at = models.DateTimeField()
    stars = models.IntegerField(null=True)
    price = models.DecimalField(max_digits=10, decimal_places=2)

    class Meta:
        abstract = True
