"""Rows on known shards: ONE and NEAR on shard 3, TWO on shard 12 of another node."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.db import connections
from django.db.models.sql import Query
from django.db.models.sql.compiler import SQLCompiler
from django.test.utils import CaptureQueriesContext

from sharded_orm import runtime
from sharded_orm.cache.client import CacheClient
from sharded_orm.cache.reader import Reader
from sharded_orm.models.cached import queryset
from sharded_orm.models.sharding.query import ShardedQuery
from sharded_orm.testing import cache_isolation
from tests.cached.models import CachedAlbum, CachedPhoto
from tests.photos.models import Album, Person, Photo

ONE, NEAR, TWO, UNPLACED = 1, 3, 2, 404
SHARD = {ONE: "photos_00003", NEAR: "photos_00003", TWO: "photos_00012"}
DATABASES = [
    "default",
    "directory",
    "tickets_1",
    "tickets_2",
    "photos",
    "events",
    "archive",
    "pins",
    "visits",
]
START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def placed(db_all: None) -> None:
    store = runtime.strategy("photos").store  # type: ignore[attr-defined]
    store.place("photos", {str(key): int(alias[-5:]) for key, alias in SHARD.items()})


@pytest.fixture
def db_all(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("db")


@pytest.fixture
def rows(placed: None) -> list[Photo]:
    """Six photos, one minute apart: 0 and 3 of ONE, 1 and 4 of TWO, 2 and 5 of NEAR."""
    keys = [ONE, TWO, NEAR] * 2
    return [
        Photo.objects.create(
            user_id=key,
            title=f"p{number}",
            stars=number % 4,
            posted_at=START + timedelta(minutes=number),
        )
        for number, key in enumerate(keys)
    ]


@pytest.fixture
def worlds(placed: None) -> tuple[Any, Any]:
    """The same rows in one plain database and on shards."""
    from tests.queries.twins import World, both

    worlds: tuple[World, World] = both()
    for world in worlds:
        world.fill()
    return worlds


@pytest.fixture
def items(worlds: Any) -> Any:
    """The rows on shards alone."""
    return worlds[1]


@pytest.fixture
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query that Django compiles fails."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("This read has compiled its query.")

    monkeypatch.setattr(SQLCompiler, "as_sql", refuse)
    monkeypatch.setattr(Query, "add_q", refuse)
    monkeypatch.setattr(ShardedQuery, "add_q", refuse)


class Clock:
    """Seconds since 1970, with an offset that a test sets."""

    ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of cache readers. The cache is empty at the start."""
    cache_isolation.renew()
    clock = Clock()
    monkeypatch.setattr(queryset, "_reader", Reader(cache(), clock))
    return clock


def cache() -> CacheClient:
    client = runtime.cache()
    assert client is not None
    return client


# Longer than the quarantine of a guard.
LATER = 60.0


@pytest.fixture
def photos(clock: Clock, placed: None) -> list[CachedPhoto]:
    """Five photos of ONE, two of them in an album; the quarantine of their guards is over."""
    album = CachedAlbum.objects.create(user_id=ONE, title="a")
    photos = [
        CachedPhoto.objects.create(
            user_id=ONE,
            title=f"p{number}",
            stars=number,
            price=Decimal("1.50"),
            posted_at=START + timedelta(minutes=number),
            album=album if number < 2 else None,
        )
        for number in range(5)
    ]
    # Makes the guards of the table; the writes have made the others.
    list(CachedPhoto.objects.filter(user_id=ONE))
    CachedPhoto.objects.filter(user_id=ONE, pk=0).first()
    clock.ahead += LATER
    return photos


def queries(run: Callable[[], Any], alias: str = SHARD[ONE]) -> int:
    """Return the number of rows or results that ``run`` reads from the database."""
    with CaptureQueriesContext(connections[alias]) as captured:
        run()
    return sum(query["sql"].lstrip("(").startswith(("SELECT", "DECLARE")) for query in captured)


def is_cached(read: Callable[[], Any], alias: str = SHARD[ONE]) -> bool:
    """Whether ``read`` is answered by the cache in the end, with the same result."""
    first = read()
    queries(read, alias)  # a list on a store without read leases stores its objects now
    again: list[Any] = []
    if queries(lambda: again.append(read()), alias):
        return False
    assert again == [first]
    return True


@pytest.fixture
def album(placed: None) -> Album:
    """An album of ``ONE``, and the persons of all keys in the global database."""
    for key in (ONE, NEAR, TWO):
        Person.objects.create(pk=key, username=f"person {key}")
    return Album.objects.create(owner_id=ONE, title="old")
