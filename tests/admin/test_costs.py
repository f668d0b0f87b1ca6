"""Statements per page, beside those of Django's own admin for its like of a global model."""

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
from tests.admin.conftest import DATABASES, ONE, SHARD, TWO, Rows, inline, named, url
from tests.cached.models import CachedCountry, CachedPost
from tests.photos.models import Album, Photo

pytestmark = [
    pytest.mark.every_backend,
    # Committed, so that the directory is remembered, as in a server that is warm.
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
def twins(rows: Rows, registered: Any) -> CachedCountry:
    """A country and its posts, as an album and its photos, each with a page of the same form."""
    registered(Album, AlbumAdmin)
    registered(CachedCountry, CountryAdmin)
    country = CachedCountry.objects.create(name="c")
    CachedPost.objects.create(country=country, title="p")
    for model in (Album, CachedCountry):
        ContentType.objects.get_for_model(model)
    return country


def statements(run: Callable[[], Any]) -> list[str]:
    """What ``run`` asks and tells all databases, without savepoints."""
    with ExitStack() as stack:
        captured = [
            stack.enter_context(CaptureQueriesContext(connections[alias]))
            for alias in ("default", "directory", "photos")
        ]
        assert run().status_code in (200, 302)
        every = [query["sql"].lstrip("(") for one in captured for query in one]
    return [sql for sql in every if sql.startswith(("SELECT", "INSERT", "UPDATE", "DELETE"))]


def test_a_change_page_costs_what_django_s_does(
    browser: Client, rows: Rows, twins: CachedCountry
) -> None:
    theirs = statements(lambda: browser.get(url(CachedCountry, "change", str(twins.pk))))
    mine = statements(lambda: browser.get(url(Album, "change", named(rows.album))))
    assert len(mine) == len(theirs)


def test_saving_costs_what_django_s_does(browser: Client, rows: Rows, twins: CachedCountry) -> None:
    [post] = twins.posts.all()
    data = {
        "name": "n",
        **inline("posts", {"id": post.pk, "title": "new"}, {"title": "b"}, initial=1),
    }
    theirs = statements(lambda: browser.post(url(CachedCountry, "change", str(twins.pk)), data))
    data = {
        "title": "n",
        **inline("photos", {"photo_id": rows.photo.pk, "title": "new"}, {"title": "b"}, initial=1),
    }
    mine = statements(lambda: browser.post(url(Album, "change", named(rows.album)), data))
    assert Photo.objects.filter(user_id=ONE).count() == 2
    # One more: the owner, of whom a stored row is checked to have one.
    assert len(mine) <= len(theirs) + 1


def test_adding_costs_what_django_s_does(browser: Client, rows: Rows, twins: CachedCountry) -> None:
    data = {"name": "n2", **inline("posts", {"title": "b"})}
    theirs = statements(lambda: browser.post(url(CachedCountry, "add"), data))
    data = {"title": "n2", **inline("photos", {"title": "b"})}
    mine = statements(lambda: browser.post(url(Album, "add", _key=ONE), data))
    assert len(mine) <= len(theirs) + 1


def test_a_page_asks_one_shard(browser: Client, rows: Rows, monkeypatch: Any) -> None:
    browser.get(url(Photo, "change", named(rows.photo)))
    asked: list[str] = []
    runs = ShardConnectionMixin._cursor

    def watched(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(wrapper.alias)  # of a shard, or of the global database
        return runs(wrapper, *args, **kwargs)

    monkeypatch.setattr(ShardConnectionMixin, "_cursor", watched)
    browser.get(url(Photo, "change", named(rows.photo)))
    # The photo; its album and its tags, chosen and offered; its comments. Each row of the
    # inline asks for its row again, as in Django's admin.
    assert set(asked) == {"default", SHARD[ONE]}
    assert asked.count(SHARD[ONE]) <= 7
    with CaptureQueriesContext(connections["directory"]) as captured:
        browser.get(url(Photo, "change", named(rows.photo)))
    assert not captured.captured_queries


def test_an_inline_of_many_rows_asks_once(browser: Client, rows: Rows, registered: Any) -> None:
    registered(Album, AlbumAdmin)

    def cost() -> int:
        return len(statements(lambda: browser.get(url(Album, "change", named(rows.other_album)))))

    cost()  # What a process asks once.
    few = cost()
    for number in range(10):
        Photo.objects.create(user_id=TWO, album=rows.other_album, title=f"row {number}")
    assert cost() == few
    page = browser.get(url(Album, "change", named(rows.other_album))).content.decode()
    assert "row 0" in page
    assert "row 9" in page


class PlainPhotoAdmin(ShardedModelAdmin):
    list_display = ["title", "user_id", "stars", "posted_at"]


#: Calls of the package's own functions for each row of a list.
MOST_CALLS = 40


def own_calls(run: Callable[[], Any]) -> int:
    """How many functions of the package ``run`` calls."""
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
def listed(browser: Client, rows: Rows, registered: Any) -> Callable[..., tuple[int, int]]:
    """The number of rows in a list of photos, and of the package's calls that it takes."""
    registered(Photo, PlainPhotoAdmin)

    def read(**place: Any) -> tuple[int, int]:
        address = url(Photo, "changelist", **place)
        page: Any = browser.get(address)  # Also for what a process asks once.
        return len(page.context["cl"].result_list), own_calls(lambda: browser.get(address))

    return read


def add_photos(album: Album, number: int) -> None:
    for index in range(number):
        Photo.objects.create(user_id=album.owner_id, album=album, title=f"row {index}")


@pytest.mark.parametrize("place", [{"_shard": SHARD[ONE]}, {"_key": ONE}])
def test_a_list_makes_few_calls_for_each_row(
    listed: Any, rows: Rows, place: dict[str, Any]
) -> None:
    few, _ = listed(**place)
    add_photos(rows.album, 33 - few)
    number, calls = listed(**place)
    assert number == 33
    assert calls <= MOST_CALLS * number


def test_a_row_of_all_shards_takes_few_calls(listed: Any, rows: Rows) -> None:
    few, before = listed()
    add_photos(rows.album, 33 - few)
    number, calls = listed()
    assert number == 33
    assert calls - before <= MOST_CALLS * (number - few)
