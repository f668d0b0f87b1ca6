"""A page is saved as a whole or not at all: row, relations, children and log entry."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.db import DatabaseError, IntegrityError, connections, transaction
from django.test import Client

from sharded_orm.admin import ShardedModelAdmin
from tests.admin.conftest import (
    DATABASES,
    ONE,
    SHARD,
    TWO,
    UNPLACED,
    Rows,
    form_of,
    inline,
    object_id_by_hand,
    url,
)
from tests.admin.site import AlbumsOfPerson, CommentsOfPhoto
from tests.photos.models import Album, Comment, Event, Person, Photo, Tag, Visit

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
    pytest.mark.urls("tests.admin.site"),
]


class Dangling(ShardedModelAdmin):
    """An admin that saves an invalid foreign key: SQLite refuses the commit, MariaDB the statement."""

    inlines = [CommentsOfPhoto]
    filter_horizontal = ["tags"]

    def response_add(self, request: Any, obj: Any, post_url_continue: Any = None) -> Any:
        assert LogEntry.objects.count() == 1
        self.spoil(obj)
        return super().response_add(request, obj, post_url_continue)

    def response_change(self, request: Any, obj: Any) -> Any:
        assert LogEntry.objects.count() == 1
        self.spoil(obj)
        return super().response_change(request, obj)

    def spoil(self, obj: Any) -> None:
        Photo.objects.using(obj._state.db).filter(pk=obj.pk).update(album_id=123456)


def test_what_the_shard_refuses_at_its_commit_is_not_logged(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    register(Photo, Dangling)
    data = {**form_of(rows.photo, title="new"), "comments-0-text": "changed", "tags": []}
    with pytest.raises(IntegrityError):
        admin_client.post(url(Photo, "change", object_id_by_hand(rows.photo)), data)
    photo = Photo.objects.get(user_id=ONE)
    assert (photo.title, photo.album_id) == ("photo of 1", rows.album.pk)
    assert [comment.text for comment in photo.comments.all()] == ["nice"]
    assert photo.tags.count() == 1
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize("key", [TWO, UNPLACED])
def test_nor_is_a_new_row(admin_client: Client, rows: Rows, register: Any, key: int) -> None:
    register(Photo, Dangling)
    blank = dict.fromkeys(("album", "posted_at_0", "posted_at_1", "stars", "price"), "")
    with pytest.raises(IntegrityError):
        admin_client.post(
            url(Photo, "add", _key=key),
            {**blank, "title": "new", **inline("comments", {"text": "first", "author": ONE})},
        )
    assert not Photo.objects.filter(title="new").scatter().exists()
    assert Comment.objects.scatter().count() == 1
    assert not LogEntry.objects.exists()


def test_an_error_in_the_log_takes_the_row_back(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    class NoLog(ShardedModelAdmin):
        def log_change(self, request: Any, obj: Any, message: Any) -> Any:
            raise DatabaseError("the log is full")

        log_addition = log_change

    for model, change, add, data in (
        (
            Tag,
            url(Tag, "change", object_id_by_hand(rows.tag)),
            url(Tag, "add", _key=ONE),
            {"name": "new"},
        ),
        (Event, None, url(Event, "add"), {"account": "new", "number": 1}),
        (Visit, None, url(Visit, "add"), {"page": "new"}),
    ):
        register(model, NoLog)
        for address in filter(None, (change, add)):
            with pytest.raises(DatabaseError, match="the log is full"):
                admin_client.post(address, data)
    assert not Tag.objects.filter(name="new").scatter().exists()
    assert not Event.objects.scatter().exists()
    assert not Visit.objects.scatter().exists()


def test_a_child_that_cannot_be_saved_takes_the_parent_back(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    class Failing(ShardedModelAdmin):
        inlines = [CommentsOfPhoto]

        def save_formset(self, request: Any, form: Any, formset: Any, change: bool) -> None:
            super().save_formset(request, form, formset, change)
            raise DatabaseError("no more")

    register(Photo, Failing)
    data = {**form_of(rows.photo, title="new"), "comments-0-text": "changed"}
    with pytest.raises(DatabaseError, match="no more"):
        admin_client.post(url(Photo, "change", object_id_by_hand(rows.photo)), data)
    assert Photo.objects.get(user_id=ONE).title == "photo of 1"
    assert Comment.objects.get(user_id=ONE).text == "nice"


def test_the_view_runs_in_a_transaction_of_the_shard_and_of_the_log(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    checks = []

    class Looking(ShardedModelAdmin):
        def save_model(self, request: Any, obj: Any, form: Any, change: bool) -> None:
            super().save_model(request, obj, form, change)
            aliases = ("default", SHARD[ONE], SHARD[TWO])
            checks.append([connections[alias].in_atomic_block for alias in aliases])
            assert transaction.get_connection(obj._state.db).in_atomic_block

    register(Tag, Looking)
    admin_client.post(url(Tag, "change", object_id_by_hand(rows.tag)), {"name": "a"})
    admin_client.post(url(Tag, "add", _key=ONE), {"name": "b"})
    assert checks == [[True, True, False], [True, True, False]]
    register(Event, Looking)
    admin_client.post(url(Event, "add"), {"account": "a", "number": 1})
    assert len(checks) == 3


def test_reading_opens_no_transaction(admin_client: Client, rows: Rows, register: Any) -> None:
    checks = []

    class Looking(ShardedModelAdmin):
        def render_change_form(self, request: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
            aliases = ("default", SHARD[ONE], "photos")
            checks.append([connections[alias].in_atomic_block for alias in aliases])
            return super().render_change_form(request, context, *args, **kwargs)

    register(Album, Looking)
    for address in (
        url(Album, "change", object_id_by_hand(rows.album)),
        url(Album, "add", _key=ONE),
    ):
        assert admin_client.get(address).status_code == 200
    assert checks == [[False] * 3] * 2
    # A form with an error is shown again.
    assert (
        admin_client.post(
            url(Album, "change", object_id_by_hand(rows.album)), {"title": ""}
        ).status_code
        == 200
    )
    assert checks[2] == [True, True, False]


class FullLog(admin.ModelAdmin):  # type: ignore[type-arg]
    inlines = [AlbumsOfPerson]

    def log_addition(self, request: Any, obj: Any, message: Any) -> Any:
        raise DatabaseError("the log is full")

    log_change = log_addition


def test_no_child_is_left_of_a_global_row_that_was_not_added(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    register(Person, FullLog)
    data = {"username": "new", **inline("albums", {"title": "orphan"})}
    with pytest.raises(DatabaseError, match="the log is full"):
        admin_client.post(url(Person, "add"), data)
    assert not Person.objects.filter(username="new").exists()
    assert not Album.objects.filter(title="orphan").scatter().exists()
    # The children of a stored row are saved, and can be saved again.
    data = {"username": "new", **inline("albums", {"title": "kept", "owner": TWO})}
    with pytest.raises(DatabaseError, match="the log is full"):
        admin_client.post(url(Person, "change", str(TWO)), data)
    assert Person.objects.get(pk=TWO).username == "person2"
    assert Album.objects.filter(owner=TWO, title="kept").count() == 1


def test_a_global_row_is_added_with_its_children(admin_client: Client, rows: Rows) -> None:
    data = {"username": "new", **inline("albums", {"title": "a"}, {"title": "b"})}
    assert admin_client.post(url(Person, "add"), data).status_code == 302
    person = Person.objects.get(username="new")
    assert sorted(album.title for album in Album.objects.filter(owner=person)) == ["a", "b"]
    message = LogEntry.objects.get().get_change_message()
    assert message.count("Added album") == 2
