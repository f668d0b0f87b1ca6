"""django-filter, in a view and as a backend of the REST interface."""

from __future__ import annotations

import re

import pytest
from django.http import QueryDict
from django_filters import FilterSet

from sharded_orm.exceptions import CrossShardRelation, ShardKeyRequired
from tests.helpdesk.conftest import DATABASES, Desk
from tests.helpdesk.models import Case, Message, Tag

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


@pytest.fixture
def cases(desk: Desk, neighbour: Desk) -> None:
    neighbour.case("Secret", priority=2).tags.add(neighbour.tag)
    slow = Tag.objects.create(tenant=desk.tenant, name="slow")
    fire = desk.case("Fire", priority=3, assignee=desk.agent)
    fire.tags.add(desk.tag, slow)
    desk.case("Paper", priority=2, status="closed").tags.add(desk.tag)
    desk.case("Toner", priority=1)
    for text in ("It burns", "It still burns"):
        Message.objects.create(tenant=desk.tenant, case=fire, text=text)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", ["Fire", "Paper", "Toner"]),
        ("status=closed", ["Paper"]),
        ("priority__gte=2&order=priority", ["Paper", "Fire"]),
        ("tags={tag}", ["Fire", "Paper"]),
        ("tags={tag}&tags={slow}&order=-priority", ["Fire", "Paper"]),
        ("assignee={agent}", ["Fire"]),
        ("assignee__isnull=true", ["Paper", "Toner"]),
        ("text=still", ["Fire"]),
    ],
)
def test_view_and_rest(desk: Desk, cases: None, query: str, expected: list[str]) -> None:
    slow = Tag.objects.get(tenant=desk.tenant, name="slow").pk
    query = query.format(tag=desk.tag.pk, slow=slow, agent=desk.agent.pk)
    page = desk.client.get(desk.url(f"filter/?{query}")).content.decode()
    assert re.findall("<h2>(.*?)</h2>", page) == expected
    if "order" not in query:
        answer = desk.client.get(desk.api(f"search/?limit=10&{query}")).json()
        assert [case["subject"] for case in answer["results"]] == expected


def test_choices_are_those_of_the_tenant(desk: Desk, neighbour: Desk, cases: None) -> None:
    page = desk.client.get(desk.url("filter/")).content.decode()
    assert page.count(">urgent<") == page.count(">slow<") == 1
    answer = desk.client.get(desk.api(f"search/?tags={neighbour.tag.pk}"))
    assert (answer.status_code, list(answer.json())) == (400, ["tags"])


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [("tags", "1", ShardKeyRequired), ("tenant__name", "Acme", CrossShardRelation)],
)
def test_what_cannot_be_routed_is_refused(
    desk: Desk, field: str, value: str, error: type[Exception]
) -> None:
    class Unrouted(FilterSet):
        class Meta:
            model = Case
            fields = [field]

    mine = Case.objects.filter(tenant=desk.tenant)
    with pytest.raises(error):
        list(Unrouted(QueryDict(f"{field}={value}"), queryset=mine).qs)
