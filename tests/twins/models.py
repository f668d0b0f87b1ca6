"""Sharded models, and the same models in one plain database."""

from __future__ import annotations

from django.db import models

from sharded_orm.models import ExactCharField, ShardedModel
from tests.photos.models import Photo


class TrunkColumns(models.Model):
    id = models.BigIntegerField(primary_key=True)
    owner = models.BigIntegerField()
    n = models.IntegerField(null=True)

    class Meta:
        abstract = True


class TwigColumns(models.Model):
    """``ref`` holds ids of trunks on any shard."""

    id = models.BigIntegerField(primary_key=True)
    owner = models.BigIntegerField()
    ref = models.BigIntegerField(null=True)
    n = models.IntegerField(default=0)

    class Meta:
        abstract = True


class OnEvents(ShardedModel):
    class Meta:
        abstract = True

    class ShardMeta:
        group = "events"
        shard_key = "owner"
        same_key = False  # queries are compared for relations of any two rows of a shard


class Trunk(TrunkColumns, OnEvents):
    pass


class Twig(TwigColumns, OnEvents):
    parent = models.ForeignKey(Trunk, models.CASCADE, null=True, related_name="twigs")


class PlainTrunk(TrunkColumns):
    pass


class PlainTwig(TwigColumns):
    parent = models.ForeignKey(PlainTrunk, models.CASCADE, null=True, related_name="twigs")


class Knot(TwigColumns, OnEvents):
    """Refers to a trunk without a constraint in the database."""

    about = models.ForeignObject(
        Trunk, models.DO_NOTHING, ["ref"], ["id"], null=True, related_name="knots"
    )


class SheetColumns(models.Model):
    id = models.BigIntegerField(primary_key=True)
    owner = models.BigIntegerField()

    class Meta:
        abstract = True


class ShardedSheet(SheetColumns, ShardedModel):
    class Meta:
        abstract = True

    class ShardMeta:
        group = "events"
        shard_key = "owner"


class Folder(ShardedSheet):
    pass


class Sheet(ShardedSheet):
    folder = models.ForeignKey(Folder, models.CASCADE, related_name="sheets")

    class Meta:
        order_with_respect_to = "folder"


def folder_of_deleted() -> Folder:
    """The folder that clips get if theirs is deleted."""
    return Folder.objects.scatter().get(pk=REPLACEMENT_FOLDER)


REPLACEMENT_FOLDER = 1000


class Clip(ShardedSheet):
    folder = models.ForeignKey(Folder, models.SET(folder_of_deleted), related_name="clips")


class Desk(ShardedSheet):
    pass


class Drawer(ShardedSheet):
    desk = models.ForeignKey(Desk, models.CASCADE, related_name="drawers")


def drawer_of_deleted() -> Drawer:
    """The drawer that letters get if theirs is deleted."""
    return Drawer.objects.scatter().get(pk=REPLACEMENT_DRAWER)


REPLACEMENT_DRAWER = 1000


class Letter(ShardedSheet):
    """Deleted with its desk, and kept without its drawer."""

    desk = models.ForeignKey(Desk, models.CASCADE, related_name="letters")
    drawer = models.ForeignKey(Drawer, models.SET(drawer_of_deleted), related_name="letters")


class Dish(SheetColumns, ShardedModel):
    class ShardMeta:
        group = "events"
        shard_key = "owner"


class Meal(SheetColumns, ShardedModel):
    dishes: models.ManyToManyField[Dish, Serving] = models.ManyToManyField(
        Dish, through="Serving", related_name="meals"
    )

    class ShardMeta:
        group = "events"
        shard_key = "owner"


class Serving(SheetColumns, ShardedModel):
    """Relates a meal and a dish, and may lie on a desk."""

    meal = models.ForeignKey(Meal, models.CASCADE)
    dish = models.ForeignKey(Dish, models.CASCADE)
    desk = models.ForeignKey(Desk, models.CASCADE, null=True)

    class ShardMeta:
        group = "events"
        shard_key = "owner"


class PlainFolder(SheetColumns):
    pass


class PlainSheet(SheetColumns):
    folder = models.ForeignKey(PlainFolder, models.CASCADE, related_name="sheets")

    class Meta:
        order_with_respect_to = "folder"


class Leaf(TwigColumns, OnEvents):
    """Ordered below a trunk, which may be of another key."""

    trunk = models.ForeignKey(Trunk, models.CASCADE, related_name="leaves")

    class Meta:
        order_with_respect_to = "trunk"


class Line(SheetColumns, ShardedModel):
    """Ordered below a photo, whose key may move. Migrations make the table of photos, after this one."""

    photo = models.ForeignKey(Photo, models.CASCADE, related_name="lines", db_constraint=False)

    class Meta:
        order_with_respect_to = "photo"

    class ShardMeta:
        group = "photos"
        shard_key = "owner"


class Root(TwigColumns, OnEvents):
    """Ordered below another root, or below none."""

    above = models.ForeignKey("self", models.CASCADE, null=True, related_name="roots")

    class Meta:
        order_with_respect_to = "above"


class Seed(TrunkColumns, OnEvents):
    pass


class Tree(Seed):
    """In a table of its own beside the table of its parent, which holds the key."""

    height = models.IntegerField(default=0)


class LowerField(ExactCharField):
    """Stores its value in lower case, and leaves the instance unchanged."""

    def pre_save(self, model_instance: models.Model, add: bool) -> str:
        return str(super().pre_save(model_instance, add)).lower()


class Bird(ShardedModel):
    name = LowerField(max_length=40)

    class ShardMeta:
        group = "events"
        shard_key = "name"


class BallotColumns(models.Model):
    owner = models.BigIntegerField()
    number = models.IntegerField()
    n = models.IntegerField(null=True)
    text = models.CharField(max_length=40, default="")

    class Meta:
        abstract = True


class Ballot(BallotColumns, OnEvents):
    pk = models.CompositePrimaryKey("owner", "number")


class PlainBallot(BallotColumns):
    pk = models.CompositePrimaryKey("owner", "number")
