"""Processes that place the same keys at the same time; imported by each of them.

Imports no model: such a process configures Django first.
"""

from __future__ import annotations

from typing import Any

from tests.patience import PATIENCE
from tests.python_process import CONTEXT

PROCESSES, KEYS = 4, 60


def configure(settings: dict[str, Any]) -> None:
    import django
    from django.conf import settings as django_settings

    from sharded_orm.topology.aliases import sharded_databases

    django_settings.configure(
        INSTALLED_APPS=["django.contrib.contenttypes", "sharded_orm"],
        DATABASES=sharded_databases({"default": settings["default"]}),
        DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        SHARDED_ORM=settings["sharded_orm"],
        USE_TZ=True,
    )
    django.setup()


def _migrate(settings: dict[str, Any]) -> None:
    configure(settings)
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def _place(settings: dict[str, Any], barrier: Any, answers: Any) -> None:
    configure(settings)
    from sharded_orm import runtime

    strategy = runtime.strategy("photos")
    placed = {}
    for key in range(KEYS):
        # All processes wait for each other before each key, so that every key is a race.
        barrier.wait(timeout=PATIENCE)
        placed[key] = strategy.place(key)
    answers.put(placed)


def race(settings: dict[str, Any]) -> list[dict[int, int]]:
    setup = CONTEXT.Process(target=_migrate, args=(settings,))
    setup.start()
    setup.join(PATIENCE)
    assert setup.exitcode == 0
    barrier, answers = CONTEXT.Barrier(PROCESSES), CONTEXT.Queue()
    racers = [
        CONTEXT.Process(target=_place, args=(settings, barrier, answers)) for _ in range(PROCESSES)
    ]
    for racer in racers:
        racer.start()
    try:
        return [answers.get(timeout=PATIENCE) for _ in racers]
    finally:
        for racer in racers:
            racer.join(PATIENCE)
            racer.kill()
