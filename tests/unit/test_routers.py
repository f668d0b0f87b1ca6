"""The router's answers without a row."""

from __future__ import annotations

import pytest
from django.core.cache.backends.db import BaseDatabaseCache
from django.db import router

from sharded_orm.exceptions import CrossShardRelation, ShardKeyRequired
from sharded_orm.routers import standing_on
from tests.photos.models import Event, Person, Photo


def test_without_a_row_it_refuses() -> None:
    for ask in (router.db_for_read, router.db_for_write):
        with pytest.raises(ShardKeyRequired, match="is read or written without one"):
            ask(Photo)


def test_within_a_block_it_stands_on_a_shard() -> None:
    with standing_on("photos_00003"):
        assert router.db_for_write(Photo) == "photos_00003"
        assert router.db_for_read(Photo.tags.through) == "photos_00003"
        with standing_on("photos_00004"):
            assert router.db_for_write(Photo) == "photos_00004"
        with standing_on("photos"):
            assert router.db_for_write(Photo) == "photos"
        with standing_on(None), pytest.raises(ShardKeyRequired):
            router.db_for_write(Photo)
        assert router.db_for_write(Photo) == "photos_00003"
        assert router.db_for_write(Person) == "default"
        with pytest.raises(ShardKeyRequired):
            router.db_for_write(Event)
    with pytest.raises(ShardKeyRequired):
        router.db_for_write(Photo)


def test_the_block_ends_with_an_error() -> None:
    with pytest.raises(ZeroDivisionError), standing_on("photos_00003"):
        raise ZeroDivisionError
    with pytest.raises(ShardKeyRequired):
        router.db_for_write(Photo)


def test_queries_do_not_follow_it() -> None:
    """Otherwise code that forgets the key would silently get a part of the rows."""
    with standing_on("photos_00003"):
        with pytest.raises(ShardKeyRequired):
            Photo.objects.count()
        with pytest.raises(ShardKeyRequired):
            Photo.objects.filter(title="x").update(title="y")


@pytest.mark.parametrize("alias", ["default", "photos_99999", "nothing"])
def test_another_alias_is_no_place(alias: str) -> None:
    with standing_on(alias), pytest.raises(ShardKeyRequired):
        router.db_for_write(Photo)


@pytest.mark.django_db(databases="__all__")
def test_a_row_beside_one_of_another_shard_is_refused() -> None:
    photo = Photo(photo_id=1, user_id=2)
    photo._state.db, photo._state.adding = "photos_00012", False
    row = Photo.tags.through(photo=photo, tag_id=1)
    with standing_on("photos_00003"), pytest.raises(CrossShardRelation, match="photos_00012"):
        router.db_for_write(type(row), instance=row)
    with standing_on("photos_00012"):
        assert router.db_for_write(type(row), instance=row) == "photos_00012"
    with standing_on("photos_00003"):
        row = Photo.tags.through(photo_id=1, tag_id=1)
        assert router.db_for_write(type(row), instance=row) == "photos_00003"


def test_the_database_cache_of_django_is_global() -> None:
    """Its table is of no app, and what stands for its model has few attributes."""
    model = BaseDatabaseCache("rows", {}).cache_model_class
    assert router.db_for_read(model) == router.db_for_write(model) == "default"
    assert router.allow_migrate_model("default", model)
    assert not router.allow_migrate_model("photos_00003", model)
    assert not router.allow_migrate_model("photos", model)
