"""Inlines by a generic relation: their rows are on the shard of the row of the page."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.contenttypes.admin import GenericTabularInline
from django.contrib.contenttypes.models import ContentType
from django.test import Client

from sharded_orm.admin import (
    ShardedGenericStackedInline,
    ShardedGenericTabularInline,
    ShardedModelAdmin,
)
from sharded_orm.admin.checks import check_sites
from tests.admin.conftest import (
    DATABASES,
    ONE,
    SHARD,
    TWO,
    Rows,
    inline,
    object_id_by_hand,
    url,
)
from tests.admin.site import PersonAdmin, site
from tests.photos.models import Album, Board, Person
from tests.relatives.sharded.models import Agent, Note, Sticker

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql", "postgresql"),
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.site"),
]

PREFIX = "relatives_sharded-note-content_type-object_id"


class Notes(ShardedGenericTabularInline):
    model = Note
    fields = ["id", "name"]


class StackedNotes(ShardedGenericStackedInline):
    model = Note
    extra = 1


@pytest.fixture
def agents(rows: Rows) -> None:
    for key in (ONE, TWO):
        Agent.objects.create(id=key, name=f"agent {key}")


@pytest.fixture
def notes(agents: None, rows: Rows) -> list[Note]:
    """A note about an album of ONE, and one with the same id about an album of TWO."""
    return [
        Note.objects.create(id=1, name=f"about {album}", owner_id=key, content_object=album)
        for key, album in ((ONE, rows.album), (TWO, rows.other_album))
    ]


def _register(register: Any, inline_class: type[Any]) -> None:
    class Albums(ShardedModelAdmin):
        inlines = [inline_class]

    register(Album, Albums)


@pytest.mark.parametrize("inline_class", [Notes, StackedNotes])
def test_the_page_shows_the_rows_of_its_shard(
    admin_client: Client, rows: Rows, notes: list[Note], register: Any, inline_class: type[Any]
) -> None:
    _register(register, inline_class)
    page = admin_client.get(url(Album, "change", object_id_by_hand(rows.album))).content.decode()
    assert 'value="about album of 1"' in page
    assert "about album of 2" not in page
    assert f'name="{PREFIX}-0-owner"' not in page


def test_rows_are_added_changed_and_deleted(
    admin_client: Client, rows: Rows, notes: list[Note], register: Any
) -> None:
    _register(register, Notes)
    address = url(Album, "change", object_id_by_hand(rows.other_album))

    def post(*forms: dict[str, Any], initial: int) -> None:
        data = {"title": "album", **inline(PREFIX, *forms, initial=initial)}
        response = admin_client.post(address, data)
        assert response.status_code == 302, response.context["errors"]

    post({"id": 1, "name": "changed"}, {"id": 2, "name": "new"}, initial=1)
    stored = Note.objects.filter(owner=TWO).order_by("pk")
    assert [(note.name, note._state.db) for note in stored] == [
        ("changed", SHARD[TWO]),
        ("new", SHARD[TWO]),
    ]
    assert [note.content_object for note in stored] == [rows.other_album] * 2
    assert Note.objects.get(owner=ONE).name == "about album of 1"
    post({"id": 1, "name": "changed", "DELETE": "on"}, {"id": 2, "name": "new"}, initial=2)
    assert [note.pk for note in Note.objects.scatter().order_by("pk")] == [1, 2]


def test_a_parent_is_added_with_its_rows(
    admin_client: Client, rows: Rows, agents: None, register: Any
) -> None:
    _register(register, Notes)
    data = {"title": "added", **inline(PREFIX, {"id": 5, "name": "new"})}
    assert admin_client.post(url(Album, "add", _key=TWO), data).status_code == 302
    album = Album.objects.get(owner=TWO, title="added")
    note = Note.objects.get(owner=TWO, content_type=ContentType.objects.get_for_model(Album))
    assert note.content_object == album


def test_rows_whose_key_is_generated(admin_client: Client, placed: None, register: Any) -> None:
    class Stickers(ShardedGenericTabularInline):
        model = Sticker

    register(Board, type("Boards", (ShardedModelAdmin,), {"inlines": [Stickers]}))
    stickers = inline("relatives_sharded-sticker-content_type-object_id", {"name": "s"})
    data = {"name": "b", "parent": "", **stickers}
    response = admin_client.post(url(Board, "add", _shard="pins_00006"), data)
    assert response.status_code == 302, response.context["errors"]
    [board] = Board.objects.using("pins_00006")
    [sticker] = Sticker.objects.using("pins_00006")
    assert sticker.content_object == board


def test_checks(placed: None, register: Any) -> None:
    _register(register, Notes)
    assert site.get_model_admin(Album).check() == []
    register(Person, type("Persons", (PersonAdmin,), {"inlines": [Notes]}))
    assert [error.id for error in site.get_model_admin(Person).check()] == ["sharded_orm.E070"]
    django = type("DjangoNotes", (GenericTabularInline,), {"model": Note})
    register(Person, type("Persons", (PersonAdmin,), {"inlines": [django]}))
    assert [error.id for error in check_sites([site])] == ["sharded_orm.E071"]
