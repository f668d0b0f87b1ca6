"""Children on the page of their parent: its shard, its key."""

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
    named,
    url,
    user_with,
)
from tests.photos.models import Album, Board, Comment, Note, Person, Photo, Reading, Save

pytestmark = [
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.site"),
]


def photos(*forms: dict[str, Any], initial: int = 0, **values: Any) -> dict[str, Any]:
    return {"title": "album", **values, **inline("photos", *forms, initial=initial)}


def test_new_children_get_the_key_of_the_parent(browser: Client, rows: Rows) -> None:
    data = photos(
        {"photo_id": rows.other_photo.pk, "title": "old", "tags": [rows.other_tag.pk]},
        {"photo_id": "", "title": "new", "stars": "4"},
        initial=1,
    )
    response = browser.post(url(Album, "change", named(rows.other_album)), data)
    assert response.status_code == 302, response.context["errors"]
    found = Photo.objects.using(SHARD[TWO]).order_by("-title")
    assert [(p.title, p.user_id, p.album_id) for p in found] == [
        ("old", TWO, rows.other_album.pk),
        ("new", TWO, rows.other_album.pk),
    ]
    assert [tag.name for tag in found[0].tags.all()] == ["tag of 2"]
    assert "Added photo" in LogEntry.objects.get().get_change_message()


def test_a_parent_is_added_with_its_children(browser: Client, rows: Rows) -> None:
    data = photos({"photo_id": "", "title": "new"})
    assert browser.post(url(Album, "add", _key=TWO), data).status_code == 302
    album = Album.objects.get(owner=TWO, title="album")
    assert [photo.user_id for photo in album.photos.all()] == [TWO]
    # Of somebody who has no shard yet: both are placed by the parent.
    assert browser.post(url(Album, "add", _key=UNPLACED), data).status_code == 302
    album = Album.objects.get(owner=UNPLACED)
    [photo] = album.photos.all()
    assert photo._state.db == album._state.db == runtime.locate("photos", UNPLACED).alias  # type: ignore[union-attr]


def test_children_of_a_key_that_is_made(browser: Client, placed: None, registered: Any) -> None:
    class Notes(ShardedTabularInline):
        model = Note
        fields = ["text"]

    class Saves(ShardedTabularInline):
        model = Save

    class Boards(ShardedModelAdmin):
        inlines = [Notes, Saves]

    registered(Board, Boards)
    data = {
        "name": "b",
        "parent": "",
        **inline("notes", {"text": "n"}),
        **inline("saves", {"note": "s"}),
    }
    response = browser.post(url(Board, "add", _shard="pins_00006"), data)
    assert response.status_code == 302, response.context["errors"]
    [board] = Board.objects.using("pins_00006")
    [note], [save] = board.notes.all(), board.saves.all()
    assert (note._state.db, save._state.db) == ("pins_00006", "pins_00006")
    assert (note.text, save.note) == ("n", "s")


def test_the_key_is_no_field(browser: Client, rows: Rows) -> None:
    page = browser.get(url(Photo, "change", named(rows.photo))).content.decode()
    assert 'name="comments-0-text"' in page
    assert f'name="comments-0-comment_id" value="{rows.comment.pk}"' in page
    assert "comments-0-user_id" not in page


def test_another_key_in_an_inline_is_refused(browser: Client, rows: Rows) -> None:
    data = form_of(rows.photo)
    response = browser.post(
        url(Photo, "change", named(rows.photo)), {**data, "comments-0-user_id": str(TWO)}
    )
    assert "cannot be changed here" in str(response.context["errors"])


def test_children_are_changed_and_deleted(browser: Client, rows: Rows) -> None:
    address = url(Photo, "change", named(rows.photo))
    data = form_of(rows.photo)
    assert browser.post(address, {**data, "comments-0-text": "well"}).status_code == 302
    assert Comment.objects.get(user_id=ONE).text == "well"
    assert browser.post(address, {**data, "comments-0-DELETE": "on"}).status_code == 302
    assert not Comment.objects.filter(user_id=ONE).exists()


def test_children_of_another_shard_cannot_be_reached(browser: Client, rows: Rows) -> None:
    other = Comment.objects.create(
        comment_id=777, user_id=TWO, photo=rows.other_photo, text="theirs"
    )
    data = form_of(rows.photo)
    for pk in (other.pk, "x", "", "9" * 30):
        for more in ({"comments-0-DELETE": "on"}, {}):
            response = browser.post(
                url(Photo, "change", named(rows.photo)),
                {**data, "comments-0-comment_id": pk, "comments-0-text": "forged", **more},
            )
            # Django takes no notice of a row to be deleted that is not there.
            assert response.status_code == (302 if more else 200), pk
    assert Comment.objects.get(user_id=TWO).text == "theirs"
    assert Comment.objects.get(user_id=ONE).text == "nice"


