"""A process of the site that these tests promote and grow: ``python -m …project FILE COMMAND…``.

FILE is a JSON file with the settings. COMMAND is one of ``manage.py``, ``write FOLDER NUMBER
USERS``, or ``scatter FOLDER``.

``KILL_AT`` in the environment of a ``manage.py`` command names a point where the process kills
itself with SIGKILL: ``begin:waiting`` when it has entered this phase of a promotion,
``end:waiting`` when it is about to enter the next; ``before:migrate:1`` before the first shard is
migrated, ``after:change:2`` after the topology was changed for the second time. Any other method
is named by its path.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.site_settings import NO_SITE, import_commands, set_up_django


def configure(content: dict[str, Any]) -> None:
    from sharded_orm.topology.aliases import sharded_databases

    set_up_django(
        DATABASES=sharded_databases(content["databases"]),
        INSTALLED_APPS=[
            "django.contrib.contenttypes",
            "sharded_orm",
            "tests.integration.promotion.entries",
            *content.get("apps", ()),
        ],
        DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        SHARDED_ORM=content["sharded_orm"],
        CACHES=content.get("caches")
        or {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}},
        LOGGING_CONFIG=None,
        USE_TZ=True,
    )


def prepare(*apps: str) -> None:
    """Set Django up for processes that are forked from this one, with more names in INSTALLED_APPS."""
    configure({**NO_SITE, "apps": apps})
    import_commands()


def die_at(where: str, how: signal.Signals = signal.SIGKILL) -> None:
    """Have this process send itself a signal at that point."""
    side, what, *number = where.split(":")
    if side in ("begin", "end"):
        die_in_phase(side, what, how)
        return
    from django.utils.module_loading import import_string

    from sharded_orm.operations import topology
    from sharded_orm.operations.migrate import Migrator

    path, _, name = what.rpartition(".")
    owner: Any = import_string(path) if path else {"change": topology, "migrate": Migrator}[what]
    method, calls = getattr(owner, name), iter(range(1, sys.maxsize))

    def dying(*args: Any, **kwargs: Any) -> Any:
        call = next(calls)
        if (side, call) == ("before", int(number[0])):
            os.kill(os.getpid(), how)
        result = method(*args, **kwargs)
        if (side, call) == ("after", int(number[0])):
            os.kill(os.getpid(), how)
        return result

    setattr(owner, name, dying)


def die_in_phase(side: str, phase: str, how: signal.Signals) -> None:
    from sharded_orm.operations.runs.journal import JournalRun

    note = JournalRun.note

    def noting(run: JournalRun, **arguments: Any) -> None:
        before, after = run.arguments.get("phase"), arguments.get("phase")
        if side == "end" and before == phase and after != phase:
            os.kill(os.getpid(), how)
        note(run, **arguments)
        if side == "begin" and after == phase:
            os.kill(os.getpid(), how)

    JournalRun.note = noting  # type: ignore[method-assign]  # defines the point of a kill, in this process only


def write(folder: Path, number: int, users: int) -> None:
    """Write until the file ``stop`` exists; record the acknowledged rows, and each error."""
    from django.db import Error, connections, transaction

    from tests.integration.promotion.entries.models import Entry

    taken = number << 32
    with (
        open(folder / f"acknowledged-{number}", "w") as acknowledged,
        open(folder / f"errors-{number}", "w") as errors,
    ):
        while not (folder / "stop").exists():
            taken += 2
            user = taken // 2 % users
            try:
                if taken % 4:
                    Entry(entry_id=taken, user_id=user).save(force_insert=True)
                    done = [taken]
                else:
                    done = [taken, taken + 1]
                    with transaction.atomic(using="photos"):
                        for one in done:
                            Entry(entry_id=one, user_id=user).save(force_insert=True)
            except Error as exc:
                code = exc.args[0] if exc.args and isinstance(exc.args[0], int) else 0
                text = " ".join(str(exc).split())
                if not taken % 4:
                    text += " (in a transaction)"
                errors.write(f"{time.time()} {code} {type(exc).__name__} {text}\n")
                errors.flush()
            else:
                acknowledged.write("".join(f"{time.time()} {one}\n" for one in done))
                acknowledged.flush()
    connections.close_all()


def scatter(folder: Path) -> None:
    """Query all shards again and again, until the file ``stop`` exists; record their number."""
    from django.db import connections

    from sharded_orm import runtime
    from tests.integration.promotion.entries.models import Entry

    with open(folder / "scattered", "w") as counts:
        while not (folder / "stop").exists():
            shards = runtime.group("photos").count
            Entry.objects.scatter().count()
            counts.write(f"{shards}\n")
            counts.flush()
    connections.close_all()


def main() -> None:
    settings_file, command, *arguments = sys.argv[1:]
    # As manage.py does: the app checks which command runs.
    sys.argv = ["manage.py", command, *arguments]
    configure(json.loads(Path(settings_file).read_text()))
    if command == "write":
        write(Path(arguments[0]), int(arguments[1]), int(arguments[2]))
        return
    if command == "scatter":
        scatter(Path(arguments[0]))
        return
    if where := os.environ.get("KILL_AT"):
        die_at(where)
    if where := os.environ.get("STOP_AT"):
        die_at(where, signal.SIGSTOP)
    if seconds := os.environ.get("LOOK_UP"):
        from sharded_orm.operations.promotion import publication

        publication.LOOK_UP = float(seconds)
    if seconds := os.environ.get("PATIENCE"):
        from sharded_orm.operations.growth import growth_run

        growth_run.PATIENCE = float(seconds)
    from django.core.management import execute_from_command_line

    execute_from_command_line(["manage.py", command, *arguments])


if __name__ == "__main__":
    main()
