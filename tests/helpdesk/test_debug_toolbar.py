"""The SQL panel of django-debug-toolbar, through requests with the toolbar on."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from debug_toolbar.toolbar import DebugToolbar
from django.contrib.auth.models import User
from django.db import connections
from django.test import AsyncClient
from django.urls import reverse
from django.utils.html import strip_tags

from tests.helpdesk.conftest import DATABASES, Desk
from tests.helpdesk.models import Profile

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


@pytest.fixture(autouse=True)
def toolbar_on(settings: Any) -> None:
    settings.DEBUG = True
    settings.INTERNAL_IPS = ["127.0.0.1"]


def panel_of(desk: Desk, page: Any) -> str:
    """The panel as the browser fetches it for ``page``."""
    request_id = re.search(r'data-request-id="(\w+)"', page.content.decode())[1]
    address = f"/__debug__/render_panel/?request_id={request_id}&panel_id=SQLPanel"
    return desk.client.get(address).json()["content"]


def statements(page: Any) -> list[dict[str, Any]]:
    request_id = re.search(r'data-request-id="(\w+)"', page.content.decode())[1]
    panel = DebugToolbar.fetch(request_id, "SQLPanel").get_panel_by_id("SQLPanel")
    return panel.get_stats()["queries"]


def of_shards(page: Any) -> list[tuple[str, str]]:
    return [(s["alias"], s["node"]) for s in statements(page) if s.get("node")]


def test_statements_of_a_shard_have_alias_and_node(desk: Desk, nodes: tuple[str, str]) -> None:
    desk.case(assignee=desk.agent).tags.add(desk.tag)
    page = desk.client.get(desk.url())
    assert set(of_shards(page)) == {("helpdesk_00003", nodes[0])}
    # The count, the cases and their tags; tenant, session and agents are global.
    assert len(of_shards(page)) == 3
    assert [s["alias"] for s in statements(page) if not s.get("node")].count("default") >= 4
    panel = strip_tags(panel_of(desk, page))
    assert f"helpdesk_00003 on {nodes[0]}" in panel
    assert "Connection: default" in panel


def test_a_shard_that_is_used_for_the_first_time(desk: Desk, other: Desk, nodes: Any) -> None:
    desk.client.get(desk.url())
    page = other.client.get(other.url())
    assert set(of_shards(page)) == {("helpdesk_00040", nodes[1])}


def test_a_query_of_all_shards(desk: Desk, other: Desk, nodes: Any) -> None:
    for user in (desk.agent.user, other.agent.user):
        Profile.objects.create(user=user, signature=f"The {user}")
    desk.client.force_login(User.objects.create_superuser("boss"))
    page = desk.client.get(reverse("admin:helpdesk_profile_changelist"))
    assert "The agent of Globex" in page.content.decode()
    assert {node for _, node in of_shards(page)} == set(nodes)
    for node in nodes:
        assert f" on {node}" in strip_tags(panel_of(desk, page))


def test_each_request_has_its_own_statements(desk: Desk) -> None:
    page = desk.client.get(desk.url())
    desk.case()
    again = desk.client.get(desk.url())
    # No cases: they are counted. One case: it is counted and read, with its tags.
    assert (len(of_shards(page)), len(of_shards(again))) == (1, 3)


@pytest.mark.parametrize("button", ["sql_select", "sql_explain"])
def test_buttons_repeat_a_statement_on_its_shard(desk: Desk, button: str) -> None:
    desk.case()
    page = desk.client.get(desk.url())
    (form, *_) = [
        html.unescape(signed)
        for signed, label in re.findall(
            r'name="signed" value="([^"]+)".*?Connection:</strong> ([^<]+)',
            panel_of(desk, page),
            re.DOTALL,
        )
        if label.startswith("helpdesk_00003")
    ]
    answer = desk.client.post(f"/__debug__/{button}/", {"signed": form})
    assert answer.status_code == 200
    assert "helpdesk_00003" in answer.json()["content"]


def test_an_asgi_request(desk: Desk, nodes: Any) -> None:
    desk.case()
    client = AsyncClient()
    async_to_sync(client.aforce_login)(desk.agent.user)
    page = async_to_sync(client.get)(desk.url())
    assert of_shards(page) == [("helpdesk_00003", nodes[0])] * 3
    assert connections["helpdesk"].execute_wrappers == []
