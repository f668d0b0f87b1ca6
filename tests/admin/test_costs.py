"""Costs of pages: statements, compared with Django's admin of a global model, and own calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.contenttypes.models import ContentType
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext

import sharded_orm
from sharded_orm.admin import ShardedModelAdmin, ShardedTabularInline
from sharded_orm.backends.group.member import ShardConnectionMixin
from tests.admin.conftest import DATABASES, ONE, SHARD, TWO, Rows, inline, object_id_by_hand, url
from tests.cached.models import CachedCountry, CachedPost
from tests.photos.models import Album, Photo

pytestmark = [
    pytest.mark.every_backend,
    # Committed, so that the process remembers placements, as a warm server does.
    pytest.mark.django_db(databases=DATABASES, transaction=True),
    pytest.mark.urls("tests.admin.site"),
]


class PostsOfCountry(admin.TabularInline):  # type: ignore[type-arg]
    model = CachedPost
    fields = ["title"]


class CountryAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    fields = ["name"]
    inlines = [PostsOfCountry]


class PhotosOfAlbum(ShardedTabularInline):
    model = Photo
    fields = ["title"]


class AlbumAdmin(ShardedModelAdmin):
    fields = ["title"]
    inlines = [PhotosOfAlbum]


@pytest.fixture
def country(rows: Rows, register: Any) -> CachedCountry:
    """A global row with children, whose page has the same form as that of an album with photos."""
    register(Album, AlbumAdmin)
    register(CachedCountry, CountryAdmin)
    country = CachedCountry.objects.create(name="c")
    CachedPost.objects.create(country=country, title="p")
    for model in (Album, CachedCountry):
        ContentType.objects.get_for_model(model)
    return country


def statements(run: Callable[[], Any]) -> list[str]:
    """The statements that ``run`` sends to all databases, without savepoints."""
    with ExitStack() as stack:
        captured = [
            stack.enter_context(CaptureQueriesContext(connections[alias]))
            for alias in ("default", "directory", "photos")
        ]
        assert run().status_code in (200, 302)
        queries = [query["sql"].lstrip("(") for context in captured for query in context]
    return [sql for sql in queries if sql.startswith(("SELECT", "INSERT", "UPDATE", "DELETE"))]


def test_a_change_page_costs_what_django_s_does(
    admin_client: Client, rows: Rows, country: CachedCountry
) -> None:
    django_statements = statements(
        lambda: admin_client.get(url(CachedCountry, "change", str(country.pk)))
    )
    own_statements = statements(
        lambda: admin_client.get(url(Album, "change", object_id_by_hand(rows.album)))
    )
    assert len(own_statements) == len(django_statements)


def test_saving_costs_what_django_s_does(
    admin_client: Client, rows: Rows, country: CachedCountry
) -> None:
    [post] = country.posts.all()
    data = {
        "name": "n",
        **inline("posts", {"id": post.pk, "title": "new"}, {"title": "b"}, initial=1),
    }
    django_statements = statements(
        lambda: admin_client.post(url(CachedCountry, "change", str(country.pk)), data)
    )
    data = {
        "title": "n",
        **inline("photos", {"photo_id": rows.photo.pk, "title": "new"}, {"title": "b"}, initial=1),
    }
    own_statements = statements(
        lambda: admin_client.post(url(Album, "change", object_id_by_hand(rows.album)), data)
    )
    assert Photo.objects.filter(user_id=ONE).count() == 2
    # One more, which checks that the owner exists.
    assert len(own_statements) <= len(django_statements) + 1


def test_adding_costs_what_django_s_does(
    admin_client: Client, rows: Rows, country: CachedCountry
) -> None:
    data = {"name": "n2", **inline("posts", {"title": "b"})}
    django_statements = statements(lambda: admin_client.post(url(CachedCountry, "add"), data))
    data = {"title": "n2", **inline("photos", {"title": "b"})}
    own_statements = statements(lambda: admin_client.post(url(Album, "add", _key=ONE), data))
    assert len(own_statements) <= len(django_statements) + 1


def test_a_page_asks_one_shard(admin_client: Client, rows: Rows, monkeypatch: Any) -> None:
    admin_client.get(url(Photo, "change", object_id_by_hand(rows.photo)))
    aliases: list[str] = []
    create_cursor = ShardConnectionMixin._cursor

    def record(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        aliases.append(wrapper.alias)
        return create_cursor(wrapper, *args, **kwargs)

    monkeypatch.setattr(ShardConnectionMixin, "_cursor", record)
    admin_client.get(url(Photo, "change", object_id_by_hand(rows.photo)))
    # The photo, its album and tags, the choices for both, and its comments. Each form of the
    # inline queries for its row again, as in Django's admin.
    assert set(aliases) == {"default", SHARD[ONE]}
    assert aliases.count(SHARD[ONE]) <= 7
    with CaptureQueriesContext(connections["directory"]) as captured:
        admin_client.get(url(Photo, "change", object_id_by_hand(rows.photo)))
    assert not captured.captured_queries


def test_an_inline_of_many_rows_asks_once(admin_client: Client, rows: Rows, register: Any) -> None:
    register(Album, AlbumAdmin)

    def cost() -> int:
        return len(
            statements(
                lambda: admin_client.get(url(Album, "change", object_id_by_hand(rows.other_album)))
            )
        )

    cost()  # A first request for queries that a process sends once.
    few = cost()
    for number in range(10):
        Photo.objects.create(user_id=TWO, album=rows.other_album, title=f"row {number}")
    assert cost() == few
    page = admin_client.get(
        url(Album, "change", object_id_by_hand(rows.other_album))
    ).content.decode()
    assert "row 0" in page
    assert "row 9" in page


class PlainPhotoAdmin(ShardedModelAdmin):
    list_display = ["title", "user_id", "stars", "posted_at"]


#: Calls of the package's own functions for each row of a list.
MOST_CALLS = 40


def own_calls(run: Callable[[], Any]) -> int:
    """The number of calls of the package's functions by ``run``."""
    folder = str(Path(sharded_orm.__file__).parent)
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(folder)

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


@pytest.fixture
def list_calls(admin_client: Client, rows: Rows, register: Any) -> Callable[..., tuple[int, int]]:
    """A function that returns the number of rows of a list, and of the package's calls for it."""
    register(Photo, PlainPhotoAdmin)

    def read(**scope: Any) -> tuple[int, int]:
        address = url(Photo, "changelist", **scope)
        page: Any = admin_client.get(
            address
        )  # A first request for queries that a process sends once.
        # One request of many also renews the lease of placements.
        calls = min(own_calls(lambda: admin_client.get(address)) for _ in range(3))
        return len(page.context["cl"].result_list), calls

    return read


def add_photos(album: Album, number: int) -> None:
    for index in range(number):
        Photo.objects.create(user_id=album.owner_id, album=album, title=f"row {index}")


@pytest.mark.parametrize("scope", [{"_shard": SHARD[ONE]}, {"_key": ONE}])
def test_a_list_makes_few_calls_for_each_row(
    list_calls: Any, rows: Rows, scope: dict[str, Any]
) -> None:
    few, before = list_calls(**scope)
    add_photos(rows.album, 33 - few)
    number, calls = list_calls(**scope)
    assert number == 33
    assert calls - before <= MOST_CALLS * (number - few)


def test_a_row_of_all_shards_takes_few_calls(list_calls: Any, rows: Rows) -> None:
    few, before = list_calls()
    add_photos(rows.album, 33 - few)
    number, calls = list_calls()
    assert number == 33
    assert calls - before <= MOST_CALLS * (number - few)
