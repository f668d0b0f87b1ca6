"""What the versions of Django offer for models, on sharded models."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import DatabaseError, connections, models, transaction
from django.db.models import F
from django.test import modify_settings
from django.test.utils import CaptureQueriesContext

from tests.cached.models import CachedBill, CachedBoard
from tests.photos.models import Board, Photo, Vote
from tests.queries.conftest import DATABASES, LATER, NEAR, ONE, SHARD, TWO, Clock
from tests.versions import HAS_FETCH_MODES, HAS_TASKS, UPDATES_RETURN_FIELDS

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.usefixtures("placed"),
]
committed = pytest.mark.django_db(databases=DATABASES, transaction=True)
with_fetch_modes = pytest.mark.skipif(not HAS_FETCH_MODES, reason="of Django 6.1")


def test_defaults_of_the_database() -> None:
    bill = CachedBill.objects.create(user_id=ONE, net=5)
    assert (bill.tax, bill.total) == (7, 12)
    (other,) = CachedBill.objects.bulk_create([CachedBill(user_id=ONE, net=1, tax=2)])
    assert CachedBill.objects.get(user_id=ONE, net=other.net).total == 3


@committed
def test_a_generated_field_after_save() -> None:
    bill = CachedBill.objects.create(user_id=ONE, net=5)
    assert CachedBill.objects.get(user_id=ONE, pk=bill.pk).total == 12  # From now on in the cache.
    bill.net = 6
    bill.save()
    assert CachedBill.objects.get(user_id=ONE, pk=bill.pk).total == 13
    if UPDATES_RETURN_FIELDS:
        assert bill.total == 13
    bill.net = F("net") + 1
    bill.save()
    assert CachedBill.objects.get(user_id=ONE, pk=bill.pk).net == 7
    if UPDATES_RETURN_FIELDS:
        assert (bill.net, bill.total) == (7, 14)


@committed
def test_a_save_that_returns_fields_is_one_update() -> None:
    bill = CachedBill.objects.create(user_id=ONE, net=5)
    bill.net = 6
    with CaptureQueriesContext(connections[SHARD[ONE]]) as queries:
        bill.save()
    updates = [q["sql"] for q in queries if q["sql"].startswith("UPDATE")]
    assert len(updates) == 1
    assert 'user_id" =' in updates[0] or "user_id` =" in updates[0]


def test_a_row_that_is_not_updated() -> None:
    error = getattr(Photo, "NotUpdated", DatabaseError)
    for options in ({"force_update": True}, {"update_fields": ["title"]}):
        photo = Photo(pk=10**9, user_id=ONE, title="x")
        with pytest.raises(error), transaction.atomic(using="photos"):
            photo.save(**options)
    assert not Photo.objects.filter(user_id=ONE).exists()


def test_a_composite_primary_key() -> None:
    Vote.objects.create(user_id=ONE, number=1)
    vote = Vote.objects.get(pk=(ONE, 1))
    assert (vote.pk, vote._state.db) == ((ONE, 1), SHARD[ONE])
    assert list(Vote.objects.filter(pk__in=[(ONE, 1), (ONE, 2)])) == [vote]


# -- Fetch modes


@pytest.fixture
def photos() -> list[Photo]:
    """Two photos of each of three keys. Photos of two shards have the same ids."""
    return [
        Photo.objects.create(pk=700 + number, user_id=key, title=f"{key} {number}")
        for key, numbers in ((ONE, (0, 1)), (NEAR, (2, 3)), (TWO, (0, 1)))
        for number in numbers
    ]


@with_fetch_modes
def test_peers_are_fetched_on_their_shard(photos: list[Photo]) -> None:
    rows: Any = Photo.objects.scatter().only("user_id").order_by("user_id", "pk")
    found = list(rows.fetch_mode(models.FETCH_PEERS))  # type: ignore[attr-defined,unused-ignore]  # of Django 6.1
    here, there = connections[SHARD[ONE]], connections[SHARD[TWO]]
    with CaptureQueriesContext(here) as first, CaptureQueriesContext(there) as second:
        titles = {(row.user_id, row.pk): row.title for row in found}
    assert titles == {(photo.user_id, photo.pk): photo.title for photo in photos}
    assert (len(first), len(second)) == (1, 1)


@with_fetch_modes
def test_nothing_more_is_fetched(photos: list[Photo]) -> None:
    from django.core.exceptions import FieldFetchBlocked  # type: ignore[attr-defined,unused-ignore]

    blocked: Any = Photo.objects.filter(user_id=ONE)
    (row, _) = blocked.fetch_mode(models.FETCH_RAISE).only("user_id")  # type: ignore[attr-defined,unused-ignore]
    with pytest.raises(FieldFetchBlocked):
        _ = row.title


@with_fetch_modes
@committed
def test_rows_from_the_cache_have_the_mode() -> None:
    CachedBill.objects.bulk_create([CachedBill(user_id=ONE, net=net) for net in (1, 2)])
    rows: Any = CachedBill.objects.filter(user_id=ONE).order_by("net")
    mode = models.FETCH_PEERS  # type: ignore[attr-defined,unused-ignore]
    for _ in range(2):
        found = list(rows.fetch_mode(mode))
        assert [row._state.fetch_mode for row in found] == [mode, mode]
        assert [peer() for peer in found[0]._state.peers] == found


@pytest.mark.skipif(not HAS_TASKS, reason="of Django 6.0")
def test_a_task_writes_a_row(photos: list[Photo]) -> None:
    from tests.queries.tasks import star

    result = star.enqueue(ONE, photos[0].pk)
    assert result.return_value == 1
    assert Photo.objects.get(user_id=ONE, pk=photos[0].pk).stars == 5
    # The same id on another shard.
    assert Photo.objects.get(user_id=TWO, pk=photos[0].pk).stars is None


@pytest.mark.postgresql_settings
def test_apps_that_are_loaded_again_while_a_group_is_in_use() -> None:
    """Django's app for PostgreSQL then asks each alias in use for the types of extensions."""
    assert not Photo.objects.filter(user_id=ONE).exists()
    assert connections["photos"].connection is not None
    with modify_settings(INSTALLED_APPS={"remove": ["tests.specimens"]}):
        assert not Photo.objects.filter(user_id=ONE).exists()


@with_fetch_modes
@committed
@pytest.mark.parametrize("model", [Board, CachedBoard])
def test_peers_of_a_batch_are_of_one_shard(model: Any, clock: Clock) -> None:
    rows = [model(name=str(number)) for number in range(16)]
    for number, row in enumerate(rows):
        row.save(using=f"pins_{number % 8:05d}")
    batch = model.objects.fetch_mode(models.FETCH_PEERS)  # type: ignore[attr-defined,unused-ignore]
    for _ in range(3):
        found = batch.in_bulk([row.pk for row in rows])
        for row in found.values():
            del row.name
        assert {pk: row.name for pk, row in found.items()} == {row.pk: row.name for row in rows}
        clock.ahead += LATER  # The cache has the rows of CachedBoard in the end.
