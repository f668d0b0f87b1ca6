"""Inside ``bound()``, ``scatter()`` prefetches for the rows of all keys."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db.models import Prefetch

from sharded_orm import bound, unbound
from sharded_orm.exceptions import BoundKeyMismatch
from tests.photos.models import Album, Comment, Photo, Tag
from tests.queries.conftest import DATABASES, NEAR, ONE, TWO

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

TITLES = [f"p{number}" for number in range(6)]


@pytest.fixture
def related(rows: list[Photo]) -> None:
    """Each photo has a comment and a tag that are called like the photo, and an album."""
    albums = {key: Album.objects.create(owner_id=key, title=str(key)) for key in (ONE, NEAR, TWO)}
    for row in rows:
        Comment.objects.create(user_id=row.user_id, photo=row, text=row.title)
        row.tags.add(Tag.objects.create(user_id=row.user_id, name=row.title))
        row.album = albums[row.user_id]
        row.save()


def everything() -> Any:
    return Photo.objects.scatter().order_by("title")


def listed(rows: Any) -> list[Any]:
    return list(rows)


def iterated(rows: Any) -> list[Any]:
    return list(rows.iterator(chunk_size=2))


@async_to_sync
async def iterated_later(rows: Any) -> list[Any]:
    return [row async for row in rows.aiterator(chunk_size=2)]


@pytest.mark.parametrize("read", [listed, iterated, iterated_later])
def test_rows_beside_and_the_rows_referred_to(related: None, read: Any) -> None:
    with bound(user_id=ONE):
        photos = read(everything().prefetch_related("comments", "tags", "album"))
        assert [photo.title for photo in photos] == TITLES
        assert {photo.album.title for photo in photos} == {str(ONE), str(NEAR), str(TWO)}
        with unbound():
            assert [[c.text for c in photo.comments.all()] for photo in photos] == [
                [title] for title in TITLES
            ]
            assert [[t.name for t in photo.tags.all()] for photo in photos] == [
                [title] for title in TITLES
            ]
        # The block is for rows of one key, so the relations of others are not used there.
        for number, photo in enumerate(photos):
            if photo.user_id == ONE:
                assert [c.text for c in photo.comments.all()] == [TITLES[number]]
            else:
                with pytest.raises(BoundKeyMismatch, match=r"unbound\(\)"):
                    photo.comments.all()


@pytest.mark.parametrize("read", [listed, iterated, iterated_later])
def test_rows_of_one_other_key(related: None, read: Any) -> None:
    with bound(user_id=ONE):
        photos = read(everything().filter(user_id=NEAR).prefetch_related("comments"))
        with unbound():
            assert [photo.comments.all()[0].text for photo in photos] == ["p2", "p5"]


@pytest.mark.parametrize("read", [listed, iterated, iterated_later])
def test_a_queryset_for_all_keys(related: None, read: Any) -> None:
    comments = Prefetch("comments", Comment.objects.exclude(text="p2"), "kept")
    with bound(user_id=ONE):
        for prefetch in (comments, Prefetch("comments", comments.queryset.scatter(), "kept")):
            photos = read(everything().prefetch_related(prefetch))
            kept = [[c.text for c in photo.kept] for photo in photos]
            assert kept == [[title] if title != "p2" else [] for title in TITLES]


def test_a_queryset_of_the_bound_key_is_refused(related: None) -> None:
    # It would find no comments of the other photos.
    with bound(user_id=ONE):
        comments = Prefetch("comments", Comment.objects.all())
        of_photos = Comment.objects.scatter().prefetch_related(
            Prefetch("photo", Photo.objects.all())
        )
        for lookup in (comments, Prefetch("comments", of_photos)):
            for read in (listed, iterated, iterated_later):
                with pytest.raises(BoundKeyMismatch, match=r"scatter\(\)"):
                    read(everything().prefetch_related(lookup))


def test_a_queryset_that_outlives_the_block(related: None) -> None:
    with bound(user_id=ONE):
        photos = everything().prefetch_related("comments")
    assert [photo.comments.all()[0].text for photo in photos] == TITLES
