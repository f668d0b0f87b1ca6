"""Under a bound key, Django's own queries of a model are the same with ``base_manager_name``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sharded_orm import bound, unbound
from sharded_orm.exceptions import BoundKeyMismatch
from tests.photos.models import Album, Comment, Photo, Tag
from tests.queries.conftest import DATABASES, NEAR, ONE

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


@pytest.fixture(params=[None, "objects"], autouse=True)
def base_manager(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``Meta.base_manager_name`` of the models."""
    models: list[Any] = [Photo, Album, Comment, Tag]
    for model in models:
        monkeypatch.setattr(model._meta, "base_manager_name", request.param)
        model._meta._expire_cache()
    assert hasattr(Photo._base_manager, "scatter") is bool(request.param)
    yield
    monkeypatch.undo()
    for model in models:
        model._meta._expire_cache()


@pytest.fixture
def comment(rows: list[Photo]) -> Comment:
    """A comment of ONE that refers to a photo of NEAR, as older code may have left it."""
    comment = Comment.objects.create(user_id=ONE, photo=rows[0], text="x")
    Comment.objects.filter(user_id=ONE).update(photo_id=rows[2].pk)
    comment.refresh_from_db()
    return comment


def test_a_row_of_the_key(rows: list[Photo]) -> None:
    with bound(user_id=ONE):
        photo = Photo.objects.get(pk=rows[0].pk)
        photo.title = "a"
        photo.save()
        photo.title = "b"
        photo.save(update_fields=["title"])
        photo.title = "c"
        photo.refresh_from_db()
        assert photo.title == "b"
        Photo.objects.filter(pk=photo.pk).update(title="d")
        photo.refresh_from_db(fields=["title"], from_queryset=Photo.objects.all())
        assert photo.title == "d"


def test_fields_that_were_not_loaded(rows: list[Photo]) -> None:
    with bound(user_id=ONE):
        photo = Photo.objects.only("title").get(pk=rows[3].pk)
        assert (photo.stars, photo.user_id) == (3, ONE)
        deferred = Photo.objects.only("title").get(pk=rows[3].pk)
        deferred.save()
        assert list(deferred.comments.all()) == []
    theirs = Photo.objects.filter(user_id=NEAR).only("title").get(pk=rows[2].pk)
    with bound(user_id=ONE), pytest.raises(BoundKeyMismatch):
        theirs.save()


def test_a_row_of_another_key(rows: list[Photo]) -> None:
    with bound(user_id=ONE):
        for refused in (rows[2].save, rows[2].refresh_from_db, rows[2].delete):
            with pytest.raises(BoundKeyMismatch):
                refused()


def test_the_row_that_is_referred_to(comment: Comment, rows: list[Photo]) -> None:
    with bound(user_id=ONE):
        assert Comment.objects.get().photo == rows[2]
        assert Comment.objects.prefetch_related("photo").get().photo == rows[2]
        assert Comment.objects.select_related("photo").get().photo == rows[2]


def test_deletion_takes_what_refers_to_the_row(comment: Comment, rows: list[Photo]) -> None:
    # Otherwise the database would refuse the deletion, or the comment would refer to nothing.
    with bound(user_id=NEAR):
        Photo.objects.get(pk=rows[2].pk).delete()
        with unbound():
            assert not Comment.objects.scatter().exists()
