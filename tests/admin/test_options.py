"""Options and hooks of Django's ModelAdmin that a project may combine with sharded models."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.test import Client

from sharded_orm.admin import ShardedModelAdmin, ShardedTabularInline
from tests.admin.conftest import (
    DATABASES,
    NEAR,
    ONE,
    SHARD,
    Rows,
    inline,
    object_id_by_hand,
    url,
)
from tests.photos.models import Album, Board, BoardProxy, Photo, Tag

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql", "postgresql"),
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.site"),
]


def test_a_proxy_has_pages_and_a_history_of_its_own(
    admin_client: Client, placed: None, register: Any
) -> None:
    register(BoardProxy, ShardedModelAdmin)
    board = Board.objects.create(name="b")
    address = url(BoardProxy, "change", str(board.pk))
    assert admin_client.get(url(BoardProxy, "changelist")).status_code == 200
    assert admin_client.post(address, {"name": "new", "parent": ""}).status_code == 302
    assert LogEntry.objects.get().get_admin_url() == address
    history = admin_client.get(url(BoardProxy, "history", str(board.pk)))
    assert len(history.context["action_list"]) == 1
    history = admin_client.get(url(Board, "history", str(board.pk)))
    assert not history.context["action_list"]


def test_a_queryset_of_the_project_s_own_holds_everywhere(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    class OfOne(ShardedModelAdmin):
        def get_queryset(self, request: Any) -> Any:
            return super().get_queryset(request).filter(title__endswith="1")

    register(Album, OfOne)
    assert admin_client.get(url(Album, "change", object_id_by_hand(rows.album))).status_code == 200
    for page in ("change", "delete", "history"):
        assert (
            admin_client.get(url(Album, page, object_id_by_hand(rows.near_album))).status_code
            == 404
        )
    pk = str(rows.near_album.pk)
    assert admin_client.get(url(Album, "change", pk, _shard=SHARD[NEAR])).status_code == 404


def test_radio_buttons_and_several_raw_ids(admin_client: Client, rows: Rows, register: Any) -> None:
    class Radio(ShardedModelAdmin):
        raw_id_fields = ["tags"]
        radio_fields = {"album": admin.VERTICAL}
        fields = ["title", "tags", "album"]

    register(Photo, Radio)
    address = url(Photo, "change", object_id_by_hand(rows.photo))
    page = admin_client.get(address).content.decode()
    assert 'type="radio"' in page
    assert "album of 1" in page
    assert "album of 3" not in page  # on this shard, of another key
    assert "album of 2" not in page
    assert f'href="/admin/photos_app/tag/?_shard={SHARD[ONE]}&amp;_key={ONE}"' in page
    tag = Tag.objects.create(user_id=ONE, name="another")
    near = Tag.objects.create(user_id=NEAR, name="near")
    data = {"title": "t", "tags": f"{rows.tag.pk},{tag.pk}", "album": rows.album.pk}
    assert admin_client.post(address, data).status_code == 302
    assert rows.photo.tags.count() == 2
    for tags in ("1,x", "999", f"{near.pk}"):
        response = admin_client.post(address, {**data, "tags": tags})
        assert response.status_code == 200
        assert response.context["errors"]


def test_an_inline_of_a_many_to_many_table(admin_client: Client, rows: Rows, register: Any) -> None:
    class Tagged(ShardedTabularInline):
        model = Photo.tags.through
        extra = 1

    class Tagging(ShardedModelAdmin):
        inlines = [Tagged]
        fields = ["title"]

    register(Photo, Tagging)
    address = url(Photo, "change", object_id_by_hand(rows.photo))
    response = admin_client.get(address)
    assert "tag of 1" in response.content.decode()
    assert "tag of 2" not in response.content.decode()
    [formset] = response.context["inline_admin_formsets"]
    prefix, photo = formset.formset.prefix, rows.photo.pk
    link = Photo.tags.through._default_manager.using(SHARD[ONE]).get()
    tag = Tag.objects.create(user_id=ONE, name="new")
    forms = [{"id": link.pk, "photo": photo, "tag": rows.tag.pk}, {"photo": photo, "tag": tag.pk}]
    response = admin_client.post(address, {"title": "t", **inline(prefix, *forms, initial=1)})
    assert response.status_code == 302, response.context["errors"]
    assert rows.photo.tags.count() == 2
    # The same tag twice is a form error, as in Django.
    response = admin_client.post(address, {"title": "t", **inline(prefix, *forms, initial=1)})
    assert "already exists" in str(response.context["errors"])
    forms = [{"id": link.pk, "photo": photo, "tag": rows.tag.pk, "DELETE": "on"}]
    response = admin_client.post(address, {"title": "t", **inline(prefix, *forms, initial=1)})
    assert response.status_code == 302
    assert [tag.name for tag in rows.photo.tags.all()] == ["new"]
    response = admin_client.post(
        url(Photo, "add", _key=ONE), {"title": "u", **inline(prefix, {"photo": "", "tag": tag.pk})}
    )
    assert response.status_code == 302, response.context["errors"]
    assert Photo.objects.get(user_id=ONE, title="u").tags.get() == tag


def test_save_as_new_with_an_error(admin_client: Client, rows: Rows) -> None:
    data = {"title": "", "_saveasnew": "1", **inline("photos")}
    page = admin_client.post(
        url(Album, "change", object_id_by_hand(rows.album)), data
    ).content.decode()
    assert 'name="_saveasnew"' in page
    assert 'name="_save"' not in page


def test_a_constraint_over_the_key_in_a_list(
    admin_client: Client, rows: Rows, register: Any
) -> None:
    class Listed(ShardedModelAdmin):
        list_display = ["id", "name"]
        list_editable = ["name"]

    register(Tag, Listed)
    Tag.objects.create(user_id=ONE, name="sun")
    address = url(Tag, "changelist", _shard=SHARD[ONE])
    form = {"id": rows.tag.pk, "name": "sun"}
    response = admin_client.post(address, {"_save": "1", **inline("form", form, initial=1)})
    assert response.status_code == 200
    assert "already exists" in str(response.context["cl"].formset.errors)
    form = {"id": 12345, "name": "forged"}
    response = admin_client.post(address, {"_save": "1", **inline("form", form, initial=1)})
    assert "Select a valid choice" in str(response.context["cl"].formset.errors)


def test_a_row_of_another_shard_in_a_list(
    admin_client: Client, placed: None, register: Any
) -> None:
    class Listed(ShardedModelAdmin):
        list_display = ["id", "name"]
        list_editable = ["name"]

    register(Board, Listed)
    board = Board.objects.create(name="theirs")
    number = int(board._state.db[-5:])  # type: ignore[index]
    form = {"id": board.pk, "name": "forged"}
    for alias, status in ((f"pins_{(number + 1) % 8:05d}", 200), (board._state.db, 302)):
        data = {"_save": "1", **inline("form", form, initial=1)}
        response = admin_client.post(url(Board, "changelist", _shard=alias), data)
        assert response.status_code == status


def test_a_changelist_whose_place_is_gone_does_not_matter(admin_client: Client, rows: Rows) -> None:
    for filters in ("_shard=photos_99999", "_key=x", "_key=1&_shard=photos_00012"):
        response = admin_client.get(url(Album, "add", _changelist_filters=filters))
        assert response.templates[0].name == "admin/sharded_orm/add_key.html"
        assert not response.context["problem"]
        assert response.status_code == 200
