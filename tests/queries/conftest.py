"""Rows whose shards are known: ONE and NEAR on shard 3, TWO on shard 12 of another node."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from sharded_orm import runtime
from tests.photos.models import Photo

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
    """Six photos: 0 and 3 of ONE, 1 and 4 of TWO, 2 and 5 of NEAR; one minute apart."""
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
