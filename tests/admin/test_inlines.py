"""Inlines: children get the shard and the key of their parent."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError
from django.test import Client

from sharded_orm import runtime
from sharded_orm.admin import ShardedModelAdmin, ShardedStackedInline, ShardedTabularInline
from sharded_orm.admin.forms import InlineFormSetOnShard
from tests.admin.conftest import (
    DATABASES,
    ONE,
    SHARD,
    TWO,
    UNPLACED,
    Rows,
    form_of,
    inline,
    logged_in,
    object_id_by_hand,
    url,
    user_with,
)
from tests.photos.models import Album, Board, Comment, Note, Person, Photo, Reading, Save

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql", "postgresql"),
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.site"),
]


def photos(*forms: dict[str, Any], initial: int = 0, **values: Any) -> dict[str, Any]:
    return {"title": "album", **values, **inline("photos", *forms, initial=initial)}


def test_new_children_get_the_key_of_the_parent(admin_client: Client, rows: Rows) -> None:
    data = photos(
        {"photo_id": rows.other_photo.pk, "title": "old", "tags": [rows.other_tag.pk]},
        {"photo_id": "", "title": "new", "stars": "4"},
        initial=1,
    )
    response = admin_client.post(url(Album, "change", object_id_by_hand(rows.other_album)), data)
    assert response.status_code == 302, response.context["errors"]
    stored = Photo.objects.using(SHARD[TWO]).order_by("-title")
    assert [(p.title, p.user_id, p.album_id) for p in stored] == [
        ("old", TWO, rows.other_album.pk),
        ("new", TWO, rows.other_album.pk),
    ]
    assert [tag.name for tag in stored[0].tags.all()] == ["tag of 2"]
    assert "Added photo" in LogEntry.objects.get().get_change_message()


def test_a_parent_is_added_with_its_children(admin_client: Client, rows: Rows) -> None:
    data = photos({"photo_id": "", "title": "new"})
    assert admin_client.post(url(Album, "add", _key=TWO), data).status_code == 302
    album = Album.objects.get(owner=TWO, title="album")
    assert [photo.user_id for photo in album.photos.all()] == [TWO]
    # The key has no shard yet: the parent places it for both rows.
    assert admin_client.post(url(Album, "add", _key=UNPLACED), data).status_code == 302
    album = Album.objects.get(owner=UNPLACED)
    [photo] = album.photos.all()
    assert photo._state.db == album._state.db == runtime.locate("photos", UNPLACED).alias  # type: ignore[union-attr]


def test_children_of_a_key_that_is_made(admin_client: Client, placed: None, register: Any) -> None:
    class Notes(ShardedTabularInline):
        model = Note
        fields = ["text"]

    class Saves(ShardedTabularInline):
        model = Save

    class Boards(ShardedModelAdmin):
        inlines = [Notes, Saves]

    register(Board, Boards)
    data = {
        "name": "b",
        "parent": "",
        **inline("notes", {"text": "n"}),
        **inline("saves", {"note": "s"}),
    }
    response = admin_client.post(url(Board, "add", _shard="pins_00006"), data)
    assert response.status_code == 302, response.context["errors"]
    [board] = Board.objects.using("pins_00006")
    [note], [save] = board.notes.all(), board.saves.all()
    assert (note._state.db, save._state.db) == ("pins_00006", "pins_00006")
    assert (note.text, save.note) == ("n", "s")


def test_the_key_is_no_field(admin_client: Client, rows: Rows) -> None:
    page = admin_client.get(url(Photo, "change", object_id_by_hand(rows.photo))).content.decode()
    assert 'name="comments-0-text"' in page
    assert f'name="comments-0-comment_id" value="{rows.comment.pk}"' in page
    assert "comments-0-user_id" not in page


def test_another_key_in_an_inline_is_refused(admin_client: Client, rows: Rows) -> None:
    data = form_of(rows.photo)
    response = admin_client.post(
        url(Photo, "change", object_id_by_hand(rows.photo)),
        {**data, "comments-0-user_id": str(TWO)},
    )
    assert "cannot be changed here" in str(response.context["errors"])


def test_children_are_changed_and_deleted(admin_client: Client, rows: Rows) -> None:
    address = url(Photo, "change", object_id_by_hand(rows.photo))
    data = form_of(rows.photo)
    assert admin_client.post(address, {**data, "comments-0-text": "well"}).status_code == 302
    assert Comment.objects.get(user_id=ONE).text == "well"
    assert admin_client.post(address, {**data, "comments-0-DELETE": "on"}).status_code == 302
    assert not Comment.objects.filter(user_id=ONE).exists()


def test_children_of_another_shard_cannot_be_reached(admin_client: Client, rows: Rows) -> None:
    other = Comment.objects.create(
        comment_id=777, user_id=TWO, photo=rows.other_photo, text="theirs"
    )
    data = form_of(rows.photo)
    for pk in (other.pk, "x", "", "9" * 30):
        for more in ({"comments-0-DELETE": "on"}, {}):
            response = admin_client.post(
                url(Photo, "change", object_id_by_hand(rows.photo)),
                {**data, "comments-0-comment_id": pk, "comments-0-text": "forged", **more},
            )
            # Django ignores a row to be deleted that does not exist.
            assert response.status_code == (302 if more else 200), pk
    assert Comment.objects.get(user_id=TWO).text == "theirs"
    assert Comment.objects.get(user_id=ONE).text == "nice"


def test_a_child_whose_id_leads_to_another_shard(
    admin_client: Client, placed: None, register: Any
) -> None:
    class Notes(ShardedTabularInline):
        model = Note
        fields = ["text"]

    class Boards(ShardedModelAdmin):
        inlines = [Notes]

    register(Board, Boards)
    board = Board.objects.create(name="b")
    note = Note.objects.create(board=board, text="mine")
    other = Board.objects.create(name="o")
    other_note = Note.objects.create(board=other, text="theirs")
    assert other._state.db != board._state.db or other_note.board_id != board.pk
    for pk, status in ((note.pk, 302), (other_note.pk, 200)):
        form = {"id": pk, "board": board.pk, "text": "new"}
        response = admin_client.post(
            url(Board, "change", str(board.pk)),
            {"name": "b", "parent": "", **inline("notes", form, initial=1)},
        )
        assert response.status_code == status
    assert Note.objects.get(pk=other_note.pk).text == "theirs"


def test_a_child_that_was_deleted_meanwhile(admin_client: Client, rows: Rows) -> None:
    data = form_of(rows.photo, title="new")
    rows.comment.delete()
    response = admin_client.post(url(Photo, "change", object_id_by_hand(rows.photo)), data)
    assert response.status_code == 200
    assert response.context["errors"]
    assert Photo.objects.get(user_id=ONE).title == "photo of 1"


def test_a_link_to_a_child_carries_its_key(admin_client: Client, rows: Rows) -> None:
    page = admin_client.get(url(Album, "change", object_id_by_hand(rows.album))).content.decode()
    assert url(Photo, "change", object_id_by_hand(rows.photo)) in page
    assert url(Photo, "site", object_id_by_hand(rows.photo)) in page
    assert "Stored on" not in page


def test_an_inline_s_pickers_are_of_the_shard(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Album, "change", object_id_by_hand(rows.album)))
    [formset] = response.context["inline_admin_formsets"]
    queryset = formset.formset.forms[0].fields["tags"].queryset
    assert [str(tag) for tag in queryset] == ["tag of 1"]


def test_a_parent_of_the_global_database(admin_client: Client, rows: Rows) -> None:
    address = url(Person, "change", str(TWO))
    page = admin_client.get(address).content.decode()
    assert "album of 2" in page
    assert "album of 1" not in page
    assert (
        url(Album, "site", object_id_by_hand(rows.other_album)) not in page
    )  # the model has no get_absolute_url()
    data = {
        "username": "person2",
        **inline(
            "albums",
            {"album_id": rows.other_album.pk, "owner": TWO, "title": "changed"},
            {"album_id": "", "owner": TWO, "title": "new"},
            initial=1,
        ),
    }
    response = admin_client.post(address, data)
    assert response.status_code == 302, response.context["errors"]
    titles = Album.objects.using(SHARD[TWO]).order_by("title").values_list("title", flat=True)
    assert list(titles) == ["changed", "new"]
    # The key has no rows: its first album places it.
    data = {"username": "person404", **inline("albums", {"owner": UNPLACED, "title": "first"})}
    assert admin_client.get(url(Person, "change", str(UNPLACED))).status_code == 200
    assert admin_client.post(url(Person, "change", str(UNPLACED)), data).status_code == 302
    assert Album.objects.get(owner=UNPLACED).title == "first"


def test_children_of_a_global_parent_are_saved_together(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    class Failing(ShardedTabularInline):
        model = Album

        class formset(InlineFormSetOnShard):
            def save_new(self, form: Any, commit: bool = True) -> Any:
                if form.instance.title == "second":
                    raise DatabaseError("no more")
                return super().save_new(form, commit)

    class People(admin.ModelAdmin):  # type: ignore[type-arg]
        inlines = [Failing]

    register(Person, People)
    for key in (TWO, UNPLACED):
        forms = [{"owner": key, "title": title} for title in ("first", "second")]
        data = {"username": "renamed", **inline("albums", *forms)}
        with pytest.raises(DatabaseError, match="no more"):
            admin_client.post(url(Person, "change", str(key)), data)
    assert not Album.objects.filter(title="first").scatter().exists()
    assert not Person.objects.filter(username="renamed").exists()


def test_deleting_below_a_global_parent(admin_client: Client, rows: Rows) -> None:
    album = Album.objects.create(owner_id=TWO, title="empty")
    form = {"album_id": album.pk, "owner": TWO, "title": "empty", "DELETE": "on"}
    album_data = {"album_id": rows.other_album.pk, "owner": TWO, "title": "album of 2"}
    data = {"username": "person2", **inline("albums", album_data, form, initial=2)}
    response = admin_client.post(url(Person, "change", str(TWO)), data)
    assert response.status_code == 302, response.context["errors"]
    assert Album.objects.get(owner=TWO) == rows.other_album


def test_an_inline_with_rights_of_its_own(rows: Rows) -> None:
    reader = logged_in(user_with("view_photo", "change_photo", "view_comment"))
    data = form_of(rows.photo, title="new")
    response = reader.post(
        url(Photo, "change", object_id_by_hand(rows.photo)), {**data, "comments-0-text": "forged"}
    )
    assert response.status_code == 302
    assert Photo.objects.get(user_id=ONE).title == "new"
    assert Comment.objects.get(user_id=ONE).text == "nice"
    blind = logged_in(user_with("view_photo", "change_photo"))
    page = blind.get(url(Photo, "change", object_id_by_hand(rows.photo))).content.decode()
    assert "nice" not in page


def test_a_check_names_inlines_that_cannot_work() -> None:
    class Comments(ShardedStackedInline):
        model = Comment
        fk_name = "author"

    class People(admin.ModelAdmin):  # type: ignore[type-arg]
        inlines = [Comments]

    class Photos(ShardedTabularInline):
        model = Photo

    class Albums(ShardedModelAdmin):
        inlines = [Photos]

    [problem] = People(Person, admin.site).check()
    assert problem.id == "sharded_orm.E070"
    assert (
        "rows of photos_app.Comment are not on the shard of their photos_app.Person" in problem.msg
    )
    assert Albums(Album, admin.site).check() == []
    assert ShardedModelAdmin(Reading, admin.site).check() == []


def test_a_global_model_is_refused() -> None:
    with pytest.raises(ImproperlyConfigured, match="register it with Django's ModelAdmin"):
        ShardedModelAdmin(Person, admin.site)
