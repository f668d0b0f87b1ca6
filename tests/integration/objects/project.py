"""A process of the gallery: ``python -m …project FILE COMMAND…``, as that of the imports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.site_settings import NO_SITE, import_commands, set_up_django


def configure(content: dict[str, Any]) -> None:
    from sharded_orm.topology.aliases import sharded_databases

    set_up_django(
        DATABASES=sharded_databases(content["databases"]),
        INSTALLED_APPS=[
            "sharded_orm",
            "sharded_orm.contrib.mirrors",
            "sharded_orm.contrib.objects",
            "django.contrib.contenttypes",
            "tests.integration.objects.gallery",
        ],
        DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        SHARDED_ORM=content["sharded_orm"],
        CACHES=content.get("caches")
        or {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}},
        LOGGING_CONFIG=None,
        USE_TZ=True,
        TIME_ZONE="UTC",
        SILENCED_SYSTEM_CHECKS=["sharded_orm.W030"],
    )


def prepare() -> None:
    """Set Django up for processes that are forked from this one."""
    configure(NO_SITE)
    import_commands()


def main() -> None:
    file, command, *arguments = sys.argv[1:]
    sys.argv = [command, *arguments]  # The library looks at the command while Django is set up.
    configure(json.loads(Path(file).read_text()))
    if command == "run":
        exec(arguments[0], {"__name__": "program"})
        return
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
