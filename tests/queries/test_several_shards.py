"""Querysets over several shards: keys by ``__in`` or ``|``, and every shard by ``scatter()``."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import FieldError
from django.db import connections, transaction
from django.db.models import Avg, Case, Count, F, Max, Q, Sum, Value, When
from django.db.models.functions import NullIf
from django.db.models.lookups import IsNull
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from sharded_orm.exceptions import ScatterNotSupported, ShardKeyRequired
from sharded_orm.signals import scattered
from tests.photos.models import Photo, Tag
from tests.queries.conftest import DATABASES, NEAR, ONE, TWO, UNPLACED

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

assert_queries = TestCase().assertNumQueries


def both() -> Any:
    return Photo.objects.filter(user_id__in=[ONE, TWO, UNPLACED])


def everywhere() -> Any:
    return Photo.objects.scatter()


@pytest.mark.parametrize(
    "queryset", [both, lambda: Photo.objects.filter(Q(user_id=ONE) | Q(user_id=TWO))]
)
def test_keys_on_two_shards(rows: list[Photo], queryset: Any) -> None:
    found = queryset().order_by("-posted_at")
    assert [row.title for row in found] == ["p4", "p3", "p1", "p0"]
    assert {row.user_id: row._state.db for row in found} == {
        ONE: "photos_00003",
        TWO: "photos_00012",
    }


def test_each_shard_is_asked_for_its_own_keys_only(rows: list[Photo]) -> None:
    keys = {shard: set() for shard in (3, 12)}  # type: ignore[var-annotated]
    for target in both()._targets():
        lookup = target.query.where.children[0]
        keys[target.shard.number].update(lookup.rhs)
    assert keys == {3: {ONE}, 12: {TWO}}


def test_reading_methods(rows: list[Photo]) -> None:
    found = both().order_by("posted_at")
    assert [r.title for r in found[1:3]] == ["p1", "p3"]
    assert (found.count(), found.exists(), len(found)) == (4, True, 4)
    assert (found.first(), found.last()) == (rows[0], rows[4])
    assert (found.earliest("posted_at"), found.latest("posted_at")) == (rows[0], rows[4])
    assert found.aggregate(
        n=Count("pk"), top=Max("stars"), mean=Avg("stars"), sum=Sum("stars")
    ) == {
        "n": 4,
        "top": 3,
        "mean": 1.0,
        "sum": 4,
    }
    assert list(found.annotate(more=F("stars") + 1).values_list("more", flat=True)) == [1, 2, 4, 1]
    assert list(found.values_list("title", flat=True)) == ["p0", "p1", "p3", "p4"]
    assert sorted(found.order_by("stars").values_list("stars", flat=True).distinct()) == [0, 1, 3]
    assert set(both().in_bulk([rows[0].pk, rows[1].pk])) == {rows[0].pk, rows[1].pk}
    assert list(found.iterator(chunk_size=1)) == [rows[0], rows[1], rows[3], rows[4]]
    assert found.get(title="p4") == rows[4]
    with pytest.raises(Photo.MultipleObjectsReturned):
        found.get()
    assert "photos_00003" in found.explain()


def test_scatter_asks_every_shard(rows: list[Photo]) -> None:
    assert [r.title for r in everywhere().order_by("-posted_at")[:3]] == ["p5", "p4", "p3"]
    assert everywhere().count() == 6
    per_user = everywhere().values("user_id").annotate(n=Count("pk")).order_by("user_id")
    assert list(per_user) == [{"user_id": u, "n": 2} for u in sorted((ONE, TWO, NEAR))]
    assert everywhere().explain_routing().shards == tuple(range(16))


def test_scatter_with_a_key_asks_one_shard(rows: list[Photo]) -> None:
    with assert_queries(1, using="photos"):
        assert everywhere().filter(user_id=ONE).count() == 2


def test_writes_run_on_each_shard(rows: list[Photo]) -> None:
    with CaptureQueriesContext(connections["photos"]) as queries:
        assert both().update(stars=8) == 4
    assert len(queries) == 2
    assert everywhere().filter(stars=8).count() == 4
    assert both().filter(title__in=["p0", "p1"]).delete() == (2, {"photos_app.Photo": 2})
    assert everywhere().count() == 4
    with pytest.raises(ShardKeyRequired):
        Photo.objects.update(stars=1)
    with pytest.raises(ShardKeyRequired):
        Photo.objects.all().delete()


def test_bulk_create_groups_by_shard(placed: None) -> None:
    new = [Photo(user_id=[ONE, TWO, NEAR][n % 3], title=f"b{n}") for n in range(9)]
    with assert_queries(2, using="photos"):
        made = Photo.objects.bulk_create(new)
    assert made == new
    assert all(row.pk for row in made)
    assert len({row.pk for row in made}) == 9
    assert [row._state.db[-2:] for row in made[:3]] == ["03", "12", "03"]
    assert everywhere().count() == 9


def test_bulk_update_over_shards(rows: list[Photo]) -> None:
    for row in rows:
        row.stars = row.stars + 10
    with assert_queries(2, using="photos"):
        assert Photo.objects.bulk_update(rows, ["stars"]) == 6
    assert everywhere().filter(stars__gte=10).count() == 6


def test_or_of_related_querysets_keeps_both_shards(rows: list[Photo]) -> None:
    tags = [Tag.objects.create(user_id=key, name="t") for key in (ONE, TWO)]
    for tag, photo in zip(tags, rows, strict=False):
        photo.tags.add(tag)
    combined = Photo.objects.filter(user_id=ONE) | Photo.objects.filter(user_id=TWO)
    assert combined.count() == 4
    evaluated = Photo.objects.filter(user_id=ONE)
    len(evaluated)
    assert (evaluated | Photo.objects.filter(user_id=TWO)).count() == 4


def test_union_over_shards_is_refused(rows: list[Photo]) -> None:
    with pytest.raises(ScatterNotSupported, match="union"):
        list(Photo.objects.filter(user_id=ONE).union(Photo.objects.filter(user_id=TWO)))


def test_prefetch_is_grouped_by_shard(rows: list[Photo]) -> None:
    tags = {key: Tag.objects.create(user_id=key, name=f"of {key}") for key in (ONE, TWO)}
    rows[0].tags.add(tags[ONE])
    rows[1].tags.add(tags[TWO])
    found = both().prefetch_related("tags").order_by("posted_at")
    assert [[tag.name for tag in row.tags.all()] for row in found[:2]] == [["of 1"], ["of 2"]]
    streamed = both().prefetch_related("tags").order_by("posted_at").iterator(chunk_size=3)
    assert [[tag.name for tag in row.tags.all()] for row in streamed][:2] == [["of 1"], ["of 2"]]


def test_reads_see_the_open_transaction_of_a_shard(rows: list[Photo]) -> None:
    with transaction.atomic(using="photos_00012"):
        Photo.objects.filter(user_id=TWO).update(title="mine")
        assert everywhere().filter(title="mine").count() == 2


def test_scattered_signal_names_the_call_site(rows: list[Photo]) -> None:
    seen: list[dict[str, Any]] = []

    def listen(**kwargs: Any) -> None:
        seen.append(kwargs)

    scattered.connect(listen, sender=Photo)
    try:
        everywhere().count()
        both().count()
    finally:
        scattered.disconnect(listen, sender=Photo)
    assert len(seen) == 1
    assert __file__ in seen[0]["call_site"]
    assert len(seen[0]["route"].shards) == 16


def test_unknown_fields_are_djangos_error(rows: list[Photo]) -> None:
    with pytest.raises(FieldError):
        everywhere().filter(nonsense=1)


@async_to_sync
async def _async_over_shards() -> None:
    assert [r.title async for r in both().order_by("posted_at")] == ["p0", "p1", "p3", "p4"]
    streamed = both().order_by("posted_at").aiterator(chunk_size=3)
    assert [r.title async for r in streamed] == ["p0", "p1", "p3", "p4"]


def test_async_over_shards(rows: list[Photo]) -> None:
    _async_over_shards()


@pytest.fixture
def tagged(rows: list[Photo]) -> list[Tag]:
    """A tag of ONE and one of TWO, which have the same id: each shard counts the ids of tags by itself."""
    tags = [Tag.objects.create(id=9, user_id=key, name=f"of {key}") for key in (ONE, TWO)]
    for photo, tag in ((rows[0], 0), (rows[3], 0), (rows[1], 1)):
        photo.tags.add(tags[tag])
    return tags


REFUSED_IDS: dict[str, Any] = {
    "groups": lambda: list(everywhere().values("tags").annotate(n=Count("pk"))),
    "groups in order": lambda: list(
        everywhere().values("tags").annotate(n=Count("pk")).order_by("tags")[:3]
    ),
    "groups of the many-to-many table": lambda: list(
        Photo.tags.through.objects.scatter().values("tag").annotate(n=Count("photo"))
    ),
    "number of groups": lambda: everywhere().values("tags").annotate(n=Count("pk")).count(),
    "distinct": lambda: list(everywhere().values_list("tags").distinct()),
    "distinct in order": lambda: list(everywhere().values("title").distinct().order_by("tags")),
    "number of distinct": lambda: everywhere().values_list("tags").distinct().count(),
    "groups by a test of the id": lambda: list(
        everywhere().values(is_nine=IsNull(NullIf("tags", Value(9)), True)).annotate(n=Count("pk"))
    ),
    "distinct aggregate": lambda: everywhere().aggregate(n=Count("tags", distinct=True)),
}


@pytest.mark.parametrize("name", REFUSED_IDS)
def test_equal_ids_that_each_shard_counts_by_itself_are_not_taken_for_one_row(
    tagged: list[Tag], name: str
) -> None:
    with pytest.raises(ScatterNotSupported, match="ids each shard counts by itself"):
        REFUSED_IDS[name]()


def test_ids_that_each_shard_counts_by_itself(tagged: list[Tag], rows: list[Photo]) -> None:
    tags = Tag.objects.scatter()
    # Each row counts as itself, as if its id was unique.
    assert sorted(tags.values_list("pk", flat=True).distinct()) == [9, 9]
    assert tags.values("pk").distinct().count() == 2
    assert tags.aggregate(n=Count("pk", distinct=True)) == {"n": 2}
    assert sorted(tags.values_list("pk").annotate(n=Count("photos"))) == [(9, 1), (9, 2)]
    assert sorted(tag.n for tag in tags.annotate(n=Count("photos"))) == [1, 2]
    assert len(tags.filter(photos__isnull=False).distinct()) == 2
    # The shard key distinguishes them as well.
    of_keys = everywhere().filter(tags__isnull=False).values_list("user_id", "tags")
    assert sorted(of_keys.distinct()) == [(ONE, 9), (TWO, 9)]
    assert sorted(of_keys.annotate(n=Count("pk"))) == [(ONE, 9, 2), (TWO, 9, 1)]
    # Whether there is a tag does not depend on its number.
    has_tag = Case(When(tags__isnull=False, then=Value(1)), default=Value(0))
    has = everywhere().annotate(has=has_tag)
    assert sorted(has.values_list("has", flat=True)) == [0, 0, 0, 1, 1, 1]
    assert sorted(has.values_list("has").annotate(n=Count("pk"))) == [(0, 3), (1, 3)]
    assert sorted(has.values_list("has", flat=True).distinct()) == [0, 1]
    # The names of tags are the same on all shards.
    assert sorted(
        everywhere().filter(tags__isnull=False).values_list("tags__name").annotate(n=Count("pk"))
    ) == [(f"of {ONE}", 2), (f"of {TWO}", 1)]


def test_in_bulk_of_equal_ids(tagged: list[Tag], rows: list[Photo]) -> None:
    for ids in (None, [9]):
        with pytest.raises(ScatterNotSupported, match=r"have the same value 9.*or list\(\) them"):
            Tag.objects.scatter().in_bulk(ids)
    assert Tag.objects.filter(user_id=TWO).in_bulk() == {9: tagged[1]}
    assert everywhere().filter(tags__isnull=False).in_bulk() == {
        rows[number].pk: rows[number] for number in (0, 1, 3)
    }
    with pytest.raises(ValueError, match="must be a unique field"):
        everywhere().in_bulk(field_name="title")
    with pytest.raises((TypeError, ScatterNotSupported), match="values"):
        everywhere().values().in_bulk()
    titles = Photo.objects.filter(user_id=rows[0].user_id).values("title")
    pinned = titles.using(titles.db)
    try:
        expected = pinned.in_bulk()
    except TypeError:  # before Django 6.1
        with pytest.raises(TypeError, match="values"):
            titles.in_bulk()
    else:
        assert titles.in_bulk() == titles.in_bulk([*expected, 7]) == expected


def test_distinct_on_equal_ids(tagged: list[Tag]) -> None:
    if not connections["photos"].features.can_distinct_on_fields:
        pytest.skip("no DISTINCT ON")
    for field in ("pk", "photos__tags"):
        with pytest.raises(ScatterNotSupported, match="ids each shard counts by itself"):
            list(Tag.objects.scatter().order_by(field).distinct(field))
