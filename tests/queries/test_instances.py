"""Instances, relations and forms: each works on the shard of its row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django import forms
from django.core import serializers
from django.core.exceptions import ValidationError
from django.db import models, transaction
from django.db.models import Exists, OuterRef, Q, Value, prefetch_related_objects
from django.test import TestCase
from django.test.utils import isolate_apps
from django.utils.functional import SimpleLazyObject

import sharded_orm
from sharded_orm import runtime
from sharded_orm.exceptions import CrossShardRelation, ShardKeyChanged, ShardKeyRequired
from sharded_orm.models import ShardedModel
from tests.photos.models import Album, Comment, Event, Person, Photo, Pin, Reading, Tag, Vote
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, TWO, UNPLACED

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

assert_queries = TestCase().assertNumQueries


@pytest.fixture
def albums(rows: list[Photo]) -> list[Album]:
    """An album of ONE with photo 0 and one of TWO with photo 1."""
    people = [Person.objects.create(pk=key, username=f"user{key}") for key in (ONE, TWO)]
    made = [Album.objects.create(owner=person, title=person.username) for person in people]
    for album, photo in zip(made, rows, strict=False):
        photo.album = album
        photo.save()
    return made


def test_save_without_a_key_is_refused(placed: None) -> None:
    with pytest.raises(ShardKeyRequired, match="user_id is None"):
        Photo(title="x").save()


def test_save_costs_one_update(rows: list[Photo]) -> None:
    rows[0].title = "changed"
    with assert_queries(1, using="photos"):
        rows[0].save()
    assert Photo.objects.get(user_id=ONE, pk=rows[0].pk).title == "changed"


@pytest.mark.parametrize("key", [TWO, NEAR])
def test_the_key_of_a_row_never_changes(rows: list[Photo], key: int) -> None:
    row = rows[0]
    row.user_id = key
    # Like any error inside save(), it breaks the innermost atomic block.
    with pytest.raises(ShardKeyChanged), transaction.atomic(using=SHARD[ONE]):
        row.save()
    with pytest.raises(ShardKeyChanged):
        Photo.objects.filter(user_id=ONE).update(user_id=key)
    with pytest.raises(ShardKeyChanged):
        Photo.objects.bulk_update([row], ["user_id"])
    assert Photo.objects.filter(user_id=ONE).count() == 2


def test_delete_with_the_key_of_another_shard_is_refused(rows: list[Photo]) -> None:
    rows[0].user_id = TWO
    with pytest.raises(ShardKeyChanged):
        rows[0].delete()
    assert Photo.objects.filter(user_id=ONE).count() == 2


def test_saving_on_a_named_shard_that_is_not_the_keys_is_refused(placed: None) -> None:
    with pytest.raises(CrossShardRelation, match="photos_00012"):
        Photo(user_id=TWO, title="x").save(using="photos_00003")
    with pytest.raises(CrossShardRelation):
        Photo.objects.using("photos_00003").bulk_create([Photo(user_id=TWO, title="x")])


def test_a_deleted_row_is_inserted_again_as_django_does(rows: list[Photo]) -> None:
    Photo.objects.filter(user_id=ONE, pk=rows[0].pk).delete()
    rows[0].save()
    assert Photo.objects.get(user_id=ONE, pk=rows[0].pk)._state.db == "photos_00003"


def test_delete_cascades_inside_the_shard(albums: list[Album], rows: list[Photo]) -> None:
    Comment.objects.create(user_id=ONE, photo=rows[0], text="x")
    assert albums[0].delete()[1] == {
        "photos_app.Album": 1,
        "photos_app.Photo": 1,
        "photos_app.Comment": 1,
    }
    assert Photo.objects.filter(user_id=ONE).count() == 1


def test_forward_and_reverse_relations(albums: list[Album], rows: list[Photo]) -> None:
    photo = Photo.objects.get(user_id=TWO, pk=rows[1].pk)
    assert photo.album == albums[1]
    assert photo.album._state.db == "photos_00012"
    assert photo.album.owner.username == "user2"
    assert photo.album.owner._state.db == "default"
    assert list(albums[1].photos.all()) == [photo]
    assert list(Person.objects.get(pk=TWO).albums.all()) == [albums[1]]
    made = albums[1].photos.create(user_id=TWO, title="related")
    assert made._state.db == "photos_00012"
    assert Person.objects.get(pk=TWO).albums.create(title="new")._state.db == "photos_00012"


REFERRING: dict[str, Callable[[Any, list[Photo]], Any]] = {
    "create": lambda album, rows: Photo.objects.create(user_id=ONE, title="x", album=album),
    "assign": lambda album, rows: setattr(rows[0], "album", album),
    "update": lambda album, rows: Photo.objects.filter(user_id=ONE).update(album=album),
    "get_or_create": lambda album, rows: Photo.objects.get_or_create(user_id=ONE, album=album),
    "bulk_create": lambda album, rows: Photo.objects.bulk_create(
        [Photo(user_id=ONE, title="x", album=album)]
    ),
}


@pytest.mark.parametrize("name", REFERRING)
@pytest.mark.parametrize("wrapped", [False, True], ids=["row", "lazy"])
def test_a_row_of_another_shard_is_refused_as_a_lazy_object_as_well(
    name: str, wrapped: bool, albums: list[Album], rows: list[Photo]
) -> None:
    album = SimpleLazyObject(lambda: albums[1]) if wrapped else albums[1]
    with pytest.raises(CrossShardRelation, match=r"Album\(pk="):
        REFERRING[name](album, rows)
    assert not Photo.objects.filter(user_id=ONE, album_id=albums[1].pk).exists()


def test_a_lazy_object_tells_its_shard(albums: list[Album], rows: list[Photo]) -> None:
    album, row = SimpleLazyObject(lambda: albums[1]), SimpleLazyObject(lambda: rows[0])
    assert Photo.objects.filter(album=album).get() == rows[1]
    assert Photo.objects.scatter().contains(row)  # type: ignore[attr-defined]  # of our querysets
    tag = Tag.objects.create(user_id=TWO, name="x")
    Tag.objects.create(user_id=ONE, name="has the same id")
    with pytest.raises(CrossShardRelation):
        rows[0].tags.add(SimpleLazyObject(lambda: tag))
    assert not rows[0].tags.exists()


class Scalar:
    """A number whose ``__iter__()`` refuses, like that of an array without dimensions."""

    def __int__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        raise TypeError("iteration over a 0-d array")


def test_a_single_value_that_seems_to_be_a_list(rows: list[Photo]) -> None:
    lazy: Any = SimpleLazyObject(lambda: 7)
    Photo.objects.filter(user_id=ONE).update(title="7", stars=2)
    for _ in range(3):
        found = Photo.objects.filter(title=lazy, stars=Scalar(), user_id=ONE)
        assert set(found) == {rows[0], rows[3]}
        assert not Photo.objects.filter(user_id=ONE).exclude(Q(title=lazy) | Q(stars=Scalar()))


def test_filter_by_an_instance_goes_to_its_shard(albums: list[Album], rows: list[Photo]) -> None:
    assert Photo.objects.filter(album=albums[1]).explain_routing().shards == (12,)
    assert Photo.objects.filter(album=albums[1]).get() == rows[1]
    assert set(Photo.objects.filter(album__in=albums)) == {rows[0], rows[1]}
    assert Photo.objects.filter(album__owner=TWO).get() == rows[1]
    with pytest.raises(ShardKeyRequired):
        list(Photo.objects.filter(album=albums[1].pk))
    with pytest.raises(ShardKeyRequired):
        list(Photo.objects.exclude(album=albums[1]))


def test_rows_of_two_shards_cannot_be_related(albums: list[Album], rows: list[Photo]) -> None:
    with pytest.raises(CrossShardRelation):
        rows[0].album = albums[1]


def test_a_relation_to_another_shard_is_not_saved(albums: list[Album]) -> None:
    with pytest.raises(CrossShardRelation, match="the same shard key"):
        Photo(album=albums[1], title="x", user_id=ONE).save()
    photo = Photo(album=albums[1], title="x")
    photo.user_id = ONE
    with pytest.raises(CrossShardRelation, match="photos_00012"):
        photo.save(using=albums[1]._state.db)


def test_select_related_inside_and_across(albums: list[Album], rows: list[Photo]) -> None:
    with assert_queries(1, using="photos"):
        photo = Photo.objects.select_related("album").get(user_id=ONE, pk=rows[0].pk)
        assert photo.album.title == "user1"
    with pytest.raises(CrossShardRelation, match="Person"):
        list(Album.objects.select_related("owner").filter(owner=ONE))
    with pytest.raises(CrossShardRelation, match="Person"):
        list(Album.objects.filter(owner__username="user1", owner_id=ONE))


def test_subquery_on_global_rows_is_refused(albums: list[Album]) -> None:
    people = Person.objects.filter(username="user1")
    with pytest.raises(CrossShardRelation):
        list(Album.objects.filter(owner=ONE, owner__in=people))


def test_prefetch_over_shards(albums: list[Album], rows: list[Photo]) -> None:
    photos = list(
        Photo.objects.filter(user_id__in=[ONE, TWO], album__isnull=False)
        .prefetch_related("album")
        .order_by("user_id")
    )
    with assert_queries(0, using="photos"):
        assert [photo.album.title for photo in photos] == ["user1", "user2"]
    people = Person.objects.prefetch_related("albums__photos__album").order_by("pk")
    titles = [[p.title for a in person.albums.all() for p in a.photos.all()] for person in people]
    assert titles == [["p0"], ["p1"]]
    mixed = [Photo.objects.get(user_id=row.user_id, pk=row.pk) for row in rows[:2]]
    prefetch_related_objects(mixed, "album")
    assert [photo.album.title for photo in mixed] == ["user1", "user2"]


def test_many_to_many_inside_the_shard(rows: list[Photo]) -> None:
    tag = Tag.objects.create(user_id=TWO, name="red")
    rows[1].tags.add(tag)
    rows[4].tags.set([tag])
    assert set(tag.photos.all()) == {rows[1], rows[4]}
    assert [t.name for t in rows[1].tags.all()] == ["red"]
    rows[1].tags.remove(tag)
    rows[4].tags.clear()
    assert not tag.photos.exists()
    with pytest.raises((CrossShardRelation, ValueError)):
        rows[0].tags.add(tag)


class PhotoForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = Photo
        fields = ["user_id", "title"]


class TagForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = Tag
        fields = ["user_id", "name"]


def test_model_forms(placed: None) -> None:
    form = PhotoForm({"user_id": TWO, "title": "by form"})
    assert form.is_valid(), form.errors
    assert form.save()._state.db == "photos_00012"
    Tag.objects.create(user_id=TWO, name="red")
    assert not TagForm({"user_id": TWO, "name": "red"}).is_valid()
    assert TagForm({"user_id": ONE, "name": "red"}).is_valid()


def test_validation_places_no_key(placed: None) -> None:
    assert TagForm({"user_id": UNPLACED, "name": "red"}).is_valid()
    assert Tag.objects.filter(user_id=UNPLACED).explain_routing().shards == ()


def test_full_clean_finds_a_duplicate_on_the_shard(rows: list[Photo]) -> None:
    with pytest.raises(ValidationError):
        Photo(photo_id=rows[1].pk, user_id=TWO, title="same id").full_clean()


def test_atomic_opens_on_the_right_shard(rows: list[Photo]) -> None:
    with pytest.raises(KeyError), sharded_orm.atomic(Photo, user_id=TWO):
        Photo.objects.filter(user_id=TWO).update(stars=99)
        raise KeyError
    assert not Photo.objects.filter(user_id=TWO, stars=99).exists()
    with sharded_orm.atomic(rows[1]):
        assert transaction.get_connection("photos_00012").in_atomic_block
    with pytest.raises(ShardKeyRequired, match="title"):
        sharded_orm.atomic(Photo, title="x")
    with pytest.raises(ShardKeyRequired, match=r"write sharded_orm\.atomic\(Photo, user_id=…\)"):
        sharded_orm.atomic(Photo)
    with pytest.raises(ShardKeyRequired, match="Person"):
        sharded_orm.atomic(Person, pk=1)


def test_select_for_update(rows: list[Photo]) -> None:
    with sharded_orm.atomic(Photo, user_id=TWO):
        assert Photo.objects.select_for_update().filter(user_id=TWO).count() == 2
        assert len(Photo.objects.select_for_update().filter(user_id=TWO)) == 2


def test_every_strategy_stores_and_finds(placed: None) -> None:
    Reading.objects.create(sensor=2500, value=1.5)
    assert Reading.objects.get(sensor=2500)._state.db == "archive_00002"
    pin = Pin.objects.create(id=(5 << 46) | 77, note="on five")
    assert pin._state.db == "pins_00005"
    assert Pin.objects.get(pk=pin.pk) == pin
    assert set(Pin.objects.filter(pk__in=[pin.pk, (1 << 46) | 1])) == {pin}


def test_global_models_have_the_same_methods(placed: None) -> None:
    Person.objects.create(username="x")
    assert Person.objects.scatter().filter(username="x").count() == 1
    assert "default" in Person.objects.explain_routing()


def test_composite_keys_that_contain_the_shard_key(placed: None) -> None:
    votes = [Vote.objects.create(user_id=key, number=5) for key in (ONE, TWO)]
    assert Vote.objects.get(pk=(TWO, 5)) == votes[1]
    assert Vote.objects.filter(pk=(TWO, 5)).explain_routing().shards == (12,)
    assert set(Vote.objects.filter(pk__in=[(ONE, 5), (TWO, 5)])) == set(votes)
    votes[1].value = 9
    votes[1].save()
    votes[1].refresh_from_db()
    assert votes[1].value == 9
    assert votes[1].delete()[0] == 1
    assert list(Vote.objects.filter(user_id__in=[ONE, TWO])) == votes[:1]


def test_global_rows_do_not_join_sharded_ones(albums: list[Album]) -> None:
    for query in (
        lambda: Person.objects.filter(albums__title="user1"),
        lambda: Person.objects.filter(pk__in=Album.objects.filter(title="user1").values("owner")),
    ):
        with pytest.raises(CrossShardRelation, match="Album"):
            list(query())


def test_prefetch_tells_equal_ids_of_two_shards_apart(rows: list[Photo]) -> None:
    # Each shard counts automatic ids by itself.
    tags = [Tag.objects.create(id=7, user_id=key, name="t") for key in (ONE, TWO)]
    for tag, photo in zip(tags, rows, strict=False):
        photo.tags.add(tag)
    prefetch_related_objects(tags, "photos__tags")
    assert [[photo.title for photo in tag.photos.all()] for tag in tags] == [["p0"], ["p1"]]
    prefetch_related_objects(rows[:2], "tags")
    assert [[tag.user_id for tag in photo.tags.all()] for photo in rows[:2]] == [[ONE], [TWO]]


def test_a_fixture_is_not_loaded_on_another_shard(placed: None) -> None:
    text = serializers.serialize("json", [Photo(photo_id=99, user_id=TWO, title="x")])
    (loaded,) = serializers.deserialize("json", text, using=SHARD[ONE])
    with pytest.raises(CrossShardRelation), transaction.atomic(using=SHARD[ONE]):
        loaded.save(using=SHARD[ONE])
    loaded.save(using=SHARD[TWO])
    assert Photo.objects.get(user_id=TWO, pk=99)._state.db == SHARD[TWO]


def test_a_related_manager_does_not_change_the_key(albums: list[Album]) -> None:
    near = Person.objects.create(pk=NEAR, username="near")
    with pytest.raises(ShardKeyChanged):
        near.albums.add(albums[0])
    with pytest.raises(ShardKeyChanged):
        albums[0].owner = near
    assert Album.objects.get(owner=ONE) == albums[0]


def test_saving_the_key_alone_is_no_silence(rows: list[Photo]) -> None:
    rows[0].save(update_fields=["user_id"])
    rows[0].user_id = NEAR
    with pytest.raises(ShardKeyChanged), transaction.atomic(using=SHARD[ONE]):
        rows[0].save(update_fields=["user_id"])


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"user_id": UNPLACED, "album_id": 1}, {"album"}),
        ({"album_id": 1}, {"user_id"}),
        ({"user_id": "abc", "album_id": 1}, {"user_id"}),
    ],
)
def test_a_row_without_a_shard_is_validated(
    placed: None, values: dict[str, Any], wrong: set[str]
) -> None:
    with pytest.raises(ValidationError) as caught:
        Photo(title="x", **values).full_clean()
    assert set(caught.value.message_dict) == wrong


@isolate_apps("tests.photos")
def test_what_a_row_says_of_itself_is_checked_without_a_shard(placed: None) -> None:
    class Score(ShardedModel):
        user_id = models.BigIntegerField()
        points = models.IntegerField()

        class Meta:
            app_label = "photos_app"
            constraints = [
                models.CheckConstraint(condition=models.Q(points__gte=0), name="positive")
            ]

        class ShardMeta:
            group = "photos"
            shard_key = "user_id"

    Score(user_id=UNPLACED, points=0).full_clean()
    with pytest.raises(ValidationError, match="positive"):
        Score(user_id=UNPLACED, points=-1).full_clean()
    assert runtime.locate("photos", UNPLACED) is None


def test_refresh_from_a_queryset_needs_no_key(rows: list[Photo]) -> None:
    Photo.objects.filter(user_id=ONE).update(title="new")
    rows[0].refresh_from_db(from_queryset=Photo.objects.select_related("album"))
    assert rows[0].title == "new"


def test_the_next_row_is_one_of_the_same_key(rows: list[Photo]) -> None:
    step = rows[0]._get_next_or_previous_by_FIELD
    posted_at = Photo._meta.get_field("posted_at")
    with pytest.raises(ShardKeyRequired, match="get_next_by_posted_at"):
        step(posted_at, True)
    with pytest.raises(ShardKeyRequired):
        step(posted_at, True, user_id=TWO)
    assert step(posted_at, True, user_id=ONE) == rows[3]


def test_a_key_set_after_its_relation_is_compared_when_saved(albums: list[Album]) -> None:
    photo = Photo(title="x")
    photo.album = albums[0]
    photo.user_id = TWO
    with pytest.raises(CrossShardRelation, match="album"), transaction.atomic(using="photos"):
        photo.save()


def test_subqueries_stay_on_the_shard_or_are_refused(rows: list[Photo]) -> None:
    Comment.objects.create(user_id=ONE, photo=rows[0], text="nice")
    own = Photo.objects.filter(user_id=ONE)
    commented = Comment.objects.filter(text="nice")
    assert own.filter(pk__in=commented.values("photo")).get() == rows[0]
    assert own.filter(Exists(commented.filter(photo=OuterRef("pk")))).get() == rows[0]
    assert own.filter(Exists(commented.filter(user_id=OuterRef("user_id")))).count() == 2
    stars = Photo.objects.filter(user_id=ONE).values("stars")
    assert own.filter(stars__in=stars).count() == 2
    everything = Photo.objects.filter(user_id__in=[ONE, TWO])
    assert everything.filter(Exists(commented.filter(photo=OuterRef("pk")))).get() == rows[0]
    for elsewhere in (
        own.filter(stars__in=Photo.objects.filter(user_id=TWO).values("stars")),
        own.filter(stars__in=Photo.objects.values("stars")),
        own.filter(Exists(commented)),
        own.annotate(found=Exists(Photo.objects.filter(stars=OuterRef("stars")))),
        everything.filter(stars__in=stars),
    ):
        with pytest.raises(CrossShardRelation, match="subquery"):
            list(elsewhere)


def test_combining_querysets_of_two_named_shards_is_refused(rows: list[Photo]) -> None:
    one, two = Photo.objects.using("photos_00003"), Photo.objects.using("photos_00012")
    for combine in (
        lambda: one | two,
        lambda: one & two,
        lambda: one | Photo.objects.filter(user_id=TWO),
        lambda: one.union(two),
        lambda: one | Photo._base_manager.using("photos_00012"),
        lambda: Photo.objects.filter(user_id=ONE) | Photo._base_manager.using("photos_00012"),
    ):
        with pytest.raises(CrossShardRelation, match="combined"):
            combine()
    assert (one.filter(stars=0) | one.filter(stars=3)).count() == 2
    assert (
        one.filter(stars=0) | Photo._base_manager.using(SHARD[ONE]).filter(stars=3)
    ).count() == 2


def test_bulk_writes_keep_every_row_on_the_shard_of_its_key(rows: list[Photo]) -> None:
    made = Event.objects.bulk_create([Event(account=1), Event(account=1.0), Event(account=True)])
    for event, key in zip(made, ("1", "1.0", "True"), strict=True):
        assert Event.objects.get(account=key)._state.db == event._state.db
    with pytest.raises(ShardKeyChanged):
        Photo.objects.bulk_create(
            [Photo(photo_id=rows[0].pk, user_id=NEAR)],
            update_conflicts=True,
            update_fields=["user_id"],
            unique_fields=["photo_id"],
        )
    with pytest.raises(ShardKeyChanged):
        Photo.objects.using("photos_00003").bulk_update([rows[1]], ["title"])
    later = Person(username="later")
    album = Album(owner=later, title="x")
    later.save()
    assert Album.objects.bulk_create([album])[0].owner_id == later.pk


def test_values_are_keys_as_the_database_stores_them(placed: None) -> None:
    made = Event.objects.create(account="7")
    assert Event.objects.filter(account=Value("7")).get() == made
    # MariaDB treats '7', '07' and '7a' as equal to the number 7.
    with pytest.raises(ShardKeyRequired):
        Event.objects.filter(account=Value(7)).explain_routing()


def test_instances_of_two_shards_match_on_their_own_only(rows: list[Photo]) -> None:
    tags = [Tag.objects.create(id=7, user_id=key, name="t") for key in (ONE, TWO)]
    for tag, photo in zip(tags, rows, strict=False):
        photo.tags.add(tag)
    assert set(Photo.objects.filter(tags__in=tags)) == set(rows[:2])
    assert set(Photo.objects.filter(tags__in=tags[:1])) == {rows[0]}
