"""Films are global; ratings and tags are sharded by the user who gave them.

The users of a MovieLens folder are just numbers, so there is no table of users.
"""

from __future__ import annotations

from django.db import models

from sharded_orm import GlobalModel, ShardedModel, TicketField


class Movie(GlobalModel):
    movie_id = models.BigIntegerField(primary_key=True)
    title = models.CharField(max_length=255)
    genres = models.CharField(max_length=255)

    def __str__(self) -> str:
        return self.title


class ByUser(ShardedModel):
    class Meta:
        abstract = True

    class ShardMeta:
        group = "ratings"
        shard_key = "user_id"


class Rating(ByUser):
    rating_id = TicketField(primary_key=True)
    user_id = models.BigIntegerField()
    movie = models.ForeignKey(Movie, models.DO_NOTHING, db_constraint=False, related_name="ratings")
    stars = models.DecimalField(max_digits=2, decimal_places=1)
    rated_at = models.DateTimeField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["user_id", "movie"], name="rating_once")]

    def __str__(self) -> str:
        return f"{self.stars} for {self.movie_id} by {self.user_id}"


class Tag(ByUser):
    tag_id = TicketField(primary_key=True)
    user_id = models.BigIntegerField(db_index=True)
    movie = models.ForeignKey(Movie, models.DO_NOTHING, db_constraint=False, related_name="tags")
    text = models.CharField(max_length=255)
    tagged_at = models.DateTimeField()

    def __str__(self) -> str:
        return self.text
