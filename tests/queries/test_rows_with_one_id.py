"""Rows of two shards that have the same primary key, because each shard counts its own ids."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from django.db import models
from django.test.utils import isolate_apps
from django.utils.functional import SimpleLazyObject

from sharded_orm import ShardedModel
from tests.photos.models import Photo, Tag
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, TWO

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

ID = 7


@pytest.fixture
def tags(placed: None) -> list[Tag]:
    for key in (ONE, TWO):
        Tag.objects.create(id=ID, user_id=key, name=f"tag {key}")
    return list(Tag.objects.scatter().order_by("user_id"))


def test_they_are_different_rows(tags: list[Tag]) -> None:
    one, two = tags
    assert one != two
    assert len({one, two}) == 2
    assert one not in [two]
    assert not (rows := Tag.objects.filter(user_id=TWO)).contains(one)
    assert list(rows) == [two]
    assert not rows.contains(one)  # the queryset has its rows now
    assert one not in rows


def test_one_row_is_equal_to_itself(tags: list[Tag]) -> None:
    """As in Django, whatever has changed in memory."""
    one, _ = tags
    for again in (
        Tag.objects.get(user_id=ONE),
        Tag.objects.only("name").get(user_id=ONE),
        Tag.objects.defer("user_id").get(user_id=ONE),
        pickle.loads(pickle.dumps(one)),
        Tag(id=ID, user_id=TWO),
    ):
        assert again == one
        assert hash(again) == hash(one)
    again = Tag.objects.get(user_id=ONE)
    again.user_id = NEAR
    assert again == one
    assert one != Tag(id=ID + 1, user_id=ONE)
    assert one != "tag"


def test_a_lazy_object_is_the_row_that_it_stands_for(tags: list[Tag]) -> None:
    one, two = tags
    lazy: Any = SimpleLazyObject(lambda: one)
    assert lazy == one and one == lazy
    assert lazy != two and two != lazy


def test_rows_without_their_keys(tags: list[Tag]) -> None:
    """The shard tells them apart, since each counts its ids."""
    unkeyed = list(Tag.objects.scatter().only("name"))
    assert len({*unkeyed, *tags}) == 2
    assert not any("user_id" in tag.__dict__ for tag in unkeyed)
    assert Tag(id=ID) == tags[0]


def test_rows_of_an_automatic_table(tags: list[Tag]) -> None:
    through: Any = Photo.tags.through
    for tag in tags:
        photo = Photo.objects.create(user_id=tag.user_id, title="p")
        through.objects.create(id=ID, photo=photo, tag=tag)
    one, two = through.objects.scatter()
    assert one != two


def test_a_row_that_has_moved(placed: None) -> None:
    """It is one row, however its key was written down, and without its key if its id is the only one."""
    row = Photo.objects.create(user_id=ONE, title="p")
    for values in ({"user_id": ONE}, {"user_id": str(ONE)}, {}):
        state = {"photo_id": row.pk, **values}
        moved = Photo.from_db(SHARD[TWO], list(state), list(state.values()))
        assert moved == row and row == moved


def test_a_key_that_is_no_key(tags: list[Tag]) -> None:
    one, two = tags
    one.user_id = "none"  # type: ignore[assignment]
    assert one != two


def test_an_abstract_model_behind_the_base_class_says_what_is_equal() -> None:
    class Named(models.Model):
        name = models.CharField(max_length=9)

        class Meta:
            abstract = True

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Named) and self.name == other.name

        def __hash__(self) -> int:
            return hash(self.name)

    with isolate_apps("tests.photos"):

        class Card(ShardedModel, Named):
            user_id = models.BigIntegerField()

            class Meta:
                app_label = "photos_app"

            class ShardMeta:
                group = "photos"
                shard_key = "user_id"

    assert len({Card(name="a"), Card(name="a"), Card(name="b")}) == 2
