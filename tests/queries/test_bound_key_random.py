"""Random programs: ``bound(owner_id=key)`` means the same as ``filter(owner_id=key)`` spelled out.

The programs run on shards under a bound key, and in one plain database with the conditions spelled
out. Results, errors and the rows afterwards must be equal.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from django.db.models import Count, Exists, F, Max, OuterRef, Prefetch, Q, Sum

from sharded_orm import bound
from tests.queries.conftest import DATABASES, NEAR, ONE, TWO
from tests.queries.twins import World, comparable_value, rolled_back

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]

PROGRAMS = 250
MODELS = ("Item", "Label", "Shelf")


class Program:
    """A random program, which is the same for each run.

    :param spelled: whether conditions on the key are spelled out, instead of bound.
    """

    def __init__(self, seed: int, key: int, *, spelled: bool) -> None:
        self.random = random.Random(seed)
        self.key = key
        self.spelled = spelled

    def rows(self, world: World, name: str) -> Any:
        objects = getattr(world.models, name).objects
        return objects.filter(owner_id=self.key) if self.spelled else objects.all()

    def values(self, **values: Any) -> dict[str, Any]:
        return {"owner_id": self.key, **values} if self.spelled else values

    def condition(self) -> Q:
        pick = self.random
        condition = pick.choice(
            [
                Q(stars__gt=pick.randrange(3)),
                Q(stars=pick.randrange(4)),
                Q(name__contains=str(pick.randrange(9))),
                Q(pk__in=[11, 21, 24, 101, 104, 105, 102]),
                Q(pk__lt=pick.choice([12, 24, 104])),
                Q(owner_id=self.key),
                Q(owner_id__in=[self.key]),
                ~Q(owner_id=pick.choice([ONE, TWO])),
                Q(posted_at__isnull=True),
            ]
        )
        if pick.random() < 0.3:
            condition = condition | self.condition()
        if pick.random() < 0.2:
            condition = ~condition
        return condition

    def build(self, world: World) -> Any:
        pick = self.random
        name = pick.choice(MODELS)
        rows = self.rows(world, name)
        for _ in range(pick.randrange(4)):
            step = pick.randrange(9)
            if step < 4:
                condition = self.condition()
                rows = rows.filter(condition) if step < 3 else rows.exclude(condition)
            elif step == 4 and name == "Item":
                rows = rows.filter(labels__in=self.rows(world, "Label").filter(self.condition()))
                rows = rows.distinct()
            elif step == 5 and name == "Item":
                shelves = self.rows(world, "Shelf").filter(pk=OuterRef("shelf"))
                rows = rows.filter(Exists(shelves.filter(self.condition())))
            elif step == 6 and name == "Item":
                rows = rows.select_related("shelf").prefetch_related(
                    Prefetch("labels", self.rows(world, "Label").filter(self.condition()))
                )
            elif step == 7:
                rows = rows.annotate(double=F("stars") * 2)
            else:
                rows = rows | self.rows(world, name).filter(self.condition())
        return rows.order_by(pick.choice(["name", "-pk"]))

    def run(self, world: World) -> Any:
        pick = self.random
        rows = self.build(world)
        model = rows.model
        number = pick.randrange(900, 950)
        ends: list[Callable[[], Any]] = [
            lambda: list(rows),
            lambda: [[row, list(row.labels.all())] for row in rows if hasattr(row, "labels")],
            lambda: (rows.count(), rows.exists()),
            lambda: rows.aggregate(n=Count("pk"), m=Max("stars"), s=Sum("stars")),
            lambda: list(rows.values("stars").annotate(n=Count("pk")).order_by("stars")),
            lambda: list(rows.values_list("name", flat=True)[1:3]),
            lambda: rows.in_bulk(),
            lambda: rows.in_bulk([11, 21, 101, 102, 103]),
            lambda: (rows.first(), rows.last()),
            lambda: rows.get(pk=pick.choice([11, 21, 101, 102])),
            lambda: list(rows.iterator(chunk_size=2)),
            lambda: sorted(
                rows.order_by().values_list("pk").union(self.rows(world, "Shelf").values_list("pk"))
            ),
            lambda: (
                self.rows(world, model.__name__)
                .filter(self.condition())
                .update(stars=F("stars") + 7)
            ),
            lambda: rows.order_by().update(name="new"),
            lambda: model.objects.create(**self.values(pk=number, name="x", **self.more(world, model))),
            lambda: model.objects.bulk_create(
                [model(**self.values(pk=number, name="x", **self.more(world, model)))]
            ),
            lambda: model.objects.get_or_create(
                **self.values(name=f"label {pick.randrange(21, 26)}"),
                defaults={"pk": number, **self.more(world, model)},
            ),
            lambda: model.objects.update_or_create(
                **self.values(name=f"item {pick.randrange(101, 106)}"),
                defaults={"stars": 9, **self.more(world, model)},
                create_defaults={"pk": number, **self.more(world, model)},
            ),
            lambda: rows.filter(pk__in=[21, 24, 25]).order_by().delete(),
            lambda: rows.bulk_update([*rows[:2]], ["stars"]),
        ]  # fmt: skip
        return pick.choice(ends)()

    def more(self, world: World, model: Any) -> dict[str, Any]:
        """Return the values that a new row of ``model`` needs besides its key and name."""
        return {"seller_id": TWO} if model is world.models.Item else {}


@pytest.mark.parametrize("key", [ONE, TWO, NEAR])
def test_a_bound_key_means_the_same_as_the_condition(worlds: tuple[World, World], key: int) -> None:
    plain, sharded = worlds
    results = refusals = 0
    for seed in range(PROGRAMS):
        outcomes = []
        for world, is_bound in ((plain, False), (sharded, True)):
            program = Program(seed, key, spelled=not is_bound)
            with rolled_back():
                try:
                    with bound(owner_id=key) if is_bound else nullcontext():
                        result = comparable_value(program.run(world))
                except Exception as exc:
                    result = type(exc).__name__
                outcomes.append((result, world.rows()))
        if outcomes[1][0] == "BoundKeyMismatch":
            # Two negations of a condition on TWO name this key.
            refusals += 1
            continue
        assert outcomes[0] == outcomes[1], f"key {key}, program {seed}"
        results += not isinstance(result, str)
    assert results > PROGRAMS * 0.6
    assert refusals < PROGRAMS * 0.1
