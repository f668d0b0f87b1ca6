"""The debug panel: its content, and who sees it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from django.core.exceptions import MiddlewareNotUsed
from django.http import HttpResponse, StreamingHttpResponse
from django.template.loader import render_to_string
from django.test import Client, RequestFactory

from sharded_orm import runtime
from testproject.databases import SHARDS
from testproject.panel.middleware import PanelMiddleware
from testproject.panel.recording import recording
from testproject.photos.models import Photo

pytestmark = pytest.mark.django_db(
    databases=["default", "directory", "tickets_1", "tickets_2", "photos", "addresses"]
)


@pytest.fixture
def debugging(settings: Any) -> Client:
    settings.DEBUG = True
    return Client()


def panel(client: Client, path: str) -> str:
    """The text of the panel on a page."""
    page = client.get(path).content.decode()
    found = re.search(r'<aside class="debug-panel".*</aside>\s*</body>', page, re.DOTALL)
    assert found, page
    return shown(found[0])


def shown(html: str) -> str:
    return " ".join(re.sub("<[^>]+>", " ", html).split())


def test_without_debug_there_is_none(browser: Client, lake: Photo) -> None:
    assert "debug-panel" not in browser.get("/").content.decode()
    with pytest.raises(MiddlewareNotUsed):
        PanelMiddleware(lambda request: HttpResponse())


def test_a_page_of_one_shard(debugging: Client, dunes: Photo) -> None:
    text = panel(debugging, dunes.get_absolute_url())
    assert "1 shard on node_" in text
    # The photo, its tags and its comments; the user.
    assert re.search(rf"{dunes.shard_alias} node_\d 3 ", text)
    assert re.search(r"default – 1 ", text)


def test_a_page_of_all_shards(debugging: Client, dunes: Photo, lake: Photo) -> None:
    text = panel(debugging, "/")
    assert f"{SHARDS} shards on node_1, node_2" in text
    assert f"photos.Photo: {SHARDS} shards on node_1, node_2, from testproject/photos/" in text
    # The owners.
    assert "default – 1 " in text


def test_the_panel_of_a_page_that_is_not_found(debugging: Client) -> None:
    assert "0 shards" in panel(debugging, "/photos/nobody/")


def test_the_admin_has_one(debugging: Client) -> None:
    assert "0 shards" in panel(debugging, "/admin/login/")


def test_what_one_request_asks_is_not_told_by_the_next(debugging: Client, dunes: Photo) -> None:
    first, second = (panel(debugging, "/tags/") for _ in range(2))
    assert first.count("photos.PhotoTag") == second.count("photos.PhotoTag") > 0
    assert "photos_photo&quot;" not in second


def test_cache_hits_by_level() -> None:
    cache: Any = runtime.cache()
    album, photo = (f"{cache.prefix}photos.{name}" for name in ("Album", "Photo"))
    with recording() as recorded:
        # A test runs in a transaction, so nothing is read from the cache.
        cache.statistics.add(album, l1_hits=1, list_hits=2)
        cache.statistics.add(album, object_misses=4, bypasses=8)
        cache.statistics.add(photo, object_hits=16, fills=32)
    assert (recorded.hits, recorded.misses) == (19, 12)
    text = shown(render_to_string("panel/panel.html", {"recorded": recorded}))
    assert "cache: 19 hits, 12 misses" in text
    assert "photos.Album 1 2 4 8 0 photos.Photo 0 16 0 0 32" in text


@pytest.mark.parametrize("kind", ["json", "stream", "part"])
def test_other_answers_are_left_alone(settings: Any, rf: RequestFactory, kind: str) -> None:
    settings.DEBUG = True
    answer = {
        "json": HttpResponse(json.dumps("</body>"), content_type="application/json"),
        "stream": StreamingHttpResponse(["<body></body>"]),
        "part": HttpResponse("<p>a part</p>"),
    }[kind]
    said = PanelMiddleware(lambda request: answer)(rf.get("/"))
    assert "debug-panel" not in b"".join(said).decode()


def test_length_is_right(debugging: Client, lake: Photo) -> None:
    page = debugging.get("/tags/")
    assert int(page.headers["Content-Length"]) == len(page.content)
