"""``Model.cache``: a program invalidates the cache after SQL that the library did not see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management.sql import emit_post_migrate_signal
from django.db import connections, transaction
from django.db.migrations import Migration

from sharded_orm.cache.stores.base import CacheServer, ServerDown
from sharded_orm.exceptions import CacheUnavailable
from sharded_orm.models import ShardedModel
from tests.cached.models import (
    CachedAlbum,
    CachedBoard,
    CachedCafe,
    CachedCountry,
    CachedNote,
    CachedPhoto,
    CachedPost,
    PlainRow,
)
from tests.queries.conftest import DATABASES, ONE, SHARD, TWO, UNPLACED, Clock, cache

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

# Longer than the quarantine of a guard.
LATER = 60.0


@pytest.fixture
def photos(clock: Clock, placed: None) -> list[CachedPhoto]:
    """Two photos of ONE and one of TWO, each in an album, read and cached."""
    made = []
    for number, user in enumerate((ONE, ONE, TWO)):
        album = CachedAlbum.objects.create(user_id=user, title="a")
        made.append(CachedPhoto.objects.create(user_id=user, title=f"p{number}", album=album))
    # Creates the guards of tables; the writes have created the others.
    for user in (ONE, TWO):
        CachedPhoto.objects.filter(user_id=user).count()
    clock.ahead += LATER
    for _ in range(3):
        assert read(made) == ["p0", "p1", "p2"] * 3
    return made


def read(photos: list[CachedPhoto]) -> list[str]:
    """Return the titles as objects, as lists of their users and as lists of their albums."""
    everyone = CachedPhoto.objects
    found = [everyone.get(user_id=one.user_id, pk=one.pk).title for one in photos]
    for user in (ONE, TWO):
        found += [one.title for one in everyone.filter(user_id=user).order_by("pk")]
    for one in photos:
        found += [p.title for p in everyone.filter(user_id=one.user_id, album_id=one.album_id)]
    return found


def change(user: int, to: str = "new") -> None:
    """Run SQL that the library does not see."""
    with connections[SHARD[user]].cursor() as cursor:
        cursor.execute("UPDATE cached_cachedphoto SET title = %s", [to])


def test_sql_by_hand_is_not_seen_until_it_is_told(photos: list[CachedPhoto]) -> None:
    change(ONE)
    assert read(photos) == ["p0", "p1", "p2"] * 3
    CachedPhoto.cache.invalidate(user_id=ONE)
    assert read(photos) == ["new", "new", "p2"] * 3


def test_everything_on_every_shard(photos: list[CachedPhoto]) -> None:
    change(ONE)
    change(TWO)
    CachedPhoto.cache.invalidate()
    assert read(photos) == ["new", "new", "new"] * 3


def test_one_shard(photos: list[CachedPhoto]) -> None:
    change(ONE)
    change(TWO)
    CachedPhoto.cache.invalidate(using=SHARD[TWO])
    assert read(photos) == ["p0", "p1", "new"] * 3
    CachedPhoto.cache.invalidate(user_id=ONE, using=SHARD[ONE])
    assert read(photos) == ["new", "new", "new"] * 3


def test_another_key_stays_cached(photos: list[CachedPhoto]) -> None:
    change(ONE)
    change(TWO)
    CachedPhoto.cache.invalidate(user_id=TWO)
    assert read(photos) == ["p0", "p1", "new"] * 3


def test_one_row_and_all_lists_of_its_key(photos: list[CachedPhoto]) -> None:
    change(ONE)
    CachedPhoto.cache.invalidate(user_id=ONE, pk=photos[0].pk)
    # Its former albums are not known, so all lists of albums are invalid, and their objects.
    assert read(photos) == ["new", "new", "p2"] * 3


def test_one_row_of_an_album(photos: list[CachedPhoto]) -> None:
    change(ONE)
    first = photos[0]
    CachedPhoto.cache.invalidate(user_id=ONE, album=first.album, photo_id=first.pk)
    found = read(photos)
    assert (found[0], found[6]) == ("new", "new")
    # The other row was not named.
    assert (found[1], found[7]) == ("p1", "p1")


def test_a_row_without_an_isolate_key(photos: list[CachedPhoto]) -> None:
    with connections[SHARD[ONE]].cursor() as cursor:
        cursor.execute("UPDATE cached_cachedphoto SET album_id = NULL")
    CachedPhoto.cache.invalidate(user_id=ONE, album_id=None, pk=photos[0].pk)
    assert CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk).album_id is None


def test_instances_stand_for_what_foreign_keys_hold(photos: list[CachedPhoto]) -> None:
    album = CachedAlbum.objects.get(user_id=ONE, pk=photos[0].album_id)
    change(ONE)
    CachedPhoto.cache.invalidate(user_id=ONE, album=album, pk=photos[0])
    everyone = CachedPhoto.objects.filter(user_id=ONE)
    assert [photo.title for photo in everyone.filter(album=album)] == ["new"]
    assert everyone.get(pk=photos[0].pk).title == "new"
    assert everyone.get(pk=photos[1].pk).title == "p1"


def test_inside_a_transaction_it_takes_part_in_it(photos: list[CachedPhoto]) -> None:
    with transaction.atomic(using=SHARD[ONE]):
        change(ONE)
        CachedPhoto.cache.invalidate(user_id=ONE)
        found = read(photos)
        assert [found[0], found[1]] == ["new", "new"]  # its own writes
    assert read(photos) == ["new", "new", "p2"] * 3
    with pytest.raises(RuntimeError), transaction.atomic(using=SHARD[ONE]):
        change(ONE, "newer")
        CachedPhoto.cache.invalidate(user_id=ONE)
        raise RuntimeError
    assert read(photos) == ["new", "new", "p2"] * 3


def test_inside_a_transaction_of_the_group(photos: list[CachedPhoto]) -> None:
    with transaction.atomic(using="photos"):
        change(ONE)
        before = len(connections["photos"].shards.wrappers)  # type: ignore[attr-defined]
        CachedPhoto.cache.invalidate()
        # Unused shards are not connected to.
        assert len(connections["photos"].shards.wrappers) == before  # type: ignore[attr-defined]
        assert not connections[SHARD[ONE]].transaction_writes.is_announced  # type: ignore[attr-defined]
    assert read(photos) == ["new", "new", "p2"] * 3


def test_global_models(clock: Clock) -> None:
    country = CachedCountry.objects.create(name="Chad", people=1)
    post = CachedPost.objects.create(topic=3, title="p")

    def seen() -> list[Any]:
        return [
            CachedCountry.objects.get(pk=country.pk).people,
            CachedPost.objects.get(pk=post.pk).title,
            *CachedPost.objects.filter(topic=3).values_list("title", flat=True),
            *[one.title for one in CachedPost.objects.filter(topic=3)],
        ]

    clock.ahead += LATER
    for _ in range(3):
        seen()
    with connections["default"].cursor() as cursor:
        cursor.execute("UPDATE cached_cachedcountry SET people = 2")
        cursor.execute("UPDATE cached_cachedpost SET title = 'q'")
    CachedCountry.cache.invalidate(pk=country.pk)
    CachedPost.cache.invalidate(topic=3, id=post.pk)
    assert seen() == [2, "q", "q", "q"]


def test_a_key_without_rows_has_nothing_to_forget(photos: list[CachedPhoto]) -> None:
    CachedPhoto.cache.invalidate(user_id=UNPLACED)
    assert read(photos) == ["p0", "p1", "p2"] * 3


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"user": 1}, "unknown name 'user'; valid names are .*'album', 'album_id'.*'user_id'"),
        ({"title": "x"}, "unknown name 'title'"),
        ({"pk": 5}, "needs 'user_id' beside .*'pk'"),
        ({"album_id": 5}, "needs 'user_id'"),
    ],
)
def test_names_are_checked(where: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        CachedPhoto.cache.invalidate(**where)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"user_id": "x"}, r"'x' is no value of CachedPhoto\.user_id"),
        ({"user_id": None}, "None is no value"),
        ({"user_id": 1, "pk": "x"}, r"'x' is no value of CachedPhoto\.photo_id"),
        ({"user_id": 1, "album": object()}, r"is no value of CachedPhoto\.album"),
        ({"using": "default"}, "'default' holds no cached rows of CachedPhoto"),
        ({"using": "photos"}, "'photos' holds no cached rows"),
    ],
)
def test_values_are_checked(placed: None, where: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CachedPhoto.cache.invalidate(**where)


def test_the_primary_key_may_be_the_shard_key(clock: Clock) -> None:
    board = CachedBoard.objects.create(name="b")
    alias = board._state.db
    assert alias is not None
    CachedBoard.objects.filter(pk=board.pk).count()
    clock.ahead += LATER
    for _ in range(2):
        assert CachedBoard.objects.get(pk=board.pk).name == "b"
    with connections[alias].cursor() as cursor:
        cursor.execute("UPDATE cached_cachedboard SET name = 'c'")
    CachedBoard.cache.invalidate(pk=board.pk)
    assert CachedBoard.objects.get(pk=board.pk).name == "c"


@pytest.fixture
def no_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the local server act as one that is down."""

    def fail(self: CacheServer, *args: Any, **kwargs: Any) -> Any:
        raise ServerDown(f"{self.name}: away")

    kind = type(cache().servers[0])
    with monkeypatch.context() as patch:
        patch.setattr(kind, "finish", fail)
        yield


