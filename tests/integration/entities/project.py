"""A process of a site with entities: ``python -m …project FILE COMMAND…``, as that of the imports."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.integration.imports.project import die_at
from tests.settings.base import MIDDLEWARE, TEMPLATES
from tests.site_settings import NO_SITE, import_commands, set_up_django


def configure(content: dict[str, Any]) -> None:
    from sharded_orm.topology.aliases import sharded_databases

    set_up_django(
        DATABASES=sharded_databases(content["databases"]),
        INSTALLED_APPS=[
            "sharded_orm",
            "sharded_orm.contrib.entities",
            "django.contrib.contenttypes",
            "django.contrib.auth",
            "django.contrib.sessions",
            "django.contrib.messages",
            "django.contrib.admin",
            "tests.integration.entities.feeds",
        ],
        MIDDLEWARE=MIDDLEWARE,
        TEMPLATES=TEMPLATES,
        STATIC_URL="static/",
        SECRET_KEY="tests",
        ROOT_URLCONF="tests.integration.entities.urls",
        DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        SHARDED_ORM=content["sharded_orm"],
        CACHES={"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}},
        LOGGING_CONFIG=None,
        USE_TZ=True,
        TIME_ZONE="UTC",
        SILENCED_SYSTEM_CHECKS=["sharded_orm.W030"],
    )


def prepare() -> None:
    """Set Django up for processes that are forked from this one."""

    from django.core.management import load_command_class

    configure(NO_SITE)
    import_commands()
    load_command_class("sharded_orm.contrib.entities", "entities")


def main() -> None:
    file, command, *arguments = sys.argv[1:]
    sys.argv = [command, *arguments]  # The library looks at the command while Django is set up.
    configure(json.loads(Path(file).read_text()))
    if "REMEMBERED" in os.environ:
        # Processes learn new states of indexes sooner, so that tests need not wait.
        from sharded_orm.contrib.entities import index_build, index_states

        index_states.REMEMBERED = float(os.environ["REMEMBERED"])
        index_build.LEARNED_AFTER = 2 * index_states.REMEMBERED
    if "KILL_AT" in os.environ:
        die_at(os.environ["KILL_AT"])
    if command == "run":
        exec(arguments[0], {"__name__": "program"})
        return
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
