"""``through_defaults`` that no row of the many-to-many table can have: nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction
from django.db.models.signals import post_init

from sharded_orm.exceptions import CrossKeyRelation, CrossShardRelation, ShardKeyRequired
from tests.queries.conftest import DATABASES
from tests.twins.models import Desk, Dish, Meal, Serving

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(databases=DATABASES),
]

#: Keys of two shards, and one that shares the shard of the first.
ONE, TWO, NEAR = 1, 2, 9

CallOfManager = Callable[[Any, Any, dict[str, Any]], Any]

CALLS: dict[str, CallOfManager] = {
    "add": lambda rows, other, values: rows.add(other, through_defaults=values),
    "set": lambda rows, other, values: rows.set([other], through_defaults=values),
    "set, cleared first": lambda rows, other, values: rows.set(
        [other], clear=True, through_defaults=values
    ),
    "create": lambda rows, other, values: rows.create(id=50, through_defaults=values),
    "acreate": lambda rows, other, values: async_to_sync(create)(rows, values),
    "get_or_create": lambda rows, other, values: rows.get_or_create(id=50, through_defaults=values),
    "update_or_create": lambda rows, other, values: rows.update_or_create(
        id=50, through_defaults=values
    ),
}
VALUES: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception]]] = {
    "key of another shard": (lambda: {"owner": TWO}, CrossKeyRelation),
    "key of the same shard": (lambda: {"owner": NEAR}, CrossKeyRelation),
    "called key": (lambda: {"owner": lambda: TWO}, CrossKeyRelation),
    "no key": (lambda: {"owner": None}, ShardKeyRequired),
    "row of another shard": (lambda: {"desk": desk(TWO)}, CrossShardRelation),
    "row of another key": (lambda: {"desk": desk(NEAR)}, CrossKeyRelation),
    "called row": (lambda: {"desk": lambda: desk(TWO)}, CrossShardRelation),
}


async def create(rows: Any, values: dict[str, Any]) -> Any:
    return await rows.acreate(id=50, through_defaults=values)


def desk(key: int) -> Desk:
    return Desk.objects.get(owner=key)


@pytest.fixture
def meal(db: None) -> Meal:
    """A meal with one dish, beside another dish and desks of three keys."""
    for key in (ONE, TWO, NEAR):
        Desk.objects.create(id=key, owner=key)
    meal = Meal.objects.create(id=10, owner=ONE)
    dish = Dish.objects.create(id=20, owner=ONE)
    Dish.objects.create(id=21, owner=ONE)
    Meal.objects.create(id=11, owner=ONE)
    Serving.objects.create(id=30, owner=ONE, meal=meal, dish=dish)
    return meal


def rows() -> list[tuple[Any, ...]]:
    return [
        row
        for model in (Meal, Dish, Serving)
        for row in model.objects.scatter().order_by("pk").values_list()
    ]


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_written_before_a_refusal(meal: Meal, call: str, values: str) -> None:
    make, error = VALUES[values]
    before = rows()
    for manager, other in (
        (meal.dishes, Dish.objects.get(owner=ONE, pk=21)),
        (Dish.objects.get(owner=ONE, pk=20).meals, Meal.objects.get(owner=ONE, pk=11)),
    ):
        # A callable is called in the transaction of Django's method, which an error ends.
        alias = meal._state.db
        block = transaction.atomic(alias) if "called" in values else nullcontext()
        with pytest.raises(error), block:
            CALLS[call](manager, other, {"id": 40, **make()})
        assert rows() == before


@pytest.mark.parametrize("call", CALLS)
def test_values_of_the_key_are_stored(meal: Meal, call: str) -> None:
    other = Dish.objects.get(owner=ONE, pk=21)
    values = {"id": 40, "owner": ONE, "desk": lambda: desk(ONE)}
    CALLS[call](meal.dishes, other, values)
    serving = Serving.objects.get(owner=ONE, pk=40)
    assert (serving.meal_id, serving.desk_id) == (meal.pk, ONE)


def test_callables_are_not_called_without_a_new_row(meal: Meal) -> None:
    def refuse() -> int:
        raise AssertionError("There is no row that this value is for.")

    meal.dishes.add(through_defaults={"owner": refuse})
    values = {"owner": refuse, "desk": refuse}
    meal.dishes.set([20], through_defaults=values)
    meal.dishes.get_or_create(id=20, through_defaults=values)
    meal.dishes.update_or_create(id=20, through_defaults=values)
    meal.dishes.set([], through_defaults={"owner": refuse})
    assert not meal.dishes.exists()


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("call", ["add", "set"])
def test_values_that_no_row_gets_are_not_refused(meal: Meal, call: str, values: str) -> None:
    make, error = VALUES[values]
    before = rows()
    dish, other = (Dish.objects.get(owner=ONE, pk=pk) for pk in (20, 21))
    CALLS[call](meal.dishes, dish, make())
    CALLS[call](meal.dishes, dish.pk, make())
    CALLS[call](dish.meals, meal, make())
    assert rows() == before
    with pytest.raises(error), transaction.atomic(meal._state.db):
        meal.dishes.set([dish, other], through_defaults=make())
    with pytest.raises(error), transaction.atomic(meal._state.db):
        meal.dishes.set([dish], clear=True, through_defaults=make())
    assert rows() == before
    Serving.objects.create(id=31, owner=ONE, meal=meal, dish=other)
    meal.dishes.set([dish], through_defaults=make())
    assert rows() == before


@pytest.mark.parametrize("call", CALLS)
def test_callables_are_called_once(meal: Meal, call: str) -> None:
    called: list[int] = []
    other = Dish.objects.get(owner=ONE, pk=21)
    values = {"id": 40, "desk": lambda: called.append(1) or desk(ONE)}
    CALLS[call](meal.dishes, other, values)
    assert called == [1]
    assert Serving.objects.get(owner=ONE, pk=40).desk_id == ONE


@pytest.mark.parametrize("call", CALLS)
def test_the_check_makes_no_instance(meal: Meal, call: str) -> None:
    other = Dish.objects.get(owner=ONE, pk=21)
    made: list[Any] = []

    def note(instance: Any, **_: Any) -> None:
        made.append(instance)

    post_init.connect(note, sender=Serving)
    try:
        CALLS[call](meal.dishes, other, {"id": 40, "owner": ONE, "desk": desk(ONE)})
    finally:
        post_init.disconnect(note, sender=Serving)
    assert [row.pk for row in made if row.pk in (None, 40)] == [40]
