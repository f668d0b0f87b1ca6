"""Rows on shards that depend on global rows: each policy of ``on_delete``, by the key and not."""

from __future__ import annotations

from typing import Any

from django.db import models

from sharded_orm import on_delete
from sharded_orm.models import GlobalModel, ShardedModel


class Country(GlobalModel):
    id = models.BigIntegerField(primary_key=True)


class Author(GlobalModel):
    id = models.BigIntegerField(primary_key=True)
    country = models.ForeignKey(Country, models.CASCADE, null=True, related_name="authors")


class OfAuthor(ShardedModel):
    id = models.BigIntegerField(primary_key=True)

    class Meta:
        abstract = True

    class ShardMeta:
        group = "photos"
        shard_key = "author"


class Book(OfAuthor):
    author = models.ForeignKey(Author, on_delete.CASCADE, db_constraint=False, related_name="books")
    editor = models.ForeignKey(
        Author, on_delete.CASCADE, db_constraint=False, null=True, related_name="edited"
    )


class Page(OfAuthor):
    author = models.ForeignKey(Author, on_delete.LEAVE, db_constraint=False, related_name="pages")
    book = models.ForeignKey(Book, models.CASCADE, related_name="pages")


class Quote(OfAuthor):
    """Protects the page that it is from."""

    author = models.ForeignKey(Author, on_delete.LEAVE, db_constraint=False, related_name="quotes")
    page = models.ForeignKey(Page, models.PROTECT, related_name="quotes")


class Footnote(OfAuthor):
    """Restricts the page that it is on, unless its book is deleted, too."""

    author = models.ForeignKey(Author, on_delete.LEAVE, db_constraint=False, related_name="+")
    page = models.ForeignKey(Page, models.RESTRICT, related_name="footnotes")
    book = models.ForeignKey(Book, models.CASCADE, null=True, related_name="footnotes")


class Award(OfAuthor):
    author = models.ForeignKey(
        Author, on_delete.PROTECT, db_constraint=False, related_name="awards"
    )
    sponsor = models.ForeignKey(
        Author, on_delete.PROTECT, db_constraint=False, null=True, related_name="sponsored"
    )


class Novel(Book):
    """In a table of its own beside the table of its parent, which holds the key."""

    first = models.ForeignKey(Book, models.CASCADE, null=True, related_name="sequels")
    translator = models.ForeignKey(
        Author, on_delete.LEAVE, db_constraint=False, null=True, related_name="translated"
    )
    similar: models.ManyToManyField[Any, Any] = models.ManyToManyField(Page)
