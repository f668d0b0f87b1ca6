"""Django REST framework: serializers, viewsets, a router, pages, the browsable API."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext

from sharded_orm.exceptions import ShardKeyRequired
from tests.helpdesk.conftest import DATABASES, Desk
from tests.helpdesk.models import Case, Message, Tag

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]
JSON = "application/json"


def test_create_read_change_delete(desk: Desk) -> None:
    data = {"subject": "No paper", "assignee": desk.agent.pk, "tags": [desk.tag.pk]}
    made = desk.client.post(desk.api("cases/"), data, JSON)
    assert made.status_code == 201, made.content
    case = Case.objects.get(tenant=desk.tenant, pk=made.json()["id"])
    assert (case.subject, case.assignee, case.tags.get()) == ("No paper", desk.agent, desk.tag)
    url = desk.api(f"cases/{case.pk}/")
    changed = desk.client.patch(url, {"status": "closed", "tags": []}, JSON)
    assert changed.json() == {**made.json(), "status": "closed", "tags": []}
    assert desk.client.get(url).json() == changed.json()
    assert desk.client.put(url, {"subject": "Paper", "tags": [desk.tag.pk]}, JSON).json() == {
        **made.json(),
        "status": "closed",
        "subject": "Paper",
    }
    assert desk.client.delete(url).status_code == 204
    assert desk.client.get(url).status_code == 404


def test_messages_and_tags_are_prefetched(desk: Desk) -> None:
    for number in range(3):
        case = desk.case(f"Case {number}")
        case.tags.add(desk.tag)
        Message.objects.create(tenant=desk.tenant, case=case, text="x", author=desk.agent)
    with CaptureQueriesContext(connections["helpdesk"]) as queries:
        page = desk.client.get(desk.api("cases/")).json()
    assert len(queries) == 3
    assert [len(case["messages"]) for case in page["results"]] == [1, 1, 1]
    assert page["results"][0]["tags"] == [desk.tag.pk]


@pytest.mark.parametrize("method", ["get", "patch", "delete"])
def test_rows_of_other_tenants_are_not_found(
    desk: Desk, neighbour: Desk, other: Desk, method: str
) -> None:
    for theirs in (neighbour.case(), other.case()):
        answer = getattr(desk.client, method)(desk.api(f"cases/{theirs.pk}/"), content_type=JSON)
        assert answer.status_code == 404
        assert Case.objects.filter(tenant=theirs.tenant, pk=theirs.pk).exists()


def test_tags_of_other_tenants_are_refused(desk: Desk, neighbour: Desk, other: Desk) -> None:
    for tag in (neighbour.tag, other.tag):
        made = desk.client.post(desk.api("cases/"), {"subject": "x", "tags": [tag.pk]}, JSON)
        assert made.status_code == 400
        assert f'Invalid pk "{tag.pk}"' in made.json()["tags"][0]


def test_cursor_pages_are_in_order_and_complete(desk: Desk, neighbour: Desk) -> None:
    neighbour.case()
    case = desk.case("Case 0")
    for number in range(1, 8):
        opened_at = case.opened_at + timedelta(minutes=-number)
        desk.case(f"Case {number}", opened_at=opened_at)
    expected = Case.objects.filter(tenant=desk.tenant).order_by("-opened_at", "-id")
    subjects: list[str] = []
    pages: list[dict[str, Any]] = [{"next": desk.api("cases/")}]
    while url := pages[-1]["next"]:
        pages.append(desk.client.get(url).json())
        subjects += [case["subject"] for case in pages[-1]["results"]]
    assert subjects == [case.subject for case in expected]
    assert desk.client.get(pages[-1]["previous"]).json()["results"] == pages[-2]["results"]


def test_search_and_order(desk: Desk, neighbour: Desk) -> None:
    neighbour.case("Paper everywhere")
    for subject, priority in [("No paper", 1), ("Printer on fire", 2), ("No toner", 3)]:
        case = desk.case(subject, priority=priority)
        Message.objects.create(tenant=desk.tenant, case=case, text=f"About paper {priority % 2}")
    page = desk.client.get(desk.api("search/?search=paper 1&limit=1&ordering=-opened_at")).json()
    assert (page["count"], [case["subject"] for case in page["results"]]) == (2, ["No toner"])
    page = desk.client.get(page["next"]).json()
    assert [case["subject"] for case in page["results"]] == ["No paper"]


def test_cases_of_all_tenants(desk: Desk, neighbour: Desk, other: Desk) -> None:
    cases = []
    for day, owner in enumerate([desk, neighbour, other, desk, other], 1):
        opened_at = datetime(2026, 1, day, tzinfo=UTC)
        cases.append(owner.case(f"Case {day}", opened_at=opened_at, priority=day % 2))
    assert desk.client.get("/api/staff/cases/").status_code == 403
    boss = Client()
    boss.force_login(User.objects.create_superuser("boss"))

    def subjects(url: str) -> list[str]:
        found = []
        while url:
            page = boss.get(url).json()
            found += [case["subject"] for case in page["results"]]
            url = page["next"]
        return found

    assert subjects("/api/staff/cases/") == [f"Case {day}" for day in (5, 4, 3, 2, 1)]
    assert subjects("/api/staff/cases/?priority=1") == ["Case 5", "Case 3", "Case 1"]
    one = boss.get(f"/api/staff/cases/{cases[2].pk}/").json()
    assert (one["subject"], one["tenant"]) == ("Case 3", other.tenant.pk)


def test_unique_together_is_a_field_error(desk: Desk, neighbour: Desk) -> None:
    def create(tenant: Any, name: str) -> Any:
        data = {"tenant": tenant.pk, "name": name}
        return desk.client.post(desk.api("tags/"), data, JSON)

    assert create(desk.tenant, "new").status_code == 201
    again = create(desk.tenant, "new")
    assert (again.status_code, again.json()) == (
        400,
        {"non_field_errors": ["The fields tenant, name must make a unique set."]},
    )
    assert Tag.objects.filter(tenant=neighbour.tenant).count() == 1


def test_browsable_api(desk: Desk, neighbour: Desk, other: Desk) -> None:
    neighbour.case("Secret")
    other.case("Secret")
    case = desk.case()
    for url in ("cases/", f"cases/{case.pk}/"):
        page = desk.client.get(desk.api(url), headers={"accept": "text/html"})
        html = page.content.decode()
        assert page.status_code == 200 and "Secret" not in html
        # The form offers the tag of this tenant only.
        assert re.findall(r'<option value="(\d+)" *>urgent<', html) == [str(desk.tag.pk)]
    assert desk.client.get(desk.api("tags/"), headers={"accept": "text/html"}).status_code == 200
    root = desk.client.get(desk.api(), headers={"accept": "text/html"})
    assert desk.api("cases/") in root.content.decode()


def test_a_viewset_that_names_no_tenant_is_refused(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.helpdesk.api import OfTenant

    monkeypatch.delattr(OfTenant, "get_queryset")
    with pytest.raises(ShardKeyRequired, match="sharded by 'tenant'"):
        desk.client.get(desk.api("tags/"))