def test_a_child_whose_id_leads_to_another_shard(
    browser: Client, placed: None, registered: Any
) -> None:
    class Notes(ShardedTabularInline):
        model = Note
        fields = ["text"]

    class Boards(ShardedModelAdmin):
        inlines = [Notes]

    registered(Board, Boards)
    board = Board.objects.create(name="b")
    note = Note.objects.create(board=board, text="mine")
    other = Board.objects.create(name="o")
    theirs = Note.objects.create(board=other, text="theirs")
    assert other._state.db != board._state.db or theirs.board_id != board.pk
    for pk, status in ((note.pk, 302), (theirs.pk, 200)):
        form = {"id": pk, "board": board.pk, "text": "new"}
        response = browser.post(
            url(Board, "change", str(board.pk)),
            {"name": "b", "parent": "", **inline("notes", form, initial=1)},
        )
        assert response.status_code == status
    assert Note.objects.get(pk=theirs.pk).text == "theirs"


def test_a_child_that_was_deleted_meanwhile(browser: Client, rows: Rows) -> None:
    data = form_of(rows.photo, title="new")
    rows.comment.delete()
    response = browser.post(url(Photo, "change", named(rows.photo)), data)
    assert response.status_code == 200
    assert response.context["errors"]
    assert Photo.objects.get(user_id=ONE).title == "photo of 1"


def test_a_link_to_a_child_carries_its_key(browser: Client, rows: Rows) -> None:
    page = browser.get(url(Album, "change", named(rows.album))).content.decode()
    assert url(Photo, "change", named(rows.photo)) in page
    assert url(Photo, "site", named(rows.photo)) in page
    assert "Stored on" not in page


def test_an_inline_s_pickers_are_of_the_shard(browser: Client, rows: Rows) -> None:
    response = browser.get(url(Album, "change", named(rows.album)))
    [formset] = response.context["inline_admin_formsets"]
    offered = formset.formset.forms[0].fields["tags"].queryset
    assert [str(tag) for tag in offered] == ["tag of 1", "tag of 3"]


def test_a_parent_of_the_global_database(browser: Client, rows: Rows) -> None:
    address = url(Person, "change", str(TWO))
    page = browser.get(address).content.decode()
    assert "album of 2" in page
    assert "album of 1" not in page
    assert url(Album, "site", named(rows.other_album)) not in page  # it has no address
    data = {
        "username": "person2",
        **inline(
            "albums",
            {"album_id": rows.other_album.pk, "owner": TWO, "title": "changed"},
            {"album_id": "", "owner": TWO, "title": "new"},
            initial=1,
        ),
    }
    response = browser.post(address, data)
    assert response.status_code == 302, response.context["errors"]
    titles = Album.objects.using(SHARD[TWO]).order_by("title").values_list("title", flat=True)
    assert list(titles) == ["changed", "new"]
    # Somebody without rows: the first album places the key.
    data = {"username": "person404", **inline("albums", {"owner": UNPLACED, "title": "first"})}
    assert browser.get(url(Person, "change", str(UNPLACED))).status_code == 200
    assert browser.post(url(Person, "change", str(UNPLACED)), data).status_code == 302
    assert Album.objects.get(owner=UNPLACED).title == "first"


def test_children_of_a_global_parent_are_saved_together(
    browser: Client, rows: Rows, registered: Any
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

    registered(Person, People)
    for key in (TWO, UNPLACED):
        forms = [{"owner": key, "title": title} for title in ("first", "second")]
        data = {"username": "renamed", **inline("albums", *forms)}
        with pytest.raises(DatabaseError, match="no more"):
            browser.post(url(Person, "change", str(key)), data)
    assert not Album.objects.filter(title="first").scatter().exists()
    assert not Person.objects.filter(username="renamed").exists()


def test_deleting_below_a_global_parent(browser: Client, rows: Rows) -> None:
    album = Album.objects.create(owner_id=TWO, title="empty")
    form = {"album_id": album.pk, "owner": TWO, "title": "empty", "DELETE": "on"}
    rest = {"album_id": rows.other_album.pk, "owner": TWO, "title": "album of 2"}
    data = {"username": "person2", **inline("albums", rest, form, initial=2)}
    response = browser.post(url(Person, "change", str(TWO)), data)
    assert response.status_code == 302, response.context["errors"]
    assert Album.objects.get(owner=TWO) == rows.other_album


def test_an_inline_with_rights_of_its_own(rows: Rows) -> None:
    reader = logged_in(user_with("view_photo", "change_photo", "view_comment"))
    data = form_of(rows.photo, title="new")
    response = reader.post(
        url(Photo, "change", named(rows.photo)), {**data, "comments-0-text": "forged"}
    )
    assert response.status_code == 302
    assert Photo.objects.get(user_id=ONE).title == "new"
    assert Comment.objects.get(user_id=ONE).text == "nice"
    blind = logged_in(user_with("view_photo", "change_photo"))
    page = blind.get(url(Photo, "change", named(rows.photo))).content.decode()
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
