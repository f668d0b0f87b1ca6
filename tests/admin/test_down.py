"""The page of a row whose shard does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from sharded_orm import runtime
from tests.admin.conftest import DATABASES, ONE, SHARD, TWO, Rows, inline, object_id_by_hand, url
from tests.photos.models import Person, Photo

pytestmark = [
    pytest.mark.mysql_settings,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
    pytest.mark.urls("tests.admin.site"),
]


@pytest.fixture
def node_down(rows: Rows) -> Iterator[str]:
    """The node of TWO's shard has a closed port."""
    before = runtime.topology()
    shard = before.resolve(SHARD[TWO])
    assert shard is not None
    # Titles that are in no page by chance.
    elsewhere = {**before.nodes[shard.node], "PORT": 1, "USER": "xuserx", "PASSWORD": "xsecretx"}
    runtime.swap(replace(before, nodes={**before.nodes, shard.node: elsewhere}))
    yield shard.node
    runtime.swap(before)


@pytest.mark.parametrize("page", ["change", "history", "delete", "site"])
def test_it_is_told_with_the_way_out(
    admin_client: Client, rows: Rows, node_down: str, page: str
) -> None:
    response = admin_client.get(url(Photo, page, object_id_by_hand(rows.other_photo)))
    assert response.status_code == 503
    content = response.content.decode()
    assert f"{SHARD[TWO]} on {node_down} does not answer" in content
    assert 'name="_shard"' in content
    for secret in ("USER", "PASSWORD"):
        assert runtime.topology().nodes[node_down][secret] not in content
    # Pages of other nodes work.
    assert admin_client.get(url(Photo, "change", object_id_by_hand(rows.photo))).status_code == 200


def test_nothing_is_saved_or_logged(admin_client: Client, rows: Rows, node_down: str) -> None:
    data = {"title": "new", "post": "yes", "_save": "1"}
    for page in ("change", "delete"):
        response = admin_client.post(url(Photo, page, object_id_by_hand(rows.other_photo)), data)
        assert response.status_code == 503
    assert not LogEntry.objects.exists()


def test_a_picker_of_its_rows(admin_client: Client, rows: Rows, node_down: str) -> None:
    field = {"app_label": "photos_app", "model_name": "photo", "field_name": "album"}
    query = {**field, "_shard": SHARD[TWO]}
    # The only error response of Django's view; the widget shows that loading has failed.
    assert admin_client.get("/admin/autocomplete/", query).status_code == 404
    query["_shard"] = SHARD[ONE]
    assert admin_client.get("/admin/autocomplete/", query).status_code == 200


def test_the_page_of_a_global_row_with_children_there(
    admin_client: Client, rows: Rows, node_down: str
) -> None:
    address = url(Person, "change", str(TWO))
    content = admin_client.get(address).content.decode()
    assert 'value="person2"' in content
    assert f"{SHARD[TWO]} on {node_down} does not answer" in content
    assert 'name="albums-0-title"' not in content
    for forms in ([], [{"album_id": rows.other_album.pk, "owner": TWO, "title": "x"}]):
        data = {"username": "new", **inline("albums", *forms, initial=len(forms))}
        response = admin_client.post(address, data)
        assert response.status_code == 200
        assert f"{SHARD[TWO]} on {node_down} does not answer" in response.content.decode()
    assert Person.objects.get(pk=TWO).username == "person2"
