"""The page of a row whose shard does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from sharded_orm import runtime
from tests.admin.conftest import DATABASES, ONE, SHARD, TWO, Rows, inline, named, url
from tests.photos.models import Person, Photo

pytestmark = [
    pytest.mark.mysql_settings,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
    pytest.mark.urls("tests.admin.site"),
]


@pytest.fixture
def node_down(rows: Rows) -> Iterator[str]:
    """TWO's node is where nobody answers: at a port that is closed."""
    before = runtime.topology()
    shard = before.resolve(SHARD[TWO])
    assert shard is not None
    # Words that are in no page by chance.
    elsewhere = {**before.nodes[shard.node], "PORT": 1, "USER": "xuserx", "PASSWORD": "xsecretx"}
    runtime.swap(replace(before, nodes={**before.nodes, shard.node: elsewhere}))
    yield shard.node
    runtime.swap(before)


@pytest.mark.parametrize("page", ["change", "history", "delete", "site"])
def test_it_is_told_with_the_way_out(
    browser: Client, rows: Rows, node_down: str, page: str
) -> None:
    response = browser.get(url(Photo, page, named(rows.other_photo)))
    assert response.status_code == 503
    content = response.content.decode()
    assert f"{SHARD[TWO]} on {node_down} does not answer" in content
    assert 'name="_shard"' in content
    for secret in ("USER", "PASSWORD"):
        assert runtime.topology().nodes[node_down][secret] not in content
    # The others' pages are served as ever.
    assert browser.get(url(Photo, "change", named(rows.photo))).status_code == 200


def test_nothing_is_saved_or_logged(browser: Client, rows: Rows, node_down: str) -> None:
    data = {"title": "new", "post": "yes", "_save": "1"}
    for page in ("change", "delete"):
        response = browser.post(url(Photo, page, named(rows.other_photo)), data)
        assert response.status_code == 503
    assert not LogEntry.objects.exists()


def test_a_picker_of_its_rows(browser: Client, rows: Rows, node_down: str) -> None:
    field = {"app_label": "photos_app", "model_name": "photo", "field_name": "album"}
    query = {**field, "_shard": SHARD[TWO]}
    # Of all that Django's view can answer; the widget says that it could not be loaded.
    assert browser.get("/admin/autocomplete/", query).status_code == 404
    query["_shard"] = SHARD[ONE]
    assert browser.get("/admin/autocomplete/", query).status_code == 200


def test_the_page_of_a_global_row_with_children_there(
    browser: Client, rows: Rows, node_down: str
) -> None:
    address = url(Person, "change", str(TWO))
    content = browser.get(address).content.decode()
    assert 'value="person2"' in content
    assert f"{SHARD[TWO]} on {node_down} does not answer" in content
    assert 'name="albums-0-title"' not in content
    for forms in ([], [{"album_id": rows.other_album.pk, "owner": TWO, "title": "x"}]):
        data = {"username": "new", **inline("albums", *forms, initial=len(forms))}
        response = browser.post(address, data)
        assert response.status_code == 200
        assert f"{SHARD[TWO]} on {node_down} does not answer" in response.content.decode()
    assert Person.objects.get(pk=TWO).username == "person2"
