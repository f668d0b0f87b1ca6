"""Inside ``bound(user_id=…)`` queries and new rows are those of one key, and no other key is reached.

ONE and NEAR are on one shard, so a query that is routed but not filtered would reach rows of both.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from django.db import models
from django.db.models import Count, Exists, F, OuterRef, Prefetch, Q, Subquery, Sum
from django.test import TestCase
from django.test.utils import isolate_apps

from sharded_orm import bound, unbound
from sharded_orm.exceptions import BoundKeyMismatch, InvalidBoundKey, ShardKeyRequired
from sharded_orm.models import ShardedModel
from sharded_orm.models.sharding.bound_key import BoundKey
from tests.cached.models import CachedPhoto
from tests.photos.models import Album, Board, Comment, Person, Photo, Tag, Vote
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, TWO

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]

assert_queries = TestCase().assertNumQueries


# -- What can be bound -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "binds nothing"),
        ({"colour": 1}, "no model has a shard key 'colour'"),
        ({"user_id": None}, "cannot be None"),
        ({"user_id": "x"}, "cannot be 'x'"),
        ({"user_id": F("pk")}, "only the database can compute"),
        ({"owner": Person(username="new")}, "not saved yet"),
        ({"owner": Tag(pk=1)}, "refers to Agent or Person"),
    ],
)
def test_a_wrong_name_or_value_is_an_error_at_entry(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidBoundKey, match=message), bound(**keys):
        pass


def test_an_id_that_is_generated_cannot_be_bound() -> None:
    with bound(id=5):
        assert Board().pk is None  # Pin has such a key, and its ids are not generated.


def test_nesting(rows: list[Photo]) -> None:
    with bound(user_id=ONE):
        with bound(user_id=ONE), bound(account="a"):
            assert Photo.objects.count() == 2
        with pytest.raises(BoundKeyMismatch, match=r"unbound\(\)"), bound(user_id=TWO):
            pass
        with unbound():
            with pytest.raises(ShardKeyRequired):
                Photo.objects.count()
            with bound(user_id=TWO):
                assert Photo(title="x").user_id == TWO
        assert Photo.objects.count() == 2
    with pytest.raises(ShardKeyRequired):
        Photo.objects.count()


def test_the_key_may_be_an_object(placed: None) -> None:
    ann, bob = (Person.objects.create(pk=pk, username=f"p{pk}") for pk in (ONE, NEAR))
    with bound(owner=ann):
        album = Album.objects.create(title="of ann")
        assert Album(title="y").owner == ann
    with bound(owner_id=bob.pk):
        assert list(Album.objects.all()) == []
        with pytest.raises(BoundKeyMismatch):
            Album(owner=ann, title="x").save()
    assert (album.owner_id, album._state.db) == (ONE, SHARD[ONE])


# -- Reads ---------------------------------------------------------------------------------

#: Ways to read titles of photos.
READS: dict[str, Callable[[Any], Any]] = {
    "all": lambda photos: [row.title for row in photos.all()],
    "filter": lambda photos: [row.title for row in photos.filter(stars__gte=0)],
    "or": lambda photos: [row.title for row in photos.filter(Q(stars=0) | Q(stars__gt=0))],
    "combined": lambda photos: [r.title for r in photos.filter(stars=0) | photos.exclude(stars=0)],
    "values": lambda photos: [row["title"] for row in photos.values("title")],
    "values_list": lambda photos: list(photos.values_list("title", flat=True)),
    "iterator": lambda photos: [row.title for row in photos.iterator()],
    "in_bulk": lambda photos: [row.title for row in photos.in_bulk().values()],
    "slice": lambda photos: [row.title for row in photos.order_by("title")[0:10]],
    "union": lambda photos: list(
        photos.filter(stars=0).values_list("title", flat=True).union(
            photos.exclude(stars=0).values_list("title", flat=True)
        )
    ),
    "subquery": lambda photos: [
        row.title
        for row in photos.filter(
            pk__in=Photo.objects.filter(stars__gte=0).values("pk"), stars__gte=0
        )
    ],
    "explicit": lambda photos: [row.title for row in photos.filter(user_id=ONE)],
    "explicit list": lambda photos: [row.title for row in photos.filter(user_id__in=[ONE])],
    "excluded": lambda photos: [row.title for row in photos.exclude(user_id=TWO)],
    "using": lambda photos: [row.title for row in photos.using(SHARD[ONE])],
    "only": lambda photos: [row.title for row in photos.only("title")],
    "distinct": lambda photos: [row.title for row in photos.distinct()],
    "annotated": lambda photos: [
        row.title for row in photos.annotate(n=Count("comments")).filter(n=0)
    ],
}  # fmt: skip


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reads_are_of_the_bound_key(rows: list[Photo], read: Callable[[Any], Any]) -> None:
    with bound(user_id=ONE), assert_queries(0, using=SHARD[TWO]):
        assert sorted(read(Photo.objects)) == ["p0", "p3"]


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_queryset_from_outside_takes_the_key(
    rows: list[Photo], read: Callable[[Any], Any]
) -> None:
    built_outside = Photo.objects.all()
    for key, titles in ((ONE, ["p0", "p3"]), (NEAR, ["p2", "p5"])):
        with bound(user_id=key):
            try:
                result = sorted(read(built_outside))
            except BoundKeyMismatch:
                assert key == NEAR  # "explicit" names ONE.
            else:
                assert result == titles
    assert built_outside._result_cache is None


def test_reads_cost_one_query(rows: list[Photo]) -> None:
    with bound(user_id=ONE):
        for read in (
            lambda: list(Photo.objects.all()),
            lambda: Photo.objects.count(),
            lambda: Photo.objects.exists(),
            lambda: Photo.objects.get(pk=rows[0].pk),
            lambda: Photo.objects.first(),
            lambda: Photo.objects.aggregate(Sum("stars")),
        ):
            with assert_queries(1, using="photos"):
                read()


def test_results_of_single_values(rows: list[Photo]) -> None:
    with bound(user_id=ONE):
        assert Photo.objects.count() == 2
        assert Photo.objects.get(pk=rows[0].pk) == rows[0]
        with pytest.raises(Photo.DoesNotExist):
            Photo.objects.get(pk=rows[2].pk)  # of NEAR
        assert Photo.objects.filter(title="p2").exists() is False
        assert Photo.objects.aggregate(n=Count("pk"))["n"] == 2
        assert Photo.objects.contains(rows[0]) and not Photo.objects.contains(rows[2])
        assert Photo.objects.latest("posted_at") == rows[3]
        assert str(ONE) in str(Photo.objects.all().query)
        assert Photo.objects.explain()


def test_a_key_without_rows(placed: None) -> None:
    with bound(user_id=777):
        assert list(Photo.objects.all()) == []
        assert Photo.objects.count() == 0


def test_a_composite_key(placed: None) -> None:
    with bound(user_id=ONE):
        Vote.objects.create(number=5, value=1)
        assert Vote.objects.get(number=5).pk == (ONE, 5)
        assert Vote.objects.get(pk=(ONE, 5)).value == 1
        with pytest.raises(BoundKeyMismatch):
            Vote.objects.filter(pk=(NEAR, 5)).exists()


def test_explain_routing_tells_it(rows: list[Photo]) -> None:
    with bound(user_id=ONE):
        route = Photo.objects.all().explain_routing()
        assert route.aliases == (SHARD[ONE],)
        assert f"under bound(user_id={ONE})" in str(route)
        assert "bound" not in str(Photo.objects.scatter().explain_routing())
        assert "bound" in str(Photo.objects.using(SHARD[ONE]).explain_routing())


def test_the_database_alias_is_that_of_the_key(rows: list[Photo]) -> None:
    with bound(user_id=TWO):
        assert Photo.objects.all().db == SHARD[TWO]


def test_an_empty_alias_is_still_filtered(rows: list[Photo]) -> None:
    with bound(user_id=ONE):
        assert Photo.objects.using(SHARD[TWO]).count() == 0


def test_scatter_and_unbound_leave_the_key_out(rows: list[Photo]) -> None:
    with bound(user_id=ONE):
        everything = Photo.objects.all()
        assert (everything.count(), len(everything)) == (2, 2)
        assert everything.scatter().count() == 6
        assert Photo.objects.scatter().filter(user_id=TWO).count() == 2
        with unbound():
            assert Photo.objects.filter(user_id=TWO).count() == 2


def test_raw_sql_still_needs_an_alias(rows: list[Photo]) -> None:
    sql = f"SELECT * FROM {Photo._meta.db_table}"
    with bound(user_id=ONE):
        with pytest.raises(ShardKeyRequired), assert_queries(0, using="photos"):
            Photo.objects.raw(sql)
        with pytest.raises(BoundKeyMismatch), assert_queries(0, using="photos"):
            Photo.objects.filter(user_id=TWO).raw(sql)
        assert len(list(Photo.objects.raw(sql, using=SHARD[ONE]))) == 4


# -- Another key ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name_other",
    [
        lambda: list(Photo.objects.filter(user_id=TWO)),
        lambda: Photo.objects.filter(user_id__in=[ONE, TWO]).count(),
        lambda: Photo.objects.get(user_id=NEAR, pk=1),
        lambda: CachedPhoto.objects.get(user_id=NEAR, pk=1),
        lambda: Photo.objects.filter(Q(user_id=NEAR) | Q(stars=1)).exists(),
        lambda: Photo.objects.filter(user_id=NEAR).update(stars=1),
        lambda: Photo.objects.filter(user_id=NEAR).delete(),
        lambda: Photo.objects.filter(user_id=NEAR).aggregate(Sum("stars")),
        lambda: Photo.objects.filter(user_id=NEAR).explain_routing(),
        lambda: Photo.objects.filter(pk__in=Photo.objects.filter(user_id=NEAR).values("pk")),
        lambda: Photo.objects.annotate(
            n=Subquery(Photo.objects.filter(user_id=NEAR).values("pk")[:1])
        ),
        lambda: list(Photo.objects.all().union(Photo.objects.filter(user_id=NEAR))),
        lambda: Photo.objects.create(user_id=NEAR, title="x"),
        lambda: Photo.objects.bulk_create([Photo(title="a"), Photo(user_id=NEAR, title="x")]),
        lambda: Photo.objects.get_or_create(user_id=NEAR, title="x"),
        lambda: Photo.objects.get_or_create(title="x", defaults={"user_id": NEAR}),
        lambda: Photo.objects.update_or_create(user_id=555, title="x"),
        lambda: Photo(user_id=NEAR, title="x").save(),
        lambda: Photo(user_id=NEAR, title="x").save(using=SHARD[NEAR]),
    ],
)
def test_naming_another_key_is_refused_before_anything_is_sent(
    placed: None, name_other: Callable[[], Any]
) -> None:
    with (
        bound(user_id=ONE),
        assert_queries(0, using="photos"),
        assert_queries(0, using="directory"),
    ):
        with pytest.raises(BoundKeyMismatch):
            name_other()


@pytest.mark.parametrize(
    "touch",
    [
        lambda row: row.save(),
        lambda row: row.delete(),
        lambda row: row.refresh_from_db(),
        lambda row: row.comments.count(),
        lambda row: row.comments.create(text="x"),
        lambda row: row.album,
        lambda row: Photo.objects.bulk_update([row], ["title"]),
    ],
)
def test_a_row_of_another_key_is_refused(rows: list[Photo], touch: Callable[[Any], Any]) -> None:
    with unbound():
        row = Photo.objects.get(user_id=NEAR, pk=rows[2].pk)
        row.album_id = 5
    with bound(user_id=ONE), assert_queries(0, using="photos"), pytest.raises(BoundKeyMismatch):
        touch(row)


def test_a_deferred_key_is_looked_at(rows: list[Photo]) -> None:
    row = Photo.objects.filter(user_id=NEAR).only("title")[0]
    with bound(user_id=ONE), pytest.raises(BoundKeyMismatch):
        row.save()
    row = Photo.objects.filter(user_id=ONE).only("title")[0]
    with bound(user_id=ONE):
        row.save()
        assert row.stars == 0


# -- Writes --------------------------------------------------------------------------------


def test_new_rows_get_the_key(placed: None) -> None:
    outside = Photo(title="built outside")
    with bound(user_id=NEAR):
        created = [
            Photo.objects.create(title="a"),
            *Photo.objects.bulk_create([Photo(title="b"), Photo(title="c", user_id=None)]),
            Photo.objects.get_or_create(title="d")[0],
            Photo.objects.update_or_create(title="e", defaults={"stars": 1})[0],
        ]
        outside.save()
        Photo(title="f", user_id=NEAR).save()
        assert Photo.objects.count() == 7
        assert Photo.objects.get_or_create(title="d") == (created[3], False)
        assert Photo.objects.update_or_create(title="e", defaults={"stars": 4})[1] is False
    assert {row.user_id for row in [*created, outside]} == {NEAR}
    assert Photo(title="after").user_id is None


def test_update_and_delete_are_of_the_bound_key(rows: list[Photo]) -> None:
    with bound(user_id=ONE):
        everything = Photo.objects.all()
        assert len(everything) == 2
        assert everything.update(stars=F("stars") + 10) == 2
        assert [row.stars for row in everything] == [10, 13]
        assert Photo.objects.all().delete()[0] == 2
        assert len(everything) == 2
        assert everything.all().count() == 0
    assert Photo.objects.scatter().count() == 4
    assert Photo.objects.scatter().filter(stars__gte=10).count() == 0


def test_unique_values_are_compared_with_all_rows(placed: None) -> None:
    # Uniqueness is the database's, not the key's.
    with bound(user_id=ONE):
        Tag.objects.create(name="x")
        with assert_queries(1, using="photos"):
            Tag(name="y").validate_constraints()


# -- Relations -----------------------------------------------------------------------------


def test_relations_and_prefetches(rows: list[Photo]) -> None:
    with bound(user_id=ONE):
        photo = Photo.objects.get(pk=rows[0].pk)
        photo.comments.create(text="one")
        photo.tags.add(Tag.objects.create(name="t"))
        assert [c.text for c in photo.comments.all()] == ["one"]
        assert [tag.name for tag in photo.tags.all()] == ["t"]
        read = Photo.objects.prefetch_related(
            "tags", Prefetch("comments", Comment.objects.filter(text="one"), to_attr="found")
        )
        assert [[c.text for c in row.found] for row in read] == [["one"], []]
        assert [len(row.tags.all()) for row in read] == [1, 0]
        assert Comment.objects.select_related("photo").get().photo == photo
        assert Comment.objects.get().photo == photo
        assert Photo.objects.filter(comments__text="one").get() == photo


def test_a_subquery_from_outside_takes_the_key(rows: list[Photo]) -> None:
    for row in rows:
        Comment.objects.create(user_id=row.user_id, photo=row, text=row.title)
    with_comment = Photo.objects.annotate(
        said=Exists(Comment.objects.filter(photo=OuterRef("pk"))),
        first=Subquery(Comment.objects.filter(photo=OuterRef("pk")).values("text")),
    ).filter(Exists(Comment.objects.filter(photo=OuterRef("pk"), text__startswith="p")))
    for key, titles in ((ONE, ["p0", "p3"]), (NEAR, ["p2", "p5"])):
        with bound(user_id=key):
            if key == ONE:
                sql = str(with_comment.all().query)
                assert sql.count(f'"user_id" = {ONE}') + sql.count(f"`user_id` = {ONE}") == 4
            assert sorted(row.first for row in with_comment.all() if row.said) == titles


def test_rows_prefetched_before_the_block(rows: list[Photo]) -> None:
    Comment.objects.create(user_id=ONE, photo=rows[0], text="x")
    (photo,) = Photo.objects.filter(user_id=ONE, title="p0").prefetch_related("comments")
    with bound(user_id=ONE), assert_queries(0, using="photos"):
        assert [c.text for c in photo.comments.all()] == ["x"]


# -- Querysets that outlive their block ----------------------------------------------------


def test_a_queryset_keeps_its_key_after_the_block(rows: list[Photo]) -> None:
    with bound(user_id=ONE):
        lazy = Photo.objects.order_by("title")
        page = lazy[:1]
    assert [row.title for row in lazy] == ["p0", "p3"]
    assert [row.title for row in page] == ["p0"]
    assert lazy.count() == 2
    assert lazy.filter(stars=3).get() == rows[3]
    assert copy.deepcopy(lazy).count() == 2
    with unbound():
        assert lazy.all().count() == 2


def test_under_another_key_it_is_refused(rows: list[Photo]) -> None:
    with bound(user_id=ONE):
        lazy = Photo.objects.all()
        read = Photo.objects.all()
        assert len(read) == 2
    with bound(user_id=NEAR), assert_queries(0, using="photos"):
        for use in (
            lambda: list(lazy), lambda: lazy.count(), lambda: lazy.filter(stars=1),
            lambda: list(read), lambda: len(read), lambda: bool(read), lambda: read.count(),
            lambda: read[0], lambda: list(lazy.iterator()), lambda: lazy.update(stars=1),
            lambda: list(Photo.objects.filter(pk__in=lazy)),
            lambda: lazy | Photo.objects.all(), lambda: Photo.objects.all() & lazy,
            lambda: Photo.objects.union(lazy), lambda: pickle.dumps(lazy),
        ):  # fmt: skip
            with pytest.raises(BoundKeyMismatch):
                use()
        assert "not evaluated" in repr(lazy)


def test_rows_that_were_read_in_place_are_not_seen_under_another_key(rows: list[Photo]) -> None:
    shared = Photo.objects.all()  # as in a module
    with bound(user_id=ONE):
        assert len(shared) == 2
    with bound(user_id=NEAR), pytest.raises(BoundKeyMismatch):
        len(shared)


def test_rows_that_were_read_outside(rows: list[Photo]) -> None:
    of_one, both = Photo.objects.filter(user_id=ONE), Photo.objects.using(SHARD[ONE])
    values = Photo.objects.using(SHARD[ONE]).values("title")
    everything = Photo.objects.scatter()
    assert [len(each) for each in (of_one, both, values, everything)] == [2, 4, 4, 6]
    with bound(user_id=ONE):
        assert (len(of_one), len(everything)) == (2, 6)
        for each in (both, values):
            with pytest.raises(BoundKeyMismatch):
                len(each)


def test_a_slice_from_outside_is_refused(rows: list[Photo]) -> None:
    page, page_of_one = Photo.objects.all()[:3], Photo.objects.filter(user_id=ONE)[:3]
    union = Photo.objects.all().union(Photo.objects.all())
    with bound(user_id=ONE):
        assert len(page_of_one) == 2
        assert len(union) == 2
        for refused in (lambda: list(page), lambda: page.count(), lambda: page.all()):
            with pytest.raises(BoundKeyMismatch, match="Build it inside"):
                refused()


def test_pickles_keep_the_key(rows: list[Photo]) -> None:
    with bound(user_id=ONE):
        query, read = pickle.dumps(Photo.objects.all().query), pickle.dumps(Photo.objects.all())
    restored = Photo.objects.none()
    restored.query = pickle.loads(query)
    assert sorted(row.title for row in restored) == ["p0", "p3"]
    with bound(user_id=NEAR), pytest.raises(BoundKeyMismatch):
        list(pickle.loads(read))
    with bound(user_id=ONE):
        everything = pickle.dumps(Photo.objects.scatter().query)
        restored = Photo.objects.scatter()
        restored.query = pickle.loads(everything)
        assert restored.count() == 6


def test_without_a_binding_nothing_is_sent_more(rows: list[Photo]) -> None:
    with assert_queries(1, using="photos"):
        list(Photo.objects.filter(user_id=ONE))
    assert "bound_key" not in vars(Photo.objects.filter(user_id=ONE).query)


@isolate_apps("tests.photos")
def test_the_key_may_be_a_column_of_a_parents_table() -> None:
    class Paper(ShardedModel):
        user_id = models.BigIntegerField()

        class Meta:
            app_label = "photos"

        class ShardMeta:
            group = "photos"
            shard_key = "user_id"

    class Letter(Paper):
        text = models.CharField(max_length=100)

        class Meta:
            app_label = "photos"

    def sql(**conditions: Any) -> str:
        query: Any = Letter.objects.filter(**conditions).query
        query.bound_key = BoundKey("user_id", ONE)
        return str(query)

    for conditions in ({"text": "x"}, {"user_id": ONE}, {}):
        assert sql(**conditions).partition("WHERE")[2].count("user_id") == 1
    with pytest.raises(BoundKeyMismatch):
        sql(user_id=NEAR)
