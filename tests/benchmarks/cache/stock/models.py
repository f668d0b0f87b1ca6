"""The model of every side but ours."""

from __future__ import annotations

from django.db import models

from tests.benchmarks.cache.fields import PhotoFields


class Photo(PhotoFields):
    photo_id = models.BigIntegerField(primary_key=True)

    class Meta:
        db_table = "photo"
        indexes = [models.Index(fields=["user_id", "posted_at"], name="photo_of_user")]
