"""Processes that generate timestamped ids for one shard at the same instant.

Imports no model: such a process configures Django first.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.patience import PATIENCE
from tests.python_process import CONTEXT

NOW = 200_000_000_000
ROWS = 30


class Time:
    """A clock that advances only when somebody sleeps."""

    def __init__(self, layout: Any) -> None:
        self._start = self._now = layout.epoch_milliseconds + NOW

    def set(self, milliseconds: int) -> None:
        self._now = self._start + milliseconds

    def now(self) -> int:
        return int(self._now)

    def wait(self, seconds: float) -> None:
        self._now += 1


def _configure(sharded_orm: dict[str, Any]) -> None:
    import django
    from django.conf import settings

    from sharded_orm.topology.aliases import sharded_databases

    settings.configure(
        INSTALLED_APPS=["django.contrib.contenttypes", "sharded_orm", "tests.photos"],
        DATABASES=sharded_databases(
            {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
        ),
        DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        SHARDED_ORM=sharded_orm,
        USE_TZ=True,
    )
    django.setup()


def _insert(settings: Any, name: str, guarded: bool, barrier: Any, answers: Any) -> None:
    _configure(settings)
    from sharded_orm.ids.timestamps import TimestampClock
    from tests.photos.models import Visit

    field: Any = Visit._meta.get_field("id")
    time = Time(field.layout)
    again = 0
    taken = field._taken

    def look(rows: Any, alias: str) -> Any:
        nonlocal again
        existing = taken(rows, alias) if guarded else []
        again += len(existing)
        return existing

    field._taken = look
    visits = Visit.objects.using("visits_00001")
    ids: list[int] = []
    error = ""
    # The same clock and the same random draw in both, so every round begins with equal ids.
    for number in range(ROWS):
        draw = partial(min, number)
        time.set(10 * number)
        field.__dict__["clock"] = TimestampClock(
            field.layout, clock=time.now, wait=time.wait, draw=draw
        )
        barrier.wait(timeout=PATIENCE)
        try:
            if number % 2:
                ids.append(visits.create(page=f"{name} {number}").pk)
            else:
                rows = [Visit(page=f"{name} {number} {n}") for n in range(5)]
                ids += [row.pk for row in visits.bulk_create(rows)]
        except Exception as exc:  # the parent asserts which error it is
            error = repr(exc)
    answers.put({"ids": ids, "error": error, "again": again})


def race(group: Any, *, guarded: bool) -> list[dict[str, Any]]:
    """Run two processes on the test shards of ``group`` and return the rows that each reports."""
    from django.conf import settings

    configured = settings.SHARDED_ORM["GROUPS"][group.name]
    sharded_orm = {
        "NODES": settings.SHARDED_ORM["NODES"],
        "GROUPS": {group.name: {**configured, "DATABASE_NAME": group.database_name}},
    }
    barrier, answers = CONTEXT.Barrier(2), CONTEXT.Queue()
    racers = [
        CONTEXT.Process(target=_insert, args=(sharded_orm, name, guarded, barrier, answers))
        for name in "ab"
    ]
    for racer in racers:
        racer.start()
    try:
        return [answers.get(timeout=PATIENCE) for _ in racers]
    finally:
        for racer in racers:
            racer.join(PATIENCE)
            racer.kill()
