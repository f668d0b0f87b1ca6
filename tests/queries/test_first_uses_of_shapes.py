"""The first use of a shape: Django makes its calls once, and a plan is learned beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db.models import Q

from sharded_orm.models.querysets import first_recordings
from sharded_orm.models.querysets.plans import without_plans
from sharded_orm.models.sharding.query import ShardedQuery
from tests.queries.conftest import DATABASES, ONE
from tests.queries.twins import World
from tests.relatives.sharded.models import Agent, Item

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]


@pytest.fixture(autouse=True)
def no_shapes() -> None:
    first_recordings.forget()


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The conditions that were added to queries."""
    added: list[Any] = []
    add_q = ShardedQuery.add_q

    def count(self: Any, condition: Any, *args: Any) -> None:
        added.append(condition)
        add_q(self, condition, *args)

    monkeypatch.setattr(ShardedQuery, "add_q", count)
    return added


def test_a_condition_of_a_new_shape_is_added_once(items: World, added: list[Any]) -> None:
    rows = Item.objects.filter(owner_id=ONE, stars__gte=0).exclude(pk=-1)
    assert list(rows.order_by("stars", "-pk").values_list("pk", flat=True)[:2])
    assert len(added) == 2


def test_conditions_of_a_related_manager(items: World) -> None:
    for _ in range(3):
        rows = Agent(pk=ONE).items.filter(stars__gte=0)
        assert {row.owner_id for row in rows.order_by("pk")[:9]} == {ONE}


CALLS: dict[str, Callable[[Any], Any]] = {
    "order_by": lambda rows: rows.order_by("-stars", "pk"),
    "filter": lambda rows: rows.filter(stars__lt=9),
    "exclude": lambda rows: rows.exclude(stars=9),
    "a tree": lambda rows: rows.filter(Q(stars=9) | Q(pk__gt=0)),
    "only": lambda rows: rows.only("name", "pk"),
    "values": lambda rows: rows.values("pk", "name"),
    "all": lambda rows: rows.all(),
    "a slice": lambda rows: rows[:50],
}


_CONDITIONS_OR_ORDERS = {"order_by", "filter", "exclude", "a tree"}
PAIRS = [
    (name, later)
    for name in CALLS
    for later in CALLS
    # Django refuses these pairs.
    if (name != "a slice" or later not in _CONDITIONS_OR_ORDERS)
    and {name, later} != {"only", "values"}
]


@pytest.mark.parametrize(("name", "later"), PAIRS)
def test_a_query_that_is_changed_in_place_is_not_shared(
    name: str, later: str, items: World
) -> None:
    """``query`` gives a queryset its own query, though the calls before were made on one query."""

    def chain() -> tuple[Any, Any, Any]:
        first = Item.objects.filter(owner_id=ONE)
        second = CALLS[name](first)
        return first, second, CALLS[later](second)

    with without_plans():
        expected = [list(rows) for rows in chain()]
    for changed in range(3):
        first_recordings.forget()
        querysets = chain()
        querysets[changed].query.set_empty()
        for number, rows in enumerate(querysets):
            assert list(rows) == ([] if number == changed else expected[number]), number
