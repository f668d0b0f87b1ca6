"""A process keeps a limited number of shapes of queries, and says how often it used their plans."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sharded_orm.models.plans import kept_shapes
from sharded_orm.models.querysets import first_recordings
from sharded_orm.models.querysets.plans import plan_uses, without_plans
from tests.queries.conftest import DATABASES, ONE, TWO
from tests.queries.twins import World
from tests.relatives.sharded.models import Item, Note

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]

LIMIT = 60


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    first_recordings.forget()
    monkeypatch.setattr(kept_shapes, "MAX_SHAPES", LIMIT)
    yield
    first_recordings.forget()


def kept() -> int:
    return sum(1 for _ in kept_shapes._all_shapes()) - len(kept_shapes._roots)


def orders() -> Iterator[Any]:
    """Yield some hundred querysets, each of a shape of its own."""
    names = [field.attname for field in Item._meta.concrete_fields][:5]
    for order in itertools.permutations([*names, f"-{names[0]}"], 4):
        yield Item.objects.filter(owner_id=ONE).order_by(*order)


def test_shapes_in_use_outlive_those_that_are_read_once(
    items: World, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    def read() -> list[int]:
        return [row.pk for row in Item.objects.filter(owner_id=TWO, stars__gte=1).order_by("pk")]

    with without_plans():
        expected = read()
    caplog.set_level(logging.WARNING, "sharded_orm.plans")
    for _ in range(3):
        assert read() == expected
    for number, queryset in enumerate(orders()):
        assert list(queryset)
        assert kept() <= LIMIT
        if number % 10 == 0:
            assert read() == expected
    assert number > 4 * LIMIT
    # The shapes that were dropped have made room for a new one.
    notes = [Note.objects.filter(owner_id=ONE).count() for _ in range(3)]
    request.getfixturevalue("nothing_is_compiled")
    assert read() == expected
    assert Note.objects.filter(owner_id=ONE).count() == notes[0]
    assert len(caplog.messages) == 1 and "60 shapes" in caplog.text


def test_a_dropped_shape_is_learned_again(items: World, request: pytest.FixtureRequest) -> None:
    def change(stars: int) -> int:
        return Item.objects.filter(owner_id=ONE, pk=101).update(stars=stars)

    for stars in (3, 4, 5):
        assert change(stars) == 1
    for queryset in orders():
        assert list(queryset)
    for stars in (6, 7):
        assert change(stars) == 1
    request.getfixturevalue("nothing_is_compiled")
    assert change(8) == 1


def test_a_process_says_how_often_it_used_its_plans(items: World) -> None:
    for _ in range(5):
        list(Item.objects.filter(owner_id=ONE).order_by("-pk")[:2])
    for _ in range(4):
        Item.objects.filter(owner_id=ONE, stars=1).exists()
    used = {use.reads: use.uses for use in plan_uses()}
    assert used["rows of Item by ['owner__exact'] in the order ('-pk',)"] == 3
    assert used["exists of Item by ['owner__exact', 'stars__exact'] in the order None"] == 2
    assert [use.uses for use in plan_uses()] == [3, 2]


def test_threads_drop_shapes_while_others_read(items: World) -> None:
    with without_plans():
        expected = [[row.pk for row in queryset] for queryset in orders()]

    def build(_: int) -> list[str]:
        return [str(queryset.query) for queryset in orders()]

    def shapes(_: int) -> int:
        for queryset in orders():
            queryset.filter(stars=1)
        return kept()

    with ThreadPoolExecutor(4) as pool:
        texts = [pool.submit(build, number) for number in range(2)]
        counts = [pool.submit(shapes, number) for number in range(2)]
        assert texts[0].result() == texts[1].result()
        assert all(count.result() <= LIMIT + 4 for count in counts)
    assert [[row.pk for row in queryset] for queryset in orders()] == expected
