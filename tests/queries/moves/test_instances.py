"""Instances that were read, pickled or related before a move work on the new shard."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

import sharded_orm
from sharded_orm import runtime
from sharded_orm.exceptions import ShardKeyChanged
from tests.photos.models import Album, Comment, Photo, Tag
from tests.queries.conftest import DATABASES
from tests.queries.moves.conftest import KEY
from tests.queries.moves.hand_move import SOURCE, TARGET, HandMove, alias

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

as_it_is: Callable[[Any], Any] = lambda instance: instance  # noqa: E731
pickled: Callable[[Any], Any] = lambda instance: pickle.loads(pickle.dumps(instance))  # noqa: E731

every_way = pytest.mark.parametrize("kept", [as_it_is, pickled], ids=["kept", "pickled"])


def stored(shard: int) -> list[tuple[str, int]]:
    return list(Photo.objects.using(alias(shard)).values_list("title", "stars"))


@every_way
def test_save(move: HandMove, kept: Callable[[Any], Any]) -> None:
    photo = kept(Photo.objects.get(user_id=KEY))
    move.whole()
    photo.stars = 5
    photo.save()
    assert (stored(SOURCE), stored(TARGET)) == ([], [("p", 5)])
    assert photo._state.db == alias(TARGET)
    photo.stars = 6
    photo.save(update_fields=["stars"])
    assert stored(TARGET) == [("p", 6)]


@every_way
def test_delete(move: HandMove, kept: Callable[[Any], Any]) -> None:
    photo = kept(Photo.objects.get(user_id=KEY))
    move.whole()
    total, counts = photo.delete()
    assert (total, counts) == (2, {Photo._meta.label: 1, Comment._meta.label: 1})
    assert stored(TARGET) == [] and not Comment.objects.filter(user_id=KEY).exists()


@every_way
def test_refresh(move: HandMove, kept: Callable[[Any], Any]) -> None:
    photo = kept(Photo.objects.get(user_id=KEY))
    move.whole()
    Photo.objects.filter(user_id=KEY).update(stars=7)
    photo.refresh_from_db()
    assert (photo.stars, photo._state.db) == (7, alias(TARGET))
    photo = kept(photo)
    photo.refresh_from_db(fields=["stars"])


@every_way
def test_relations(move: HandMove, kept: Callable[[Any], Any]) -> None:
    album = kept(Album.objects.get(owner_id=KEY))
    photo = kept(Photo.objects.get(user_id=KEY))
    comments = photo.comments.all()
    move.whole()
    assert [row.title for row in album.photos.all()] == ["p"]
    assert [row.text for row in comments] == ["c"]
    assert photo.album == album
    album.photos.create(user_id=KEY, title="new")
    album.photos.update(stars=2)
    assert sorted(stored(TARGET)) == [("new", 2), ("p", 2)]
    tag = Tag.objects.create(user_id=KEY, name="t")
    photo.tags.add(tag)
    assert [row.name for row in photo.tags.all()] == ["t"]
    assert [row.title for row in tag.photos.all()] == ["p"]
    Comment(user_id=KEY, photo=photo, text="second").save()
    assert Comment.objects.filter(photo=photo).count() == 2


def test_bulk_update_and_atomic(move: HandMove) -> None:
    photo = Photo.objects.get(user_id=KEY)
    move.whole()
    photo.stars = 8
    assert Photo.objects.bulk_update([photo], ["stars"]) == 1
    assert stored(TARGET) == [("p", 8)]
    with sharded_orm.atomic(photo):
        assert connections[alias(TARGET)].in_atomic_block


def test_an_instance_follows_a_key_that_comes_back(move: HandMove) -> None:
    photo = Photo.objects.get(user_id=KEY)
    move.whole()
    photo.refresh_from_db()
    HandMove(KEY, move.tables, TARGET, SOURCE).whole()
    photo.stars = 9
    photo.save()
    assert (stored(SOURCE), stored(TARGET)) == ([("p", 9)], [])


def test_a_changed_key_is_refused_although_the_other_key_has_moved(move: HandMove) -> None:
    store = runtime.strategy("photos").store  # type: ignore[attr-defined]
    store.place("photos", {str(KEY + 1): SOURCE})
    other = Photo.objects.create(user_id=KEY + 1, title="o")
    move.whole()
    other.user_id = KEY
    with pytest.raises(ShardKeyChanged):
        other.save()
    assert stored(TARGET) == [("p", 1)]


def test_an_instance_whose_key_has_not_moved_costs_no_query_more(move: HandMove) -> None:
    photo = Photo.objects.get(user_id=KEY)
    with CaptureQueriesContext(connections["directory"]) as directory:
        with CaptureQueriesContext(connections[alias(SOURCE)]) as source:
            photo.save()
            list(photo.comments.all())
    assert (len(directory), len(source)) == (0, 2)
