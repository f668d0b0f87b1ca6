"""A process of the site whose tables are imported: ``python -m …project FILE COMMAND…``.

FILE is a JSON file with the settings. COMMAND is ``manage.py ARGUMENT…``, or ``run CODE``.

``KILL_AT`` in the environment names a point where the process kills itself with SIGKILL, such as
``insert:3``: in the middle of its third INSERT on shards, whose transaction is still open; or
``stored:3``, ``done:3``, ``planned:1``, ``round:1``: when it has committed rows for the third time,
marked a third unit as done, planned its first round, or recorded the results of its first round. A
dotted path of a method stands for the end of a call of it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


def configure(content: dict[str, Any]) -> None:
    import django
    from django.conf import settings

    from sharded_orm.topology.aliases import sharded_databases

    settings.configure(
        INSTALLED_APPS=[
            "sharded_orm",
            "django.contrib.contenttypes",
            "tests.integration.imports.library",
        ],
        DATABASES=sharded_databases(content["databases"]),
        DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        SHARDED_ORM=content["sharded_orm"],
        CACHES=content.get("caches")
        or {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}},
        LOGGING_CONFIG=None,
        USE_TZ=True,
        TIME_ZONE="UTC",
        SILENCED_SYSTEM_CHECKS=["sharded_orm.W005", "sharded_orm.W011", "sharded_orm.W030"],
    )
    django.setup()


def prepare(file: str) -> None:
    """Set Django up, and import the commands, so that forks of this process need not."""
    from django.core.management import load_command_class
    from django.db import connections

    from sharded_orm import runtime

    sys.argv = ["run"]
    configure(json.loads(Path(file).read_text()))
    for command in ("keys", "shards", "topology"):
        load_command_class("sharded_orm", command)
    runtime._stop()  # A fork watches the topology by itself.
    connections.close_all()


def begin(file: str, arguments: list[str]) -> None:
    """Set Django up for a command, or do what is left of that in a prepared process."""
    from django.conf import settings

    sys.argv = arguments  # The library looks at the command while Django is set up.
    if not settings.configured:
        configure(json.loads(Path(file).read_text()))
        return
    from sharded_orm import runtime

    runtime.refresh()
    runtime.validate()
    settings.DATABASES.expose(arguments[1:])


def die_at(where: str) -> None:
    """Have this process kill itself at that point."""
    from django.utils.module_loading import import_string

    from sharded_orm.operations.imports.row_copy import _CopyJob
    from sharded_orm.operations.imports.shard_tables import ShardTable
    from sharded_orm.operations.runs.farm import Farm
    from sharded_orm.operations.runs.work_units import WorkUnit

    what, _, number = where.partition(":")
    owner: Any
    known = {
        "insert": (ShardTable, "_insert_batch"),
        "stored": (ShardTable, "store"),
        "done": (WorkUnit, "mark_done"),
        "planned": (Farm, "_plan"),
        "round": (_CopyJob, "end_round"),
    }
    path, _, method_name = what.rpartition(".")
    owner, name = known[what] if what in known else (import_string(path), method_name)
    method, calls = getattr(owner, name), iter(range(1, sys.maxsize))

    def dying(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if next(calls) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)


def main() -> None:
    file, command, *arguments = sys.argv[1:]
    begin(file, [command, *arguments])
    if "KILL_AT" in os.environ:
        die_at(os.environ["KILL_AT"])
    if command == "run":
        exec(arguments[0], {"__name__": "program"})
        return
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