def migrated(alias: str, plan: list[Any]) -> None:
    """Send the signal that Django's migrate sends at its end."""
    emit_post_migrate_signal(verbosity=0, interactive=False, db=alias, plan=plan)


# The operations of the migrations do not matter.
PLAN = [(Migration("0002_sql", "cached"), False)]


def test_migrations_may_have_run_sql(photos: list[CachedPhoto]) -> None:
    change(ONE)
    migrated("default", PLAN)
    migrated(SHARD[ONE], [])
    assert read(photos) == ["p0", "p1", "p2"] * 3
    migrated(SHARD[ONE], PLAN)
    assert read(photos) == ["new", "new", "p2"] * 3


def test_a_migration_of_the_global_database(clock: Clock) -> None:
    country = CachedCountry.objects.create(name="Chad", people=1)
    clock.ahead += LATER
    for _ in range(2):
        assert CachedCountry.objects.get(pk=country.pk).people == 1
    with connections["default"].cursor() as cursor:
        cursor.execute("UPDATE cached_cachedcountry SET people = 2")
    assert CachedCountry.objects.get(pk=country.pk).people == 1
    migrated("default", PLAN)
    assert CachedCountry.objects.get(pk=country.pk).people == 2


def test_a_migration_goes_on_without_the_cache_server(
    photos: list[CachedPhoto], no_servers: None, caplog: pytest.LogCaptureFixture
) -> None:
    migrated(SHARD[ONE], PLAN)
    (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
    message = record.getMessage()
    assert message.startswith(
        f"{SHARD[ONE]} was migrated, and what the cache has of it may be stale"
    )
    assert "manage.py cache_invalidate cached.CachedAlbum cached.CachedPhoto" in message
    assert "CachedCountry" not in message


@pytest.mark.parametrize("policy", ["refuse", "proceed"])
def test_a_server_that_is_down_is_always_an_error(
    photos: list[CachedPhoto], no_servers: None, policy: str
) -> None:
    options = cache().options
    object.__setattr__(options, "on_failure", policy)
    try:
        with pytest.raises(CacheUnavailable, match=r"away.*Repeat this"):
            CachedPhoto.cache.invalidate(user_id=ONE)
    finally:
        object.__setattr__(options, "on_failure", "refuse")


def test_models_that_are_not_cached() -> None:
    # Code that invalidates the cache also runs on sites without one.
    PlainRow.cache.invalidate(user_id=ONE)
    CachedCafe.cache.invalidate(anything=1)
    assert set(PlainRow.cache.statistics().values()) == {0}


def test_statistics_of_this_process(photos: list[CachedPhoto]) -> None:
    before = CachedPhoto.cache.statistics()
    CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk)
    after = CachedPhoto.cache.statistics()
    assert after["object_hits"] == before["object_hits"] + 1
    assert set(CachedNote.cache.statistics().values()) == {0}


def test_it_shows_what_it_is() -> None:
    assert repr(CachedPhoto.cache).startswith("<cache of CachedPhoto, isolated by 'album': ")
    assert repr(CachedCountry.cache).startswith("<cache of CachedCountry: ")
    assert repr(PlainRow.cache) == "<cache of PlainRow: off>"
    assert repr(CachedCafe.cache) == "<cache of CachedCafe: off>"
    assert repr(ShardedModel.cache) == "<cache of ShardedModel: off>"


def test_it_is_on_the_class_only() -> None:
    with pytest.raises(AttributeError, match="not accessible via CachedPhoto instances"):
        CachedPhoto().cache  # noqa: B018  the access is what raises
