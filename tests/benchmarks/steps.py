"""The steps of one ``get()``, by Django and by a plan, and the processor time of each."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from django.db import connections
from django.db.models.query import MAX_GET_RESULTS

from sharded_orm import runtime
from sharded_orm.models.plans.plan import GET
from sharded_orm.models.querysets.plans import without_plans
from tests.benchmarks.models import Photo, Plain
from tests.benchmarks.report import Line
from tests.benchmarks.site import Site
from tests.benchmarks.timing import Rounds

CALLS = 100
LIMITS = (0, MAX_GET_RESULTS)
Step = Callable[[], object]


def steps_of_get(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Time the steps of ``get(user_id=, pk=)``, one after the other, and the whole."""
    user, pk = site.photo(7)
    alias = site.stock("photos_00007")
    for kind, whole, steps in (
        ("Django", *_of_django(user, pk, alias)),
        ("a plan", *_of_plan(user, pk)),
    ):
        times: dict[str, list[float]] = {}
        gc.disable()
        try:
            for _ in range(rounds.count * rounds.of(CALLS)):
                # One step after the other, as in a get(): code that has waited for the server finds
                # the processor's caches used by others, and takes twice the time.
                for name, seconds in (*_time(steps), *_time({"in all": whole})):
                    times.setdefault(name, []).append(seconds)
        finally:
            gc.enable()
        medians = {name: median(seconds) for name, seconds in times.items()}
        total = medians.pop("in all")
        rest = total - sum(medians.values())
        for name, seconds in {**medians, "all other code": rest, "in all": total}.items():
            yield Line(f"get() by {kind}: {name}", "", f"{seconds * 1e6:.1f} us of CPU")


def _of_django(user: int, pk: int, alias: str) -> tuple[Step, dict[str, Step]]:
    stock: Any = Plain.objects.using(alias)
    connection = connections[alias]

    def filtered() -> Any:
        return stock.filter(user_id=user, pk=pk)

    def limited() -> Any:
        rows = filtered().order_by()
        rows.query.set_limits(high=MAX_GET_RESULTS)
        return rows

    rows, built = filtered(), limited().query
    sql, parameters = built.get_compiler(using=alias).as_sql()

    def copy() -> None:
        rows._chain().order_by().query.set_limits(high=MAX_GET_RESULTS)

    def send() -> Any:
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            return cursor.fetchall()

    def instances() -> None:
        # A query that is empty after the WHERE was compiled would not be sent, so give it rows.
        compiler = built.get_compiler(using=alias)
        compiler.setup_query()
        columns = [column for column, _, _ in compiler.select]
        converters = compiler.get_converters(columns)
        names = [column.target.attname for column in columns]
        for row in compiler.apply_converters(fetched, converters):
            Plain.from_db(alias, names, row)

    fetched = send()
    return (
        lambda: stock.get(user_id=user, pk=pk),
        {
            "copy the queryset, resolve the conditions": filtered,
            "copy it twice more, for the order and the limit": copy,
            "compile the SQL": lambda: built.get_compiler(using=alias).as_sql(),
            "send it, take the answer": send,
            "converters and the instance": instances,
        },
    )


def _of_plan(user: int, pk: int) -> tuple[Step, dict[str, Step]]:
    named = {"user_id": user, "pk": pk}
    for _ in range(3):
        Photo.objects.get(**named)
    rows: Any = Photo.objects.get_queryset()
    recording = rows._recorded().filtered(named)
    plan, values = recording.shape.plans[GET], recording.values
    strategy = runtime.strategy("photos")

    def find() -> Any:
        shard = runtime.located("photos", strategy, user)
        assert shard is not None
        return connections[shard.alias]

    connection = find()

    def bind() -> Any:
        assert plan.fits(connection) and plan.accepts(values)
        return plan.statement(values, LIMITS, connection)

    sql = bind()

    def send() -> Any:
        if connection.read_rows is not None:
            return connection.read_rows(sql, values)
        with connection.cursor() as cursor:
            cursor.execute(sql, values)
            return cursor.fetchall()

    fetched = send()
    with without_plans():
        assert plan._results(fetched, connection, rows) == [Photo.objects.get(**named)]
    return (
        lambda: Photo.objects.get(**named),
        {
            "record the conditions": lambda: (
                Photo.objects.get_queryset()._recorded().filtered(named)
            ),
            "find the shard": find,
            "check the plan, bind the values": bind,
            "send it, take the answer": send,
            "converters and the instance": lambda: plan._results(fetched, connection, rows),
        },
    )


def _time(steps: dict[str, Step]) -> list[tuple[str, float]]:
    times = []
    for name, step in steps.items():
        began = time.process_time()
        step()
        times.append((name, time.process_time() - began))
    return times
