"""Instances that were read, pickled or related before a move work on the new shard."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections
from django.test.utils import CaptureQueriesContext
from django.utils.functional import SimpleLazyObject

import sharded_orm
from sharded_orm import runtime
from sharded_orm.exceptions import KeyMoved, ShardKeyChanged
from sharded_orm.routing import placement_lease
from tests.photos.models import Album, Comment, Photo, Tag
from tests.queries.conftest import DATABASES
from tests.queries.moves.conftest import KEY
from tests.queries.moves.hand_move import SOURCE, TARGET, HandMove, alias
from tests.twins.models import Line

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

as_it_is: Callable[[Any], Any] = lambda instance: instance  # noqa: E731
pickled: Callable[[Any], Any] = lambda instance: pickle.loads(pickle.dumps(instance))  # noqa: E731

every_way = pytest.mark.parametrize("kept", [as_it_is, pickled], ids=["kept", "pickled"])


def stored(shard: int) -> list[tuple[str, int]]:
    return list(Photo.objects.using(alias(shard)).values_list("title", "stars"))


def test_a_lazy_object(move: HandMove) -> None:
    album: Any = SimpleLazyObject(lambda: Album.objects.get(owner_id=KEY))
    rows = Photo.objects.filter(album=album)
    move.whole()
    for _ in range(3):
        assert [row.title for row in rows.all()] == ["p"]
        assert [row.title for row in Photo.objects.filter(album=album)] == ["p"]


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


@every_way
def test_neighbours_in_order(move: HandMove, kept: Callable[[Any], Any]) -> None:
    photo = kept(Photo.objects.get(user_id=KEY))
    for pk in (1, 2, 3):
        Line.objects.create(pk=pk, owner=KEY, photo=photo)
    line, unkeyed = (
        kept(Line.objects.get(owner=KEY, pk=2)),
        Line.objects.only("pk").get(owner=KEY, pk=2),
    )
    move.tables[Line._meta.db_table] = "owner"
    move.whole()
    assert line.get_next_in_order().pk == 3
    with pytest.raises(KeyMoved, match="Load the row again"):
        unkeyed.get_next_in_order()
    photo.set_line_order([3, 2, 1])
    assert list(photo.get_line_order()) == [3, 2, 1]
    assert line.get_previous_in_order().pk == 3


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
    runtime.strategy("photos").store.place("photos", {str(KEY + 1): SOURCE})  # type: ignore[attr-defined]
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


def test_a_queryset_that_compares_with_an_instance_follows_the_key(move: HandMove) -> None:
    """It is built before the move, and evaluated afterwards."""
    album = Album.objects.get(owner_id=KEY)
    querysets = [
        Photo.objects.filter(album=album),
        Photo.objects.filter(user_id=KEY, album=album),
        Photo.objects.filter(album__in=[album]),
        album.photos.all(),
        pickle.loads(pickle.dumps(Photo.objects.filter(album=album).query)),
    ]
    *querysets, query = querysets
    restored = Photo.objects.all()
    restored.query = query
    move.whole()
    for queryset in (*querysets, restored):
        assert [photo.title for photo in queryset.all()] == ["p"]
        assert queryset.update(stars=3) == 1
    assert stored(TARGET) == [("p", 3)]


def without_key() -> Photo:
    return Photo.objects.only("title").get(user_id=KEY)


WITHOUT_KEY: dict[str, Callable[[Photo], Any]] = {
    "save": lambda photo: photo.save(),
    "delete": lambda photo: photo.delete(),
    "refresh": lambda photo: photo.refresh_from_db(),
    "load the key": lambda photo: photo.user_id,
    "load a column": lambda photo: photo.stars,
    "comments": lambda photo: list(photo.comments.all()),
    "tags": lambda photo: list(photo.tags.all()),
    "compare": lambda photo: list(Comment.objects.filter(photo=photo)),
    "bulk_update": lambda photo: Photo.objects.bulk_update([photo], ["title"]),
}


@pytest.mark.parametrize("name", WITHOUT_KEY)
def test_an_instance_without_its_key_is_not_looked_for_at_the_old_place(
    move: HandMove, name: str
) -> None:
    photo = without_key()
    move.whole()
    with pytest.raises(KeyMoved, match="Load the row again, with a condition on the shard key"):
        WITHOUT_KEY[name](photo)
    WITHOUT_KEY[name](without_key())


def test_an_instance_without_its_key_finds_it_before_the_old_row_is_taken_away(
    move: HandMove,
) -> None:
    photo = without_key()
    other = Photo.objects.only("title").get(user_id=KEY)
    other.title = "changed"
    HandMove(KEY + 2, {}).whole()
    with CaptureQueriesContext(connections[alias(SOURCE)]) as source:
        assert len(photo.comments.all()) == 1
        assert len(photo.comments.all()) == 1
    assert len(source) == 3
    other.save()
    assert stored(SOURCE) == [("changed", 1)]


def test_a_row_of_an_automatic_many_to_many_table(move: HandMove) -> None:
    tag = Tag.objects.create(user_id=KEY, name="t")
    Photo.objects.get(user_id=KEY).tags.add(tag)
    link: Any = Photo.tags.through.objects.get(photo__user_id=KEY)
    of_key = f"SELECT photo_id FROM {Photo._meta.db_table} WHERE user_id = %s"
    move.tables[Tag._meta.db_table] = "user_id"
    move.links = {link._meta.db_table: f"photo_id IN ({of_key})"}
    move.whole()
    for use in (link.delete, link.refresh_from_db, link.save):
        with pytest.raises(KeyMoved, match="Load the row again"):
            use()
    again: Any = Photo.tags.through.objects.get(photo__user_id=KEY)
    again.refresh_from_db()
    assert again.delete()[0] == 1


def end_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock of the lease go on, until what this process knows of moved keys is too old."""
    clock = placement_lease.now
    monkeypatch.setattr(placement_lease, "now", lambda: clock() + 1000)


