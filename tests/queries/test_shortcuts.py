"""The fast paths of common queries give the results of the general paths."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from django.db.models import Exists, F, Q, QuerySet
from django.db.models.sql import Query

from sharded_orm.models.querysets.route import find_route, only_shard
from sharded_orm.models.sharding.query import ShardedQuery
from tests.photos.models import Album, Event, Photo, Pin
from tests.queries.conftest import DATABASES, ONE

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(databases=DATABASES),
]

SHORT = [
    lambda: Photo.objects.filter(user_id=ONE),
    lambda: Photo.objects.filter(user_id=ONE, pk=7),
    lambda: Photo.objects.filter(pk=7).filter(user_id=str(ONE)).order_by("title")[:3],
    lambda: Album.objects.filter(owner_id=ONE, title="a"),
    lambda: Event.objects.filter(account="alice"),
]
LONG = [
    lambda: Photo.objects.filter(pk=7),
    lambda: Photo.objects.filter(user_id=ONE).filter(user_id=2),
    lambda: Photo.objects.filter(user_id__in=[ONE, 2]),
    lambda: Photo.objects.filter(Q(user_id=ONE) | Q(user_id=2)),
    lambda: Photo.objects.exclude(user_id=ONE),
    lambda: Photo.objects.filter(user_id=F("stars")),
    lambda: Photo.objects.filter(user_id=None),
    lambda: Photo.objects.filter(user_id=ONE, album__title="a"),
    lambda: Photo.objects.filter(Exists(Album.objects.filter(owner_id=ONE)), user_id=ONE),
    lambda: Photo.objects.filter(user_id=ONE).union(Photo.objects.filter(user_id=2)),
]


@pytest.mark.parametrize("make", SHORT)
def test_the_short_way_finds_the_same_shard(make: Any, placed: None) -> None:
    queryset = make()
    shard = only_shard(queryset._options, queryset.query)
    assert shard is not None
    route, _ = find_route(queryset._options, queryset.query, {}, scatter=False)
    assert route.shards == (shard.number,)


@pytest.mark.parametrize("make", LONG)
def test_what_is_not_plain_goes_the_long_way(make: Any, placed: None) -> None:
    queryset = make()
    assert only_shard(queryset._options, queryset.query) is None


@pytest.mark.parametrize(
    "conditions",
    [
        {"user_id": 1},
        {"user_id": 1, "pk": 2, "title": "a", "stars": None},
        {"posted_at": datetime(2026, 1, 1, tzinfo=UTC), "price": 2, "album_id": 3},
        {"album__title": "a", "user_id": 1},
        {"user_id": "1", "stars": 1.5},
    ],
)
@pytest.mark.parametrize("connector", [Q.AND, Q.OR])
def test_conditions_are_those_of_django(conditions: dict[str, Any], connector: str) -> None:
    condition = Q(**conditions, _connector=connector)
    ours, stock = ShardedQuery(Photo), Query(Photo)
    for query in (ours, stock):
        query.add_q(condition)
        query.add_q(~condition)
    assert ours.where == stock.where
    assert ours.alias_refcount == stock.alias_refcount
    assert [join.join_type for join in ours.alias_map.values()] == [
        join.join_type for join in stock.alias_map.values()
    ]


def test_get_orders_nothing_and_raises_what_django_raises(rows: list[Photo]) -> None:
    queryset: QuerySet[Photo] = Photo.objects.filter(user_id=ONE).order_by("title")
    assert queryset.get(pk=rows[0].pk) == rows[0]
    with pytest.raises(Photo.MultipleObjectsReturned, match="returned more than one Photo"):
        queryset.get()
    with pytest.raises(Photo.DoesNotExist, match="Photo matching query does not exist"):
        queryset.get(pk=0)
    assert queryset[:1].get() == rows[0]
    assert queryset.query.order_by == ("title",)


def test_a_pin_is_found_by_the_key_in_its_id() -> None:
    assert only_shard(Pin.objects.all()._options, Pin.objects.filter(id=5).query) is not None
