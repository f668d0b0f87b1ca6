"""``exclude()`` over relations to several rows, under a bound key: as in one database.

Django makes a subquery of such a condition, and takes the first table out of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from django.db import connections
from django.db.models import Count, Exists, F, FilteredRelation, OuterRef, Q, Subquery
from django.test.utils import CaptureQueriesContext

from sharded_orm import bound
from sharded_orm.exceptions import BoundKeyMismatch, CrossShardRelation
from tests.cached.models import CachedAlbum, CachedComment, CachedPhoto, CachedTag
from tests.photos.models import Comment, Photo, Tag
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, TWO
from tests.queries.twins import World, outcome
from tests.relatives.sharded.models import Item

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(databases=DATABASES),
]


class Rows:
    """The rows of ONE: by a condition in one plain database, by the bound key on shards."""

    def __init__(self, world: World) -> None:
        self.world, self.is_plain = world, world.aliases is None

    def __getattr__(self, name: str) -> Any:
        rows = getattr(self.world.models, name).objects.all()
        return rows.filter(owner=ONE) if self.is_plain else rows

    def labellings(self) -> Any:
        rows = self.world.models.Item.labels.through.objects.all()
        return rows.filter(item__owner=ONE) if self.is_plain else rows


#: Querysets of items.
EXCLUDES: dict[str, Callable[[Rows], Any]] = {
    "reverse": lambda own: own.Item.exclude(children__stars=0),
    "reverse, the other way": lambda own: own.Item.filter(~Q(children__stars__gt=0)),
    "reverse, twice negated": lambda own: own.Item.exclude(~Q(children__stars=1)),
    "one of two": lambda own: own.Item.filter(~Q(children__stars=0) | Q(stars=1)),
    "both": lambda own: own.Item.exclude(children__stars=0).exclude(labels__name="label 24"),
    "with conditions": lambda own: own.Item.exclude(stars=3).exclude(children__stars=0),
    "several conditions": lambda own: own.Item.exclude(children__stars=0, children__name="x"),
    "reverse of reverse": lambda own: own.Item.exclude(children__children__stars=0),
    "forward, then reverse": lambda own: own.Item.exclude(shelf__items__name="item 104"),
    "forward twice": lambda own: own.Item.exclude(parent__shelf__items__name="item 104"),
    "reverse, then many": lambda own: own.Item.exclude(children__labels__name="label 21"),
    "reverse, then forward": lambda own: own.Item.exclude(children__shelf__name="shelf 11"),
    "many to many": lambda own: own.Item.exclude(labels__name="label 24"),
    "many to many and back": lambda own: own.Item.exclude(labels__items__name="item 104"),
    "many to itself": lambda own: own.Item.exclude(friends__name="item 104"),
    "one to one": lambda own: own.Item.exclude(cover__name="cover"),
    "over a one to one": lambda own: own.Item.exclude(children__cover__name="cover"),
    "generic": lambda own: own.Item.exclude(notes__name="Note 61"),
    "generic of rows beside": lambda own: own.Item.exclude(children__notes__name="Note 61"),
    "none": lambda own: own.Item.exclude(children=None),
    "none of many": lambda own: own.Item.exclude(labels__isnull=True),
    "some": lambda own: own.Item.exclude(children__isnull=False),
    "an instance": lambda own: own.Item.exclude(children=own.world.of("Item", 104)),
    "an id": lambda own: own.Item.exclude(labels=24),
    "instances": lambda own: own.Item.exclude(
        labels__in=[own.world.of("Label", 24), own.world.of("Label", 25)]
    ),
    "rows of a query": lambda own: own.Item.exclude(children__in=own.Item.filter(stars=0)),
    "rows of a query like it": lambda own: own.Item.exclude(
        children__in=own.Item.exclude(labels__name="label 24")
    ),
    "a column": lambda own: own.Item.exclude(children__stars__lt=F("stars")),
    "the other key": lambda own: own.Item.exclude(children__seller=NEAR),
    "a filtered relation": lambda own: own.Item.alias(
        small=FilteredRelation("children", condition=Q(children__stars__lt=2))
    ).exclude(small__name="item 104"),
    "groups": lambda own: own.Item.annotate(n=Count("children")).exclude(children__stars=1),
    "a group that is left out": lambda own: (
        own.Item.exclude(children__stars=1).annotate(n=Count("labels")).exclude(n=1)
    ),
    "in a subquery": lambda own: own.Item.filter(
        pk__in=own.Item.exclude(children__stars=0).values("pk")
    ),
    "in exists": lambda own: own.Item.filter(
        Exists(own.Label.filter(items=OuterRef("pk")).exclude(items__stars=1))
    ),
    "in exists, of the same model": lambda own: own.Item.filter(
        Exists(own.Item.filter(parent=OuterRef("pk")).exclude(labels__name="label 24"))
    ),
    "in a column": lambda own: own.Item.annotate(
        top=Subquery(
            own.Item.filter(parent=OuterRef("pk"))
            .exclude(children__stars=1)
            .order_by("-pk")
            .values("pk")[:1]
        )
    ).filter(top__isnull=False),
    "excluded and in exists": lambda own: own.Item.exclude(children__stars=1).filter(
        ~Exists(own.Label.filter(items=OuterRef("pk")).exclude(items__children__stars=0))
    ),
    "of a related manager": lambda own: own.world.of("Shelf", 11).items.exclude(children__stars=0),
    "of a manager of many": lambda own: own.world.of("Label", 21).items.exclude(children__stars=0),
    "of a generic manager": lambda own: own.Item.filter(
        notes__in=own.world.of("Item", 101).notes.exclude(item__labels__name="label 24")
    ),
}
USES: dict[str, Callable[[Any], Any]] = {
    "list": lambda rows: sorted(row.pk for row in rows),
    "values": lambda rows: sorted(rows.values_list("pk", flat=True)),
    "count": lambda rows: rows.count(),
    "exists": lambda rows: rows.exists(),
    "first": lambda rows: rows.order_by("-pk").first(),
    "get": lambda rows: rows.get(pk=107),
    "in_bulk": lambda rows: rows.in_bulk([101, 102, 103, 107]),
    "slice": lambda rows: list(rows.order_by("pk")[1:3]),
    "distinct": lambda rows: rows.distinct().count(),
    "aggregate": lambda rows: rows.aggregate(n=Count("pk")),
    "iterator": lambda rows: sorted(row.pk for row in rows.iterator()),
    "filtered after": lambda rows: sorted(rows.filter(stars__gte=0).values_list("pk", flat=True)),
    "union": lambda rows: sorted(
        rows.filter(stars=0).values_list("pk").union(rows.exclude(stars=0).values_list("pk"))
    ),
    "update": lambda rows: rows.update(stars=F("stars") + 10),
    "delete": lambda rows: rows.delete(),
}


#: Querysets of an automatic many-to-many table. Its rows have the key of the rows that they relate.
OF_THROUGH: dict[str, Callable[[Rows], Any]] = {
    "reverse": lambda own: own.labellings().exclude(item__children__stars=0),
    "many to many": lambda own: own.labellings().exclude(label__items__name="item 104"),
    "both": lambda own: own.labellings().exclude(
        item__children__stars=0, label__items__name="item 104"
    ),
}
USES_OF_THROUGH: dict[str, Callable[[Any], Any]] = {
    "values": lambda rows: sorted(rows.values_list("item", "label")),
    "count": lambda rows: rows.count(),
    "exists": lambda rows: rows.exists(),
    "delete": lambda rows: rows.delete(),
}


def assert_equal(
    worlds: tuple[World, World],
    excluded: Callable[[Rows], Any],
    uses: dict[str, Callable[..., Any]],
) -> None:
    """Compare the results and the rows of all ``uses`` in the two worlds."""
    wrong = []
    for name, use in uses.items():

        def call(world: World, use: Callable[..., Any] = use) -> Any:
            with nullcontext() if world.aliases is None else bound(owner=ONE):
                return use(excluded(Rows(world)))

        expected, got = (outcome(world, call, writes=True) for world in worlds)
        if got.comparable() != expected.comparable() or got.rows != expected.rows:
            wrong.append(f"{name}: {got.comparable()!r}; not {expected.comparable()!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("excluded", EXCLUDES.values(), ids=EXCLUDES)
def test_as_in_one_database(worlds: tuple[World, World], excluded: Callable[[Rows], Any]) -> None:
    assert_equal(worlds, excluded, USES)


@pytest.mark.parametrize("excluded", OF_THROUGH.values(), ids=OF_THROUGH)
def test_automatic_tables(worlds: tuple[World, World], excluded: Callable[[Rows], Any]) -> None:
    assert_equal(worlds, excluded, USES_OF_THROUGH)


@pytest.mark.parametrize("excluded", EXCLUDES.values(), ids=EXCLUDES)
def test_a_queryset_from_outside(
    worlds: tuple[World, World], excluded: Callable[[Rows], Any]
) -> None:
    plain, sharded = (Rows(world) for world in worlds)
    expected = sorted(excluded(plain).values_list("pk", flat=True))
    outside = excluded(sharded)
    if outside.query.annotations.keys() == {"top"}:
        with bound(owner=ONE), pytest.raises(BoundKeyMismatch, match="Build it inside"):
            list(outside)  # It has a slice, which cannot be filtered.
        return
    with bound(owner=ONE):
        for rows in (outside, outside.all(), outside.filter(stars__gte=0)):
            assert sorted(row.pk for row in rows) == expected
        assert outside.count() == len(expected)


def test_a_generic_relation_of_the_row_referred_to(items: World) -> None:
    """Refused with and without a bound key: the library does not see that the rows are beside."""
    excluded = Item.objects.exclude(parent__notes__name="Note 61")
    with pytest.raises(CrossShardRelation, match="Filter it by the shard key"):
        excluded.filter(owner=ONE).count()
    with bound(owner=ONE), pytest.raises(CrossShardRelation, match="Filter it by the shard key"):
        excluded.count()


def test_a_row_that_the_outer_query_joins(worlds: tuple[World, World]) -> None:
    """Django compares the subquery with the joined row if the join was made for the same filter."""
    plain, sharded = (Rows(world) for world in worlds)
    condition = Q(children__stars=0) & ~Q(children__name="item 105")
    # In Django, the result depends on the order of the conditions. That on the bound key is last.
    expected = sharded.Item.filter(condition).filter(owner=ONE)
    of_plain = plain.world.models.Item.objects.filter(condition).filter(owner=ONE)
    assert [row.pk for row in expected] == [row.pk for row in of_plain] == [101]
    with bound(owner=ONE):
        assert [row.pk for row in sharded.Item.filter(condition)] == [101]


def test_rows_of_another_key_on_the_shard_are_not_reached(items: World) -> None:
    with bound(owner=ONE):
        assert not Item.objects.exclude(children__stars=1).filter(pk=103).exists()
        assert Item.objects.exclude(labels__name="no label").filter(pk=103).update(stars=9) == 0
        assert Item.objects.exclude(children__stars=99).filter(pk=103).delete()[0] == 0
    with bound(owner=NEAR):
        assert [row.pk for row in Item.objects.exclude(children__stars=1)] == [103]
    with pytest.raises(BoundKeyMismatch), bound(owner=ONE):
        Item.objects.filter(owner=NEAR).exclude(children__stars=1).count()


def test_a_subquery_that_was_compiled_before_is_filtered(items: World) -> None:
    """Its table has no references after it was compiled, like a table that exclude() takes out."""
    for outside in (
        Item.objects.all(),
        Item.objects.order_by("shelf__name"),
        Item.objects.select_related("shelf"),
    ):
        str(outside.query)
        with CaptureQueriesContext(connections[SHARD[ONE]]) as captured, bound(owner=ONE):  # type: ignore[arg-type]  # a shard's
            assert Item.objects.filter(pk__in=outside.values("pk")).count() == 4
            assert outside.count() == 4
        conditions = [sql["sql"].count(f"{quoted('owner_id')} = ") for sql in captured]
        assert conditions == [2, 1]


def quoted(name: str) -> str:
    return str(connections[SHARD[ONE]].ops.quote_name(name))


def test_scatter_is_not_filtered(items: World) -> None:
    with bound(owner=ONE):
        everything = Item.objects.exclude(children__stars=0).scatter()
        assert sorted(row.pk for row in everything) == [102, 103, 104, 105, 106, 107]


#: Querysets of models whose rows and lists are cached.
CACHED: dict[str, Callable[[dict[str, int]], Any]] = {
    "reverse": lambda key: CachedAlbum.objects.filter(**key).exclude(photos__title="p"),
    "reverse of reverse": lambda key: CachedAlbum.objects.filter(**key).exclude(
        photos__comments__text="c"
    ),
    "many to many": lambda key: CachedPhoto.objects.filter(**key).exclude(tags__name="t"),
    "and back": lambda key: CachedTag.objects.filter(**key).exclude(photos__stars=1),
    "forward, then reverse": lambda key: CachedPhoto.objects.filter(**key).exclude(
        album__photos__title="q"
    ),
    "none": lambda key: CachedPhoto.objects.filter(**key).exclude(comments=None),
}


@pytest.mark.parametrize("excluded", CACHED.values(), ids=CACHED)
def test_cached_models(placed: None, excluded: Callable[[dict[str, int]], Any]) -> None:
    for key in (ONE, NEAR, TWO):
        albums = [CachedAlbum.objects.create(user_id=key, title=title) for title in "ab"]
        tag = CachedTag.objects.create(user_id=key, name="t")
        for number, title in enumerate("pqr"):
            album = albums[number % 2]
            photo = CachedPhoto.objects.create(user_id=key, album=album, title=title, stars=number)
            if number:
                photo.tags.add(tag)
                CachedComment.objects.create(user_id=key, photo=photo, text="c" * number)
    for _ in range(4):  # The first reads record a plan, the next ones follow it or read the cache.
        for key in (ONE, NEAR, TWO):
            by_key = excluded({"user_id": key})
            with bound(user_id=key):
                rows = excluded({})
                assert sorted(row.pk for row in rows) == sorted(row.pk for row in by_key)
                assert (rows.count(), rows.exists()) == (by_key.count(), by_key.exists())
                assert {row.user_id for row in rows} <= {key}
    by_key = excluded({"user_id": ONE}).count()
    with bound(user_id=ONE):
        name = {"CachedTag": "name"}.get(excluded({}).model.__name__, "title")
        assert excluded({}).update(**{name: F(name)}) == by_key
        assert excluded({}).delete()[0] >= by_key
        assert not excluded({}).exists()
    assert excluded({"user_id": NEAR}).count() == by_key


def test_requests_and_models_of_a_plain_key(rows: list[Photo]) -> None:
    for row in rows:
        Comment.objects.create(user_id=row.user_id, photo=row, text=row.title)
        row.tags.add(Tag.objects.create(user_id=row.user_id, name=row.title))
    with bound(user_id=ONE):
        for condition in ({"comments__text": "p0"}, {"tags__name": "p0"}):
            assert [row.title for row in Photo.objects.exclude(**condition)] == ["p3"]
            assert [row.title for row in Photo.objects.filter(~Q(**condition))] == ["p3"]
            assert Photo.objects.exclude(**condition).update(stars=8) == 1
        assert Comment.objects.exclude(photo__tags__name="p3").get().text == "p0"
        assert Tag.objects.exclude(photos__comments__text="p3").delete()[0] == 2