@async_to_sync
async def _read_in_event_loop(photo: Photo, comments: Any) -> list[Any]:
    """Querysets are built in the event loop, before and now, and evaluated in another thread."""
    texts = [[row.text async for row in rows] for rows in (comments, photo.comments.all())]
    counts = [
        await photo.tags.acount(),
        await Comment.objects.filter(photo=photo).acount(),
        await photo.comments.aupdate(text="seen"),
    ]
    await photo.arefresh_from_db()
    photo.stars = 4
    await photo.asave()
    return [*texts, *counts, photo._state.db]


@pytest.mark.parametrize("has_lease", [True, False])
def test_relations_in_an_event_loop(
    move: HandMove, has_lease: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo = Photo.objects.get(user_id=KEY)
    comments = photo.comments.all()
    move.whole()
    if not has_lease:
        end_lease(monkeypatch)
    seen = _read_in_event_loop(photo, comments)
    assert seen == [["c"], ["c"], 0, 1, 1, alias(TARGET)]
    assert stored(TARGET) == [("p", 4)]


@pytest.mark.parametrize("has_lease", [True, False])
def test_an_instance_without_its_key_in_an_event_loop(
    move: HandMove, has_lease: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo = without_key()
    move.whole()
    if not has_lease:
        end_lease(monkeypatch)

    @async_to_sync
    async def read() -> list[Comment]:
        rows = photo.comments.all()
        return [row async for row in rows]

    with pytest.raises(KeyMoved, match="Load the row again, with a condition on the shard key"):
        read()


def test_queries_that_are_allowed_in_an_event_loop(
    move: HandMove, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook runs an event loop, and DJANGO_ALLOW_ASYNC_UNSAFE lets it send queries there."""
    photo, other = Photo.objects.get(user_id=KEY), without_key()
    move.whole()

    async def work() -> list[str]:
        end_lease(monkeypatch)
        texts = [row.text for row in photo.comments.all()]
        end_lease(monkeypatch)
        with pytest.raises(KeyMoved):
            list(other.comments.all())
        end_lease(monkeypatch)
        photo.stars = 5
        photo.save()
        connections.close_all()  # An event loop has connections of its own.
        return texts

    with pytest.raises(SynchronousOnlyOperation):
        asyncio.run(work())
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
    assert asyncio.run(work()) == ["c"]
    assert stored(TARGET) == [("p", 5)]
