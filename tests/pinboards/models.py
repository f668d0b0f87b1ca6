"""Objects and mappings. Types 21 to 26 of the group ``pins``."""

from __future__ import annotations

from django.db import models

from sharded_orm.contrib.objects import Mapping, ObjectLookup, ShardedObject, fields
from sharded_orm.models import ShardedModel


class Board(ShardedObject):
    name = fields.Text()

    class ObjectMeta:
        group = "pins"
        type_id = 21


class Pin(ShardedObject):
    board = fields.Ref(Board)
    note = fields.Text(default="")
    link = fields.URL(null=True)

    class ObjectMeta:
        group = "pins"
        type_id = 22


class BoardPins(Mapping):
    source, target = Board, Pin


class User(ShardedObject):
    """Cached, as are its follows."""

    name = fields.Char(max_length=40)
    age = fields.Integer(null=True)

    class ObjectMeta:
        group = "pins"
        type_id = 23
        cache = True


class Follows(Mapping):
    """From a user to users: objects of a mapping may be of the type of its source."""

    source, target = User, User

    class MappingMeta:
        cache = True


class Everything(ShardedObject):
    """A field of each kind."""

    text = fields.Text(default="")
    number = fields.Integer(default=0)
    is_on = fields.Boolean(default=False)
    ratio = fields.Float(null=True)
    price = fields.Decimal(max_digits=8, decimal_places=2, null=True)
    day = fields.Date(null=True)
    moment = fields.DateTime(null=True)
    hour = fields.Time(null=True)
    length = fields.Duration(null=True)
    code = fields.UUID(null=True)
    address = fields.IPAddress(null=True)
    email = fields.Email(null=True)
    slug = fields.Slug(null=True)
    tags = fields.JSON(default=list)
    title = fields.Char(max_length=20, default="", was=("name", "heading"))
    created = fields.DateTime(auto_now_add=True, null=True)

    class ObjectMeta:
        group = "pins"
        type_id = 24
        max_body = 5_000
        removed = ("colour",)


class FacebookUsers(ObjectLookup):
    target = User

    class LookupMeta:
        group = "events"
        cache = True


class Shelf(ShardedObject):
    """Protected by the rows that refer to it."""

    class ObjectMeta:
        group = "pins"
        type_id = 26


class Label(ShardedModel):
    shelf = models.ForeignKey(Shelf, models.PROTECT)

    class ShardMeta:
        group = "pins"
        shard_key = "shelf"
