"""A process of the site whose tables are imported: ``python -m …project FILE COMMAND…``.

FILE is a JSON file with the settings. COMMAND is ``manage.py ARGUMENT…``, or ``run CODE``.

``KILL_AT`` in the environment names a point where the process kills itself with SIGKILL, such as
``insert:3``: in the middle of its third INSERT on shards, whose transaction is still open; or
``stored:3``, ``done:3``, ``planned:1``, ``round:1``: when it has committed rows for the third time,
marked a third unit as done, planned its first round, or recorded the results of its first round. A
dotted path of a method stands for the end of a call of it. ``STOP_AT`` likewise names a point where
the process sends itself SIGSTOP.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.site_settings import NO_SITE, import_commands, set_up_django


def set_up(content: dict[str, Any], *apps: str, silenced: Sequence[str] = (), **more: Any) -> None:
    """Set Django up with the settings of a site.

    :param content: the settings of the file.
    :param apps: the apps beside ``sharded_orm``.
    :param silenced: ids of system checks beside W030.
    :param more: further settings.
    """
    from sharded_orm.topology.aliases import sharded_databases

    set_up_django(
        DATABASES=sharded_databases(content["databases"]),
        INSTALLED_APPS=["sharded_orm", *apps],
        DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        SHARDED_ORM=content["sharded_orm"],
        CACHES=content.get("caches")
        or {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}},
        LOGGING_CONFIG=None,
        USE_TZ=True,
        TIME_ZONE="UTC",
        SILENCED_SYSTEM_CHECKS=[*silenced, "sharded_orm.W030"],
        **more,
    )
    from sharded_orm.operations.moves import runner

    # The processes share one clock, so a move need not wait for slower ones.
    runner.MARGIN = 0.05  # type: ignore[misc]


def configure(content: dict[str, Any]) -> None:
    set_up(
        content,
        "django.contrib.contenttypes",
        "tests.integration.imports.library",
        *content.get("apps", ()),
        silenced=["sharded_orm.W005", "sharded_orm.W011"],
    )


def prepare(*apps: str) -> None:
    """Set Django up for processes that are forked from this one.

    :param apps: further apps of the site.
    """
    configure({**NO_SITE, "apps": apps})
    import_commands()


def die_at(where: str, how: signal.Signals = signal.SIGKILL) -> None:
    """Have this process send itself a signal at that point."""
    from django.utils.module_loading import import_string

    from sharded_orm.operations.imports.row_copy import _CopyJob
    from sharded_orm.operations.imports.row_storage import ShardTable
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
            # One that is sent to the process may let this thread go on for a while.
            signal.pthread_kill(threading.get_ident(), how)
        return result

    setattr(owner, name, dying)


def run_command(configure: Callable[[dict[str, Any]], None]) -> None:
    """Do what the command line says, in a project that ``configure`` sets up."""
    file, command, *arguments = sys.argv[1:]
    sys.argv = [command, *arguments]  # The library looks at the command while Django is set up.
    configure(json.loads(Path(file).read_text()))
    if "KILL_AT" in os.environ:
        die_at(os.environ["KILL_AT"])
    if "STOP_AT" in os.environ:
        die_at(os.environ["STOP_AT"], signal.SIGSTOP)
    if command == "run":
        exec(arguments[0], {"__name__": "program"})
        return
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    run_command(configure)
