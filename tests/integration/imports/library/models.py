"""Models whose rows are imported: values of every kind, and relations of every kind."""

from __future__ import annotations

from typing import Any

from django.db import models

from sharded_orm.models import ExactCharField, PackedIDField, ShardedModel, TicketField


class ReversedField(models.CharField):  # type: ignore[type-arg]  # not a generic class at run time
    """Stores text backwards, and saves something else than the instance has."""

    def from_db_value(self, value: str | None, *args: Any) -> str | None:
        return value if value is None else f"read {value[::-1]}"

    def get_prep_value(self, value: Any) -> Any:
        return value if value is None else value.removeprefix("read ")[::-1]

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        return "saved"


class Writer(models.Model):
    name = models.CharField(max_length=50)


class OfWriter(ShardedModel):
    writer = models.ForeignKey(Writer, models.DO_NOTHING, db_constraint=False, related_name="+")

    class Meta:
        abstract = True

    class ShardMeta:
        group = "books"
        shard_key = "writer"


class Review(OfWriter):
    """Stands before its book, but must be copied after it."""

    pk = models.CompositePrimaryKey("writer_id", "number")
    book = models.ForeignKey("Book", models.CASCADE)
    number = models.IntegerField()


class Topic(OfWriter):
    name = models.CharField(max_length=50)


class Book(OfWriter):
    id = TicketField(primary_key=True)
    title = models.CharField(max_length=200)
    changed_at = models.DateTimeField(auto_now=True)
    extra = models.JSONField(null=True)
    price = models.DecimalField(max_digits=8, decimal_places=2, null=True)
    weight = models.FloatField(null=True)
    cover = models.BinaryField(null=True)
    code = models.UUIDField(null=True)
    secret = ReversedField(max_length=50, null=True)
    published = models.BooleanField(null=True)
    pages = models.IntegerField(null=True)
    length = models.DurationField(null=True)
    day = models.DateField(null=True)
    time = models.TimeField(null=True)
    sequel_of = models.ForeignKey("self", models.CASCADE, null=True)
    topics = models.ManyToManyField(Topic)

    class ShardMeta(OfWriter.ShardMeta):
        cache = True


class Novel(Book):
    genre = models.CharField(max_length=50)


class Counted(OfWriter):
    """Its ids are counted by the table."""

    name = models.CharField(max_length=50)


class Account(ShardedModel):
    """Sharded by text, modulo."""

    name = ExactCharField(max_length=50, primary_key=True)

    class ShardMeta:
        group = "accounts"
        shard_key = "name"


class Order(ShardedModel):
    account = models.ForeignKey(Account, models.CASCADE)
    amount = models.IntegerField()

    class ShardMeta:
        group = "accounts"
        shard_key = "account"


class Board(ShardedModel):
    """Its id contains the number of a shard."""

    id = PackedIDField(primary_key=True, type_id=1)
    name = models.CharField(max_length=50)

    class ShardMeta:
        group = "pins"
        shard_key = "id"


class Pin(ShardedModel):
    """On the shard of its board; its own id contains the number, too."""

    id = PackedIDField(primary_key=True, type_id=2)
    board = models.ForeignKey(Board, models.CASCADE)

    class ShardMeta:
        group = "pins"
        shard_key = "board"
