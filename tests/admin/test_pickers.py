"""Choices of forms: related rows of the same shard, and of the global database."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from sharded_orm.admin import ShardedModelAdmin
from tests.admin.conftest import (
    DATABASES,
    NEAR,
    ONE,
    SHARD,
    TWO,
    UNPLACED,
    Rows,
    form_of,
    inline,
    object_id_by_hand,
    url,
    user_with,
)
from tests.admin.conftest import logged_in as login
from tests.photos.models import Album, Board, Comment, Note, Person, Photo, Tag

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql", "postgresql"),
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.site"),
]


def field(response: Any, name: str) -> Any:
    return response.context["adminform"].form.fields[name]


def suggested(client: Client, model: Any, name: str, **query: Any) -> Any:
    response = client.get(
        reverse("admin:autocomplete", urlconf="tests.admin.site"),
        {
            "app_label": model._meta.app_label,
            "model_name": model._meta.model_name,
            "field_name": name,
            **query,
        },
    )
    if response.status_code != 200:
        return response.status_code
    return [result["text"] for result in json.loads(response.content)["results"]]


class Selecting(ShardedModelAdmin):
    """With Django's plain widgets."""


def test_a_select_offers_the_rows_of_the_key(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    register(Photo, Selecting)
    for address in (
        url(Photo, "change", object_id_by_hand(rows.photo)),
        url(Photo, "add", _key=ONE),
    ):
        response = admin_client.get(address)
        page = response.content.decode()
        assert "album of 1" in page
        assert "album of 3" not in page  # of another key on the shard
        assert "album of 2" not in page
        assert "tag of 1" in page
        assert "tag of 2" not in page
        assert [str(t) for t in field(response, "tags").queryset] == ["tag of 1"]


def test_a_key_without_rows_has_nothing_to_offer(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    register(Photo, Selecting)
    with CaptureQueriesContext(connections["photos"]) as captured:
        response = admin_client.get(url(Photo, "add", _key=UNPLACED))
    assert not list(field(response, "album").queryset)
    assert "album of" not in response.content.decode()
    assert not captured.captured_queries


def test_a_key_without_rows_and_an_initial_value(admin_client: Client, rows: Rows) -> None:
    for address in (
        url(Comment, "add", _key=UNPLACED, photo=rows.photo.pk),
        url(Photo, "add", _key=UNPLACED, album=rows.album.pk, tags="1,2"),
    ):
        page = admin_client.get(address)
        assert page.status_code == 200
        assert "of 1" not in page.content.decode()


def test_the_project_s_own_queryset_is_narrowed_to_the_key(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    class Own(ShardedModelAdmin):
        def formfield_for_foreignkey(self, db_field: Any, request: Any, **kwargs: Any) -> Any:
            kwargs["queryset"] = Album.objects.filter(title__startswith="album")
            return super().formfield_for_foreignkey(db_field, request, **kwargs)

    register(Photo, Own)
    response = admin_client.get(url(Photo, "change", object_id_by_hand(rows.near_photo)))
    assert [str(album) for album in field(response, "album").queryset] == ["album of 3"]


def test_many_to_many_rows_are_stored_beside_it(admin_client: Client, rows: Rows) -> None:
    data = {"title": "t", **dict.fromkeys(("album", "posted_at_0", "posted_at_1", "stars"), "")}
    data |= {"price": "", "tags": [rows.other_tag.pk], **inline("comments")}
    response = admin_client.post(url(Photo, "change", object_id_by_hand(rows.other_photo)), data)
    assert response.status_code == 302, response.context["errors"]
    photo = Photo.objects.get(user_id=TWO)
    assert [tag.name for tag in photo.tags.all()] == ["tag of 2"]
    assert Photo.objects.get(user_id=ONE).tags.count() == 1
    page = admin_client.get(
        url(Photo, "change", object_id_by_hand(rows.other_photo))
    ).content.decode()
    assert 'class="selectfilter"' in page


def test_a_raw_id_looks_on_the_shard(admin_client: Client, rows: Rows) -> None:
    page = admin_client.get(
        url(Comment, "change", object_id_by_hand(rows.comment))
    ).content.decode()
    lookup = re.search(r'href="([^"]*/photo/[^"]*)" class="related-lookup"', page)
    assert lookup is not None
    address = lookup[1].replace("&amp;", "&")
    assert f"_shard={SHARD[ONE]}" in address
    popup = admin_client.get(address + "&_popup=1").content.decode()
    assert "photo of 1" in popup
    assert "photo of 3" not in popup
    assert "photo of 2" not in popup
    # The text of the row beside the field, with a link to its page.
    label = re.search(r'<strong><a href="([^"]*)">photo of 1</a></strong>', page)
    assert label is not None
    assert (
        admin_client.get(label[1].replace("&amp;", "&")).context["original"].title == "photo of 1"
    )
    # Django's own widget for rows of the global database.
    assert re.search(r'href="/admin/photos_app/person/\?_to_field=id"', page)
    assert f'<strong><a href="{url(Person, "change", str(TWO))}">person2</a></strong>' in page


def test_a_raw_id_of_another_shard_is_refused(admin_client: Client, rows: Rows) -> None:
    data = {"photo": rows.other_photo.pk, "author": "", "text": "x"}
    response = admin_client.post(url(Comment, "change", object_id_by_hand(rows.comment)), data)
    assert "Select a valid choice" in str(response.context["errors"])
    response = admin_client.post(
        url(Comment, "change", object_id_by_hand(rows.comment)), {**data, "photo": "x"}
    )
    assert response.status_code == 200
    assert Comment.objects.get(user_id=ONE).text == "nice"


def test_autocomplete_asks_the_shard(admin_client: Client, rows: Rows) -> None:
    page = admin_client.get(url(Photo, "change", object_id_by_hand(rows.photo))).content.decode()
    assert f'data-ajax--url="/admin/autocomplete/?_shard={SHARD[ONE]}&amp;_key={ONE}"' in page
    with CaptureQueriesContext(connections[SHARD[TWO]]) as captured:
        results = suggested(admin_client, Photo, "album", term="album", _shard=SHARD[ONE])
    assert sorted(results) == ["album of 1", "album of 3"]
    assert not captured.captured_queries
    scope = {"_shard": SHARD[ONE], "_key": ONE}
    assert suggested(admin_client, Photo, "album", term="album", **scope) == ["album of 1"]
    assert suggested(admin_client, Photo, "album", term="album", _shard=SHARD[TWO]) == [
        "album of 2"
    ]
    assert suggested(admin_client, Photo, "album", term="of 1", _shard=SHARD[ONE]) == ["album of 1"]
    # The selected row is shown.
    assert f'<option value="{rows.album.pk}" selected>album of 1</option>' in page


def test_autocomplete_of_a_key_without_rows(admin_client: Client, rows: Rows) -> None:
    page = admin_client.get(url(Photo, "add", _key=UNPLACED)).content.decode()
    assert f'data-ajax--url="/admin/autocomplete/?_key={UNPLACED}"' in page
    assert suggested(admin_client, Photo, "album", term="", _key=UNPLACED) == []


def test_autocomplete_where_there_is_no_shard(admin_client: Client, rows: Rows) -> None:
    for scope in ({"_shard": "photos_12345"}, {"_shard": "default"}, {"_key": "x"}):
        assert suggested(admin_client, Photo, "album", term="", **scope) == 404


def test_autocomplete_over_all_shards(admin_client: Client, rows: Rows) -> None:
    """A request without a scope, which no page sends."""
    results = suggested(admin_client, Photo, "album", term="album")
    assert sorted(results) == ["album of 1", "album of 2", "album of 3"]


@pytest.mark.parametrize("page", ["3", "99999999999999999999", "0", "-1", "x"])
def test_autocomplete_over_all_shards_ends(
    admin_client: Client, rows: Rows, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.setattr("sharded_orm.admin.pagination.LAST_ROW", 40)
    with CaptureQueriesContext(connections["photos"]) as captured:
        assert suggested(admin_client, Photo, "album", term="album", page=page) == 404
    assert not captured.captured_queries


def test_autocomplete_over_all_shards_counts_nothing(admin_client: Client, rows: Rows) -> None:
    for number in range(20):
        Album.objects.create(owner_id=(ONE, TWO)[number % 2], title=f"more albums, {number:02}")
    with CaptureQueriesContext(connections["photos"]) as captured:
        first = suggested(admin_client, Photo, "album", term="album")
        second = suggested(admin_client, Photo, "album", term="album", page=2)
    assert (len(first), len(second)) == (20, 3)
    assert len({*first, *second}) == 23
    assert not any("COUNT(" in query["sql"] for query in captured)


def test_autocomplete_needs_the_permission(rows: Rows, db: None) -> None:
    assert suggested(login(user_with("view_photo")), Photo, "album", _shard=SHARD[ONE]) == 403
    assert suggested(login(user_with("view_album")), Photo, "album", _shard=SHARD[TWO]) == [
        "album of 2"
    ]


# -- Popups --------------------------------------------------------------------


def popup_data(response: Any) -> Any:
    return json.loads(response.context["popup_response_data"])


def test_the_links_beside_a_picker_say_the_shard(admin_client: Client, rows: Rows) -> None:
    page = admin_client.get(url(Photo, "change", object_id_by_hand(rows.photo))).content.decode()
    template = re.search(r'id="change_id_album"\s+data-href-template="([^"]*)"', page)
    assert template is not None
    link = template[1].replace("&amp;", "&")
    assert f"_shard={SHARD[ONE]}" in link
    response = admin_client.get(link.replace("__fk__", str(rows.near_album.pk)))
    assert response.context["original"].title == "album of 3"
    add = re.search(r'id="add_id_album"\s+data-popup="yes"\s+href="([^"]*)"', page)
    assert add is not None
    # An album and a tag have the key of the photo.
    response = admin_client.get(add[1].replace("&amp;", "&"))
    assert response.context["adminform"].form.instance.owner_id == ONE
    add = re.search(r'id="add_id_tags"\s+data-popup="yes"\s+href="([^"]*)"', page)
    assert add is not None
    response = admin_client.get(add[1].replace("&amp;", "&"))
    assert response.context["adminform"].form.instance.user_id == ONE


def test_a_popup_adds_on_the_shard(admin_client: Client, rows: Rows) -> None:
    address = url(Tag, "add", _shard=SHARD[ONE], _key=ONE, _popup=1, _to_field="id")
    response = admin_client.post(address, {"name": "new", "_popup": "1", "_to_field": "id"})
    tag = Tag.objects.get(user_id=ONE, name="new")
    assert tag._state.db == SHARD[ONE]
    # The value of the field, and not the object id.
    assert popup_data(response) == {"value": str(tag.pk), "obj": "new"}


def test_a_popup_changes_on_the_shard(admin_client: Client, rows: Rows) -> None:
    pk = str(rows.near_album.pk)
    address = url(Album, "change", pk, _shard=SHARD[NEAR], _popup=1, _to_field="album_id")
    assert admin_client.get(address).status_code == 200
    data = {"title": "new", "_popup": "1", "_to_field": "album_id", **inline("photos")}
    response = admin_client.post(address, data)
    assert popup_data(response) == {
        "action": "change",
        "value": pk,
        "obj": "new",
        "new_value": pk,
    }
    assert Album.objects.get(owner=NEAR).title == "new"


def test_a_link_by_another_field(admin_client: Client, rows: Rows, register: Any) -> None:
    """A URL that widgets build for a foreign key with ``to_field``."""

    class ByName(ShardedModelAdmin):
        def to_field_allowed(self, request: Any, to_field: str) -> bool:
            return to_field == "name" or super().to_field_allowed(request, to_field)

    register(Tag, ByName)
    Tag.objects.create(user_id=NEAR, name="a~b")
    Tag.objects.create(user_id=ONE, name="twice")
    Tag.objects.create(user_id=NEAR, name="twice")

    def status(name: str, alias: str | None, page: str = "change") -> int:
        scope = {"_shard": alias} if alias else {}
        return admin_client.get(url(Tag, page, name, _to_field="name", **scope)).status_code

    for page in ("change", "delete"):
        assert status("tag of 1", SHARD[ONE], page) == 200
        assert status("a~b", SHARD[ONE], page) == 200
        assert status(object_id_by_hand(rows.tag), SHARD[ONE], page) == 200
        assert status(object_id_by_hand(rows.tag), None, page) == 200
        assert status("tag of 1", SHARD[TWO], page) == 404
        assert status("tag of 1", None, page) == 404
        assert status("tag of 9", SHARD[ONE], page) == 404
        assert status("twice", SHARD[ONE], page) == 404
    response = admin_client.post(
        url(Tag, "change", "tag of 1", _to_field="name", _shard=SHARD[ONE], _popup=1),
        {"name": "renamed", "_popup": "1", "_to_field": "name"},
    )
    assert popup_data(response) == {
        "action": "change",
        "value": "tag of 1",
        "obj": "renamed",
        "new_value": "renamed",
    }


def test_the_form_of_a_popup_is_sent_to_its_shard(admin_client: Client, rows: Rows) -> None:
    # Django's form action keeps a changelist's filters, and leaves the scope out.
    response = admin_client.get(
        url(Album, "change", str(rows.album.pk), _shard=SHARD[ONE], _changelist_filters="q=a")
    )
    assert response.context["form_url"].startswith(f"?_shard={SHARD[ONE]}") or (
        f"_shard={SHARD[ONE]}" in response.context["form_url"]
    )


def test_a_global_row_is_added_and_changed_as_ever(admin_client: Client, rows: Rows) -> None:
    response = admin_client.post(
        url(Person, "add", _popup=1, _to_field="id"),
        {"username": "new", "_popup": "1", "_to_field": "id", **inline("albums")},
    )
    person = Person.objects.get(username="new")
    assert popup_data(response) == {"value": str(person.pk), "obj": "new"}


def test_a_made_key_s_pickers(admin_client: Client, placed: None) -> None:
    board = Board.objects.create(name="here")
    number = board.pk >> 46 & 0xFFFF
    elsewhere = f"pins_{(number + 1) % 8:05d}"
    assert suggested(admin_client, Note, "board", term="", _shard=board._state.db) == [str(board)]
    assert suggested(admin_client, Note, "board", term="", _shard=elsewhere) == []
    data = {"text": "t", "board": board.pk}
    response = admin_client.post(url(Note, "add", _shard=elsewhere), data)
    assert "Select a valid choice" in str(response.context["errors"])


@pytest.mark.parametrize("how", ["add", "change"])
def test_a_tag_of_another_key_on_the_shard_is_an_error_of_its_field(
    admin_client: Client, rows: Rows, how: str
) -> None:
    tag = Tag.objects.get(user_id=NEAR)
    data = form_of(rows.photo, title="changed", tags=[tag.pk])
    if how == "add":
        address = url(Photo, "add", _key=ONE)
        data |= inline("comments")
    else:
        address = url(Photo, "change", object_id_by_hand(rows.photo), _shard=SHARD[ONE])
    response = admin_client.post(address, data)
    assert response.status_code == 200
    errors = response.context["adminform"].form.errors
    assert list(errors) == ["tags"]
    assert f"{tag.pk} is not one of the available choices" in str(errors)
    assert not Photo.objects.scatter().filter(title="changed").exists()
