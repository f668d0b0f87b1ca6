"""Keys that the program, a receiver, a field or the database would change before the insert."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from django.db import models, transaction
from django.db.models import Value
from django.db.models.functions import Lower
from django.db.models.signals import pre_save
from django.test.utils import isolate_apps

from sharded_orm import runtime
from sharded_orm.exceptions import (
    CrossShardRelation,
    InvalidShardKey,
    ShardKeyChanged,
    ShardKeyRequired,
)
from sharded_orm.models import ShardedModel
from sharded_orm.models.sharding import row_placement
from tests.photos.models import Album, Event, Photo
from tests.queries.conftest import DATABASES, ONE, SHARD, TWO
from tests.samples.models import Handle, Letter

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


# -- Expressions -------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [Value("ada"), Lower(Value("ADA"))], ids=repr)
@pytest.mark.parametrize(
    "write",
    [
        lambda key: Handle.objects.create(name=key),
        lambda key: Handle(name=key).save(),
        lambda key: Handle.objects.bulk_create([Handle(name=key)]),
        lambda key: Handle.objects.get_or_create(name=key),
        lambda key: Handle.objects.update_or_create(name=key, defaults={"note": "x"}),
        lambda key: Letter.objects.create(handle_id=key),
        lambda key: Event.objects.create(account=key),
    ],
)
def test_a_key_that_the_database_would_compute_is_refused(
    placed: None, write: Callable[[Any], Any], key: Any
) -> None:
    with pytest.raises(InvalidShardKey, match="Set it to a value"):
        write(key)
    for model in (Handle, Letter, Event):
        assert not model.objects.scatter().exists()  # type: ignore[attr-defined]  # a sharded one


# -- Changes between save() and the insert -------------------------------------------------------


@pytest.fixture
def change() -> Any:
    """Connect a receiver of ``pre_save`` for the test."""
    connected = []

    def connect(model: Any, how: Callable[[Any], None]) -> None:
        def receiver(instance: Any, **kwargs: Any) -> None:
            how(instance)

        pre_save.connect(receiver, model, weak=False)
        connected.append((receiver, model))

    yield connect
    for receiver, model in connected:
        pre_save.disconnect(receiver, model)


def test_a_receiver_of_pre_save_cannot_put_a_new_row_on_a_wrong_shard(
    placed: None, change: Any
) -> None:
    change(Photo, lambda photo: setattr(photo, "user_id", TWO))
    with pytest.raises(CrossShardRelation, match="pre_save"), transaction.atomic(SHARD[ONE]):
        Photo.objects.create(user_id=ONE, title="x")
    assert not Photo.objects.scatter().exists()


def test_a_receiver_of_pre_save_cannot_change_the_key_of_a_row(placed: None, change: Any) -> None:
    photo = Photo.objects.create(user_id=ONE, title="x")
    change(Photo, lambda photo: setattr(photo, "user_id", TWO))
    photo.title = "y"
    with pytest.raises(ShardKeyChanged), transaction.atomic(SHARD[ONE]):
        photo.save()
    assert Photo.objects.get(user_id=ONE).title == "x"


class SlugOfTitle(models.SlugField):
    """Fills itself when the row is inserted, like fields of well-known packages."""

    def pre_save(self, model_instance: Any, add: bool) -> Any:
        model_instance.slug = model_instance.title.lower()
        return model_instance.slug


@isolate_apps("tests.photos")
def test_a_key_that_its_field_makes_of_others_places_the_row(placed: None) -> None:
    class Page(ShardedModel):
        slug = SlugOfTitle(default="")
        title = models.CharField(max_length=40)

        class Meta:
            app_label = "photos_app"

        class ShardMeta:
            group = "events"
            shard_key = "slug"

    assert row_placement.place(Page._shard_options(), Page(title="Hello")) == runtime.locate(
        "events", "hello"
    )


@isolate_apps("tests.photos")
def test_a_key_that_the_insert_would_change_is_refused() -> None:
    class Page(ShardedModel):
        day = models.DateField(auto_now_add=True)

        class Meta:
            app_label = "photos_app"

        class ShardMeta:
            group = "events"
            shard_key = "day"

    with pytest.raises(ShardKeyRequired, match="pre_save"):
        Page._shard_options().refuse_key_changed_on_insert(Page(day=date(2000, 1, 1)))


@isolate_apps("tests.photos")
def test_a_decimal_key_that_its_column_would_round_is_refused(placed: None) -> None:
    class Price(ShardedModel):
        amount = models.DecimalField(max_digits=8, decimal_places=2)

        class Meta:
            app_label = "photos_app"

        class ShardMeta:
            group = "archive"
            shard_key = "amount"

    for given in (Decimal("999.999"), "999.995", 999.999):
        for write in (
            lambda row: row.save(),
            lambda row: Price.objects.bulk_create([row]),
        ):
            with pytest.raises(InvalidShardKey, match="Round it"):
                write(Price(amount=given))
    options = Price._shard_options()
    for exact, shard in (("999.9900", 0), (1000, 1), (1999.5, 1)):
        assert row_placement.place(options, Price(amount=exact)) == runtime.shard("archive", shard)


# -- A key that was not loaded -------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [
        lambda row: row.save(using=SHARD[TWO]),
        lambda row: row.delete(using=SHARD[TWO]),
        lambda row: Photo.objects.using(SHARD[TWO]).bulk_update([row], ["title"]),
    ],
    ids=["save", "delete", "bulk_update"],
)
@pytest.mark.parametrize("deferred", [("user_id",), ()])
def test_a_row_is_neither_saved_nor_deleted_on_another_shard(
    rows: list[Photo], write: Callable[[Photo], Any], deferred: tuple[str, ...]
) -> None:
    row = Photo.objects.filter(user_id=ONE).defer(*deferred).order_by("pk")[0]
    row.title = "changed"
    with pytest.raises(ShardKeyChanged, match="leave out using="):
        write(row)
    titles = Photo.objects.scatter().order_by("title").values_list("title", flat=True)
    assert list(titles) == [f"p{number}" for number in range(6)]


def test_a_copy_of_a_row_whose_key_was_not_loaded_tells_what_it_needs(rows: list[Photo]) -> None:
    row = Photo.objects.filter(user_id=ONE).defer("user_id").order_by("pk")[0]
    row.pk, row._state.adding = None, True
    with pytest.raises(ShardKeyRequired, match="not loaded"):
        row.save()
    row.user_id = TWO
    row.save()
    assert row._state.db == SHARD[TWO]


# -- A primary key that was changed in memory ------------------------------------------------------


def test_rows_that_refer_to_a_key_that_was_changed_in_memory(placed: None) -> None:
    strategy: Any = runtime.strategy("photos")
    strategy.store.place("photos", {"a": 3, "b": 12})
    for name in ("a", "b"):
        Letter.objects.create(handle=Handle.objects.create(name=name), text=f"to {name}")
    handle = Handle.objects.get(name="a")
    handle.name = "b"
    assert [letter.text for letter in Letter.objects.filter(handle=handle)] == ["to b"]
    assert [text for (text,) in handle.letters.values_list("text")] == ["to b"]
    with pytest.raises(CrossShardRelation):
        list(handle.letters.all())  # they would refer to this object, which is on another shard
    letters = Letter.objects.filter(handle__in=[handle, Handle.objects.get(name="a")])
    assert letters.count() == 2


# -- A message about a row that is not saved yet --------------------------------------------------


def test_the_error_about_a_relation_does_not_need_the_rest_of_the_row(placed: None) -> None:
    album = Album.objects.create(owner_id=TWO, title="a")
    with pytest.raises(CrossShardRelation, match=r"Photo\(pk=None\)"):
        Photo(user_id=ONE, album=album)
