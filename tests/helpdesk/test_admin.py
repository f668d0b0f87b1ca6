"""The admin of the helpdesk."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from tests.helpdesk.conftest import DATABASES, Desk
from tests.helpdesk.models import Case

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


@pytest.fixture
def boss(db: None) -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("boss"))
    return client


def url(page: str, *arguments: Any, **query: Any) -> str:
    return reverse(f"admin:helpdesk_case_{page}", args=arguments, query=query)


def test_add_a_case_with_a_message(boss: Client, desk: Desk, neighbour: Desk) -> None:
    page = boss.get(url("add", _key=desk.tenant.pk)).content.decode()
    assert f'<option value="{desk.tag.pk}">urgent<' in page
    data = {
        "tenant": desk.tenant.pk,
        "subject": "No paper",
        "status": "open",
        "priority": 1,
        "opened_at_0": "2026-01-01",
        "opened_at_1": "12:00",
        "assignee": desk.agent.pk,
        "tags": [desk.tag.pk],
        "messages-TOTAL_FORMS": 1,
        "messages-INITIAL_FORMS": 0,
        "messages-0-text": "Tray 2",
        "messages-0-author": desk.agent.pk,
    }
    answer = boss.post(url("add", _key=desk.tenant.pk), data)
    assert answer.status_code == 302, answer.context["adminform"].errors
    case = Case.objects.get(tenant=desk.tenant)
    assert (case.tags.get(), case.messages.get().text) == (desk.tag, "Tray 2")
    change = boss.get(url("change", f"{desk.tenant.pk}~{case.pk}"))
    assert "Tray 2" in change.content.decode()


def test_lists_of_one_tenant_and_of_all(
    boss: Client, desk: Desk, neighbour: Desk, other: Desk
) -> None:
    for owner in (desk, neighbour, other):
        owner.case(f"Of {owner.tenant}")
    everything = boss.get(url("changelist")).content.decode()
    assert all(f"Of {name}" in everything for name in ("Acme", "Initech", "Globex"))
    found = boss.get(url("changelist", q="Globex")).content.decode()
    assert "Of Globex" in found and "Of Acme" not in found
    one = boss.get(url("changelist", _key=desk.tenant.pk)).content.decode()
    assert "Of Acme" in one and "Of Initech" not in one


def test_action_on_rows_of_several_shards(boss: Client, desk: Desk, other: Desk) -> None:
    cases = [owner.case() for owner in (desk, other)]
    chosen = [f"{case.tenant_id}~{case.pk}" for case in cases]
    boss.post(url("changelist"), {"action": "close", "_selected_action": chosen})
    assert {owner.tenant.cases.get().status for owner in (desk, other)} == {"closed"}
