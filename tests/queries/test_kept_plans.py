"""A process keeps a limited number of shapes of queries, and says how often it used their plans."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sharded_orm.models.plans import kept_shapes
from sharded_orm.models.plans.plan import ROWS
from sharded_orm.models.plans.shapes import Shape
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


def orders(rows: Any = None) -> Iterator[Any]:
    """Yield some hundred querysets, each of a shape of its own. They have the conditions of ``rows``."""
    names = [field.attname for field in Item._meta.concrete_fields][:5]
    for order in itertools.permutations([*names, f"-{names[0]}"], 4):
        yield (Item.objects.filter(owner_id=ONE) if rows is None else rows).order_by(*order)


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


def test_shapes_below_a_dropped_shape_are_dropped_too(items: World) -> None:
    """A class of views keeps its queryset as long as the process lives."""
    rows: Any = Item.objects.filter(owner_id=ONE, stars__gte=1)
    shape = rows._recording.shape
    for _ in orders():
        pass
    assert shape not in kept_shapes._all_shapes()
    for _ in orders(rows):
        assert len(shape.children) <= LIMIT
    # The queryset can have plans all the same.
    for _ in range(3):
        list(rows.order_by("-stars"))
    assert shape.children["order_by", "-stars"].plans[ROWS].uses


def test_a_queryset_of_more_calls_than_python_can_recurse(monkeypatch: pytest.MonkeyPatch) -> None:
    depth = sys.getrecursionlimit()
    monkeypatch.setattr(kept_shapes, "MAX_SHAPES", depth)
    shape = Shape(Item, None)
    kept_shapes.add_root(shape)
    for _ in range(depth):
        longer = Shape(Item, None)
        shape.keep(("filter",), longer)
        shape = longer
    assert kept() == depth
    assert kept_shapes.has_room()
    assert kept() == 0


def test_a_log_handler_that_queries_the_database(items: World) -> None:
    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.extend(Item.objects.filter(owner_id=ONE, stars__lte=7).order_by("pk"))

    found: list[Item] = []
    reader = Reader()
    kept_shapes.logger.addHandler(reader)
    try:
        for queryset in orders():
            list(queryset)
    finally:
        kept_shapes.logger.removeHandler(reader)
    assert found
    assert kept() <= LIMIT


def test_plans_of_updates_are_dropped_while_an_update_learns(items: World) -> None:
    def change(stars: int) -> int:
        return Item.objects.filter(owner_id=ONE, pk=101).update(stars=stars)

    class Dropped(dict[Any, Any]):
        def __contains__(self, key: Any) -> bool:
            # What another thread does meanwhile.
            is_there = super().__contains__(key)
            shape.updates = {}
            return is_there

    shape: Any = Item.objects.filter(owner_id=ONE, pk=101)._recording.shape  # type: ignore[union-attr]
    for stars in (3, 4):
        assert change(stars) == 1
    shape.updates = Dropped.fromkeys(shape.updates)
    assert change(5) == 1


def test_a_process_says_how_often_it_used_its_plans(items: World) -> None:
    def read() -> dict[str, int | None]:
        list(Item.objects.filter(owner_id=ONE).order_by("-pk")[:2])
        Item.objects.filter(owner_id=ONE, stars=1).exists()
        return {use.reads: use.uses for use in plan_uses()}

    for _ in range(2):
        before = read()
    for _ in range(3):
        Item.objects.filter(owner_id=ONE, stars=1).exists()
        after = read()
    assert [(reads, after[reads] - (before.get(reads) or 0)) for reads in after] == [
        ("exists of Item by ['owner__exact', 'stars__exact'] in the order None", 6),
        ("rows of Item by ['owner__exact'] in the order ('-pk',)", 3),
    ]


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
