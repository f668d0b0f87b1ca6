"""The page of a row whose shard does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from sharded_orm import runtime
from tests.admin.conftest import DATABASES, SHARD, TWO, Rows, named, url
from tests.photos.models import Photo

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
    elsewhere = {**before.nodes[shard.node], "PORT": 1}
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
        assert str(runtime.topology().nodes[node_down].get(secret) or "…") not in content
    # The others' pages are served as ever.
    assert browser.get(url(Photo, "change", named(rows.photo))).status_code == 200


def test_nothing_is_saved_or_logged(browser: Client, rows: Rows, node_down: str) -> None:
    data = {"title": "new", "post": "yes", "_save": "1"}
    for page in ("change", "delete"):
        response = browser.post(url(Photo, page, named(rows.other_photo)), data)
        assert response.status_code == 503
    assert not LogEntry.objects.exists()
