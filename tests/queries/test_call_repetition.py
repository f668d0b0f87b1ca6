"""Calls that are repeated with other numbers build what they build one after the other."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from sharded_orm import bound
from sharded_orm.models.querysets.call_repetition import repeat_calls
from sharded_orm.models.querysets.plans import without_plans
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from tests.queries.conftest import DATABASES, ONE, TWO
from tests.queries.twins import World
from tests.relatives.sharded.models import Item

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]


class Builder:
    """Builds querysets of items, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def rows(self, numbers: tuple[Any, ...], most: int = 10, queryset: Any = None) -> Any:
        queryset = Item.objects.all() if queryset is None else queryset
        return repeat_calls(queryset, "test", numbers, most, self.build)

    def build(self, items: Any, owner: Any, least: Any, pk: Any, stars: Any) -> Any:
        self.count += 1
        rows = items.filter(owner_id=owner).filter(pk__gte=least).exclude(pk__lte=pk, stars=stars)
        return rows.order_by("-pk").values_list("pk", "stars")


NUMBERS = [
    (ONE, 0, 1, 103),
    (TWO, 0, 2, 200),
    (ONE, 104, 1, 0),
    (ONE, 101, 3, 105),
    (ONE, 2**70, 1, 1),
]


@pytest.mark.parametrize("most", [1, 3])
def test_repeated_calls_send_the_same(items: World, most: int) -> None:
    def read(build: Any) -> Any:
        with CaptureQueriesContext(connections["photos"]) as sent:
            return list(build), [query["sql"] for query in sent]

    builder = Builder()
    for _ in range(3):
        for numbers in NUMBERS:
            expected = read(builder.build(Item.objects.all(), *numbers)[:most])
            assert read(builder.rows(numbers, most)) == expected
            with without_plans():
                assert list(builder.rows(numbers, most)) == expected[0]
    repeated = builder.rows(NUMBERS[0])
    former, builder.count = builder.count, 0
    assert former
    assert list(builder.rows(NUMBERS[1])) == list(builder.rows(NUMBERS[1]))
    assert builder.count == 0
    plain = builder.build(Item.objects.all(), *NUMBERS[0])[:10]
    assert str(repeated.query) == str(plain.query)
    assert list(repeated) == list(plain)


def test_other_values_and_querysets_are_built_by_each_call(items: World) -> None:
    builder = Builder()
    expected = list(builder.build(Item.objects.all(), *NUMBERS[0]))
    for _ in range(4):
        assert list(builder.rows(NUMBERS[0])) == expected
    builder.count = 0
    assert list(builder.rows((str(ONE), *NUMBERS[0][1:]))) == expected
    assert list(builder.rows(NUMBERS[0], queryset=Item.objects.filter(stars__lt=9))) == expected
    with bound(owner_id=ONE):
        assert list(builder.rows(NUMBERS[0])) == expected
    # A new kind of queryset is built once more, to look at its calls.
    assert builder.count == 4
    with pytest.raises(TypeError, match="slice"):
        builder.rows(NUMBERS[0], queryset=Item.objects.all()[:2])


def test_numbers_in_another_order_are_not_exchanged(items: World) -> None:
    """They happen to be equal when the calls are made for the first time."""

    def build(rows: Any, stars: int, owner: int) -> Any:
        return rows.filter(owner_id=owner, stars=stars)

    for stars, owner in ((1, 1), (2, 1), (1, 2), (3, ONE), (0, ONE)):
        rows = repeat_calls(Item.objects.all(), "exchanged", (stars, owner), 9, build)
        assert list(rows) == list(build(Item.objects.all(), stars, owner))


def test_a_queryset_of_a_project_sees_each_call(items: World) -> None:
    class Watched(ShardedQuerySet[Any]):
        def order_by(self, *names: Any) -> Any:
            seen.append(names)
            return super().order_by(*names)

    seen: list[Any] = []
    builder = Builder()
    for _ in range(4):
        list(builder.rows(NUMBERS[0], queryset=Watched(Item)))
    assert seen == [("-pk",)] * 4
