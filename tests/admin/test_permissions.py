"""Permissions: Django's, those of shard groups, and a project's ``has_shard_permission()``."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.contrib.contenttypes.models import ContentType
from django.test import Client

from sharded_orm.admin import ShardedModelAdmin, ShardedTabularInline
from sharded_orm.models import ShardMap
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
    move,
    object_id_by_hand,
    url,
    user_with,
)
from tests.photos.models import Album, Event, Note, Person, Photo, Tag, Visit

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql", "postgresql"),
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.site"),
]

PAGES = ("changelist", "add", "change", "delete", "history", "site")


def page_statuses(client: Client, photo: Photo) -> dict[str, tuple[int, int]]:
    """The HTTP status of each page for GET and POST; 0 for a page that is not posted."""
    results = {}
    for page in PAGES:
        query = {"_key": str(photo.user_id)} if page in ("changelist", "add") else {}
        args = [] if query else [object_id_by_hand(photo)]
        address = url(Photo, page, *args, **query)
        data = form_of(photo, title="new") if page in ("change", "add") else {"post": "yes"}
        if page == "add":
            data |= {"tags": [], **inline("comments")}
        can_be_posted = page not in ("changelist", "history", "site")
        post_status = client.post(address, data).status_code if can_be_posted else 0
        results[page] = (client.get(address).status_code, post_status)
    return results


@pytest.mark.parametrize(
    ("permissions", "expected"),
    [
        ([], dict.fromkeys(PAGES, (403, 403))),
        (
            ["view_photo"],
            {
                "changelist": (200, 0),
                "change": (200, 403),
                "history": (200, 0),
                "site": (302, 0),
                "add": (403, 403),
                "delete": (403, 403),
            },
        ),
        (
            ["add_photo"],
            {
                "changelist": (403, 0),
                "add": (200, 302),
                "change": (403, 403),
                "delete": (403, 403),
                "history": (403, 0),
                "site": (403, 0),
            },
        ),
        (
            ["change_photo"],
            {
                "changelist": (200, 0),
                "add": (403, 403),
                "change": (200, 302),
                "delete": (403, 403),
                "history": (200, 0),
                "site": (302, 0),
            },
        ),
        (
            ["delete_photo", "delete_comment"],
            {"changelist": (403, 0), "add": (403, 403), "change": (403, 403)},
        ),
    ],
)
def test_each_permission_opens_its_pages(
    rows: Rows, permissions: list[str], expected: dict[str, tuple[int, int]]
) -> None:
    user = user_with(*permissions)
    results = page_statuses(logged_in(user), rows.photo)
    for page, expected_statuses in expected.items():
        if not expected_statuses[1] or page in ("changelist", "history", "site"):
            assert results[page][0] == expected_statuses[0], page
        else:
            assert results[page] == expected_statuses, page


def test_a_photo_is_deleted_by_whoever_may(rows: Rows) -> None:
    client = logged_in(user_with("delete_photo", "delete_comment"))
    address = url(Photo, "delete", object_id_by_hand(rows.photo))
    assert client.get(address).status_code == 200
    assert client.post(address, {"post": "yes"}).status_code == 302
    assert not Photo.objects.filter(user_id=ONE).exists()


def test_a_reader_sees_no_button_and_links_to_rows(rows: Rows) -> None:
    client = logged_in(user_with("view_photo", "view_album"))
    page = client.get(url(Photo, "change", object_id_by_hand(rows.photo))).content.decode()
    assert 'name="_save"' not in page
    assert 'name="title"' not in page
    assert f'<a href="{url(Album, "change", object_id_by_hand(rows.album))}">album of 1</a>' in page


def test_who_is_not_of_the_staff_is_asked_to_log_in(rows: Rows) -> None:
    user = User.objects.create_user("visitor", password="x")
    for client in (Client(), logged_in(user)):
        response = client.get(url(Photo, "change", object_id_by_hand(rows.photo)))
        assert (response.status_code, response.url.split("?")[0]) == (302, "/admin/login/")


def test_a_name_that_leads_nowhere_is_told_nobody(rows: Rows) -> None:
    """Without the permission, a response does not say whether a row exists."""
    client = logged_in(user_with("view_tag"))
    there = client.get(url(Photo, "change", object_id_by_hand(rows.photo)))
    gone = client.get(url(Photo, "change", f"{ONE}~12345"))
    assert there.status_code == gone.status_code == 403
    for name in (f"{UNPLACED}~1", "forged", "x~y"):
        for page in ("change", "delete", "history"):
            assert client.get(url(Photo, page, name)).status_code == 403, (name, page)


def test_save_as_new_needs_the_permission_to_add(rows: Rows) -> None:
    client = logged_in(user_with("change_photo", "view_photo"))
    data = form_of(rows.photo, title="copy", _saveasnew="1")
    assert client.post(url(Photo, "change", object_id_by_hand(rows.photo)), data).status_code == 403
    # Without the view permission, no row is copied.
    blind = logged_in(user_with("add_photo"))
    assert blind.post(url(Photo, "change", object_id_by_hand(rows.photo)), data).status_code == 403
    assert Photo.objects.filter(user_id=ONE).count() == 1


# -- Groups of shards ----------------------------------------------------------


@pytest.fixture
def by_group(settings: Any) -> None:
    settings.SHARDED_ORM = {**settings.SHARDED_ORM, "ADMIN": {"GROUP_PERMISSIONS": True}}
    content_type = ContentType.objects.get_for_model(ShardMap)
    Permission.objects.get_or_create(
        content_type=content_type, codename="access_photos", defaults={"name": "photos"}
    )


def test_a_group_can_need_a_permission(rows: Rows, by_group: None) -> None:
    permissions = ("view_photo", "change_photo", "add_photo", "delete_photo", "view_album")
    outside = logged_in(user_with(*permissions))
    inside = logged_in(user_with(*permissions, "access_photos"))
    for page, (get_status, post_status) in page_statuses(outside, rows.photo).items():
        assert get_status == 403, page
        assert post_status in (0, 403), page
    assert Photo.objects.get(user_id=ONE).title == "photo of 1"
    results = page_statuses(inside, rows.photo)
    assert results["changelist"][0] == 200
    assert results["change"] == (200, 302)
    page = outside.get("/admin/").content.decode()
    assert url(Photo, "changelist") not in page
    assert url(Photo, "changelist") in inside.get("/admin/").content.decode()


def test_a_superuser_has_all_groups(admin_client: Client, rows: Rows, by_group: None) -> None:
    assert admin_client.get(url(Photo, "change", object_id_by_hand(rows.photo))).status_code == 200
    assert admin_client.get(url(Event, "changelist")).status_code == 200


def test_an_inline_of_another_group_than_permitted(rows: Rows, by_group: None) -> None:
    permissions = ("view_person", "change_person", "view_album", "change_album")
    page = logged_in(user_with(*permissions)).get(url(Person, "change", str(ONE))).content.decode()
    assert "album of 1" not in page
    page = logged_in(user_with(*permissions, "access_photos")).get(url(Person, "change", str(ONE)))
    assert "album of 1" in page.content.decode()


# -- has_shard_permission() ----------------------------------------------------


class Regional(ShardedModelAdmin):
    """Users may look at shard 3 only."""

    search_fields = ["title"]

    def has_shard_permission(self, request: Any, shard: Any) -> bool:
        return shard.alias == SHARD[ONE]


def test_a_shard_can_be_refused(admin_client: Client, rows: Rows, register: Any) -> None:
    register(Tag, Regional)
    for page in ("change", "delete", "history"):
        assert admin_client.get(url(Tag, page, object_id_by_hand(rows.tag))).status_code == 200, (
            page
        )
        assert (
            admin_client.get(url(Tag, page, object_id_by_hand(rows.other_tag))).status_code == 403
        ), page
    assert (
        admin_client.post(
            url(Tag, "change", object_id_by_hand(rows.other_tag)), {"name": "x"}
        ).status_code
        == 403
    )
    assert admin_client.get(url(Tag, "add", _key=ONE)).status_code == 200
    assert admin_client.get(url(Tag, "add", _key=TWO)).status_code == 403
    assert admin_client.post(url(Tag, "add", _key=TWO), {"name": "x"}).status_code == 403
    assert admin_client.get(url(Tag, "changelist", _shard=SHARD[ONE])).status_code == 200
    assert admin_client.get(url(Tag, "changelist", _shard=SHARD[TWO])).status_code == 403
    assert admin_client.get(url(Tag, "changelist", _key=TWO)).status_code == 403
    assert not LogEntry.objects.exists()


def test_where_a_key_is_is_told_only_those_who_may_look_there(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    elsewhere = {"_key": str(TWO), "_shard": SHARD[ONE]}
    pages = [url(Tag, page, **elsewhere) for page in ("changelist", "add")]
    pages += [
        url(Tag, "changelist", _shard=SHARD[ONE], _key=UNPLACED),
        url(Tag, "changelist", _key=TWO),
        url(Tag, "changelist", user_id=TWO),
        url(Tag, "add", _key=TWO),
        url(Tag, "add", user_id=TWO),
        *(
            url(Tag, page, object_id_by_hand(rows.other_tag))
            for page in ("change", "delete", "history")
        ),
        *(
            url(Tag, page, object_id_by_hand(rows.other_tag), _shard=SHARD[ONE])
            for page in ("change", "delete", "history")
        ),
    ]
    for address in pages:
        assert admin_client.get(address).status_code < 500, address
    bodies = [admin_client.get(address).content.decode() for address in pages]
    assert any(f"are on {SHARD[TWO]}" in page for page in bodies)
    register(Tag, Regional)
    for address in pages:
        page = admin_client.get(address).content.decode()
        assert SHARD[TWO] not in page and "on no shard" not in page, address
    assert "not on photos_00003" in admin_client.get(pages[0]).content.decode()


def test_where_a_row_was_moved_to_is_not_told(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    class Editable(Regional):
        list_display = ("name", "user_id")
        list_editable = ("name",)
        list_display_links = None

    register(Tag, Editable)
    here = url(Tag, "changelist", _shard=SHARD[ONE])
    forms = {"form-TOTAL_FORMS": 1, "form-INITIAL_FORMS": 1, "form-0-id": rows.tag.pk}
    move(ONE, 7)
    response = admin_client.post(
        here, {**forms, "form-0-name": "new", "_save": "Save"}, follow=True
    )
    page = response.content.decode()
    assert "Nothing was saved" in page
    assert "photos_00007" not in page
    assert Tag.objects.using(SHARD[ONE]).get(pk=rows.tag.pk).name != "new"


def test_nothing_is_asked_over_all_shards_if_one_is_refused(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    register(Album, Regional)
    page = admin_client.get(url(Album, "changelist")).content.decode()
    assert "album of" not in page
    results = admin_client.get(
        "/admin/autocomplete/",
        {"app_label": "photos_app", "model_name": "photo", "field_name": "album"},
    )
    assert results.json()["results"] == []


def test_an_adder_without_key_field_cannot_reach_a_refused_shard(
    admin_client: Client, placed: None, register: Any
) -> None:
    class OneShard(ShardedModelAdmin):
        def has_shard_permission(self, request: Any, shard: Any) -> bool:
            return bool(shard.number == 0)

    register(Event, OneShard)
    for number in range(20):
        admin_client.post(url(Event, "add"), {"account": f"a{number}", "number": 1})
    stored = list(Event.objects.scatter())
    assert stored
    assert {event._state.db for event in stored} == {"events_00000"}
    assert LogEntry.objects.count() == len(stored)


def test_a_key_that_is_made_is_made_on_a_permitted_shard(
    admin_client: Client, placed: None, register: Any
) -> None:
    class OneShard(ShardedModelAdmin):
        def has_shard_permission(self, request: Any, shard: Any) -> bool:
            return bool(shard.number == 2)

    for model, data in ((Visit, {"page": "/"}), (Note, {"text": "t", "board": ""})):
        register(model, OneShard)
        assert admin_client.post(url(model, "add"), data).status_code == 302
        [row] = model.objects.scatter()
        assert row._state.db.endswith("_00002")
    assert admin_client.get(url(Note, "add")).url.endswith("_shard=pins_00002")


def test_the_picker_offers_the_shards_that_one_may_look_at(
    admin_client: Client, rows: Rows, register: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Some(ShardedModelAdmin):
        def has_shard_permission(self, request: Any, shard: Any) -> bool:
            return shard.number in (3, 5)

    register(Photo, Some)
    for scope in ({}, {"_shard": "nonsense"}, {"_shard": "photos_00003"}):
        page = admin_client.get(url(Photo, "changelist", **scope)).content.decode()
        assert re.findall(r'<option value="(photos_\d+)">', page) == [
            "photos_00003",
            "photos_00005",
        ]
        assert "photos_00004" not in page and "photos_00002" not in page
    monkeypatch.setattr("sharded_orm.admin.shard_picker.MAX_CHOICES", 15)
    page = admin_client.get(url(Photo, "changelist")).content.decode()
    assert re.findall(r'<option value="(photos_\d+)">', page) == ["photos_00003"]


def test_the_rule_of_a_model_admin_holds_for_its_inlines(rows: Rows, register: Any) -> None:
    register(Album, Regional)
    client = logged_in(
        user_with(
            "view_person", "change_person", "add_person",
            "view_album", "change_album", "add_album", "delete_album",
        )
    )  # fmt: skip
    address = url(Person, "change", str(TWO))
    assert "album of 2" not in client.get(address).content.decode()
    form = {"album_id": rows.other_album.pk, "owner": TWO, "title": "forged"}
    for more in ({}, {"DELETE": "on"}):
        data = {"username": "two", **inline("albums", {**form, **more}, initial=1)}
        assert client.post(address, data).status_code == 302
    data = {"username": "two", **inline("albums", {"owner": TWO, "title": "forged"})}
    assert client.post(address, data).status_code == 302
    assert [album.title for album in Album.objects.filter(owner=TWO)] == ["album of 2"]
    # A key without a shard may be placed on a refused shard.
    data = {"username": "new", **inline("albums", {"owner": UNPLACED, "title": "forged"})}
    for other in (url(Person, "change", str(UNPLACED)), url(Person, "add")):
        assert 'name="albums-0-title"' not in client.get(other).content.decode()
        client.post(other, data)
    assert not Album.objects.filter(title="forged").scatter().exists()
    # On the permitted shard, rows can be added.
    assert "album of 1" in client.get(url(Person, "change", str(ONE))).content.decode()
    form = {"album_id": rows.album.pk, "owner": ONE, "title": "changed"}
    data = {"username": "one", **inline("albums", form, {"owner": ONE, "title": "n"}, initial=1)}
    assert client.post(url(Person, "change", str(ONE)), data).status_code == 302
    assert sorted(a.title for a in Album.objects.filter(owner=ONE)) == ["changed", "n"]


def test_an_inline_may_have_a_rule_of_its_own(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    class Photos(ShardedTabularInline):
        model = Photo
        fields = ["title"]

        def has_shard_permission(self, request: Any, shard: Any) -> bool:
            return bool(shard.alias == SHARD[ONE])

    register(Album, type("Albums", (ShardedModelAdmin,), {"inlines": [Photos]}))
    for album, key, is_visible in ((rows.album, ONE, True), (rows.other_album, TWO, False)):
        for address in (
            url(Album, "change", object_id_by_hand(album)),
            url(Album, "add", _key=key),
        ):
            page = admin_client.get(address).content.decode()
            assert ('name="photos-0-title"' in page) is is_visible, address
    data = {"title": "t", **inline("photos", {"title": "forged"})}
    assert (
        admin_client.post(
            url(Album, "change", object_id_by_hand(rows.other_album)), data
        ).status_code
        == 302
    )
    assert not Photo.objects.filter(title="forged").scatter().exists()
