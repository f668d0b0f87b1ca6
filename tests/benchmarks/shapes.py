"""The first uses of a shape of queries, before it has a plan, and the memory of many shapes."""

from __future__ import annotations

import gc
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice, permutations, product
from typing import Any

from sharded_orm.models.plans.kept_shapes import plan_uses
from sharded_orm.models.querysets import first_recordings
from sharded_orm.models.querysets.direct_plans import PlanQuerySet
from sharded_orm.models.querysets.plans import without_plans
from tests.benchmarks.models import Photo, Plain
from tests.benchmarks.report import Line, at_most
from tests.benchmarks.site import Site
from tests.benchmarks.timing import Rounds, compare

CALLS = 60
SHAPES = 10_000
COLUMNS = ("photo_id", "user_id", "title", "posted_at", "stars")
CONDITIONS = [
    f"{name}__{by}" for name in ("stars", "photo_id") for by in ("gt", "gte", "lt", "lte")
]
# The shapes whose memory is measured. Python traces memory slowly.
_MEASURED = 1000
# At least the calls in a turn of compare().
_USED_ONCE = 5
Shape = tuple[str, tuple[str, ...]]


def first_uses(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Time the first and the second read of shapes, and measure the memory of 10,000 shapes."""
    user, _ = site.photo(7)
    stock: Any = Plain.objects.using(site.stock("photos_00007"))
    direct: Any = PlanQuerySet(Plain).using(stock.db)
    shapes = _shapes()

    def read(rows: Any, shape: Shape) -> object:
        condition, order = shape
        return list(rows.filter(user_id=user, **{condition: 0}).order_by(*order)[:1])

    def plans_off(shape: Shape) -> object:
        with without_plans():
            return read(Photo.objects, shape)

    sides: list[tuple[str, str, Callable[[Shape], object], Callable[[Shape], object]]] = [
        ("", "plans off", lambda shape: read(Photo.objects, shape), plans_off),
        (
            ", not sharded", "the same of Django",
            lambda shape: read(direct, shape), lambda shape: read(stock, shape),
        ),
    ]  # fmt: skip
    for kind, against, ours, theirs in sides:
        first_recordings.forget()
        measured = compare(
            lambda ours=ours: ours(next(shapes)),
            lambda theirs=theirs: theirs(next(shapes)),
            rounds,
            number=CALLS,
        )
        yield at_most(1.15, f"first use of a shape{kind}", against, measured, of_cpu=True)
        used_once: deque[Shape] = deque()

        def use_once(ours: Callable[[Shape], object] = ours, used: Any = used_once) -> None:
            used.clear()
            for shape in islice(shapes, _USED_ONCE):
                ours(shape)
                used.append(shape)

        measured = compare(
            lambda ours=ours, used=used_once: ours(used.popleft()),
            lambda theirs=theirs, used=used_once: theirs(used.popleft()),
            rounds,
            number=CALLS,
            before=use_once,
        )
        yield at_most(2.0, f"second use of a shape{kind}", against, measured, of_cpu=True)
    yield _memory(lambda shape: read(Photo.objects, shape), rounds.of(_MEASURED))


def _memory(read: Callable[[Shape], object], count: int) -> Line:
    first_recordings.forget()
    gc.collect()
    tracemalloc.start()
    try:
        for shape in islice(_shapes(), count):
            for _ in range(2):  # The second read makes the plan.
                read(shape)
        gc.collect()
        size = tracemalloc.get_traced_memory()[0] / 1e6 * SHAPES / count
    finally:
        tracemalloc.stop()
    planned = sum(use.uses is not None for use in plan_uses())
    first_recordings.forget()
    return Line(
        f"memory of {SHAPES:,} shapes",
        "",
        f"{size:.0f} MB",
        "<= 60 MB",
        size <= 60,
        f"that of {planned:,} shapes with a plan, times {SHAPES / count:g}",
    )


def _shapes() -> Iterator[Shape]:
    """Yield different shapes of queries: a condition, and an order of all columns."""
    for condition, columns in product(CONDITIONS, permutations(COLUMNS)):
        for signs in product(("", "-"), repeat=len(columns)):
            order = tuple(sign + column for sign, column in zip(signs, columns, strict=True))
            yield condition, order
