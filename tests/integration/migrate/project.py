"""A command of the project in the working directory: ``python -m …project COMMAND…``, as ``django``.

Its processes are forked from one in which Django is set up without the app ``shop``, whose models
and migrations each project has for itself.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from tests.site_settings import NO_SITE, import_commands, set_up_django

_APPS = ["sharded_orm"]


def prepare() -> None:
    """Set Django up for processes that are forked from this one."""
    from sharded_orm.topology.aliases import sharded_databases

    set_up_django(
        SECRET_KEY="x",
        USE_TZ=True,
        INSTALLED_APPS=_APPS,
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        DATABASES=sharded_databases(NO_SITE["databases"]),
        DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
        SHARDED_ORM=NO_SITE["sharded_orm"],
    )
    import_commands()


def configure() -> None:
    module = importlib.import_module("settings")
    values: dict[str, Any] = {name: value for name, value in vars(module).items() if name.isupper()}
    installed = values.pop("INSTALLED_APPS")
    set_up_django(INSTALLED_APPS=_APPS, **values)
    from django.apps import AppConfig, apps
    from django.conf import settings

    settings.INSTALLED_APPS = installed
    # As Apps.populate() does.
    for name in installed[len(_APPS) :]:
        config = AppConfig.create(name)
        config.apps = apps
        apps.app_configs[config.label] = config
        config.import_models()
        apps.clear_cache()
        config.ready()


def main() -> None:
    import django
    from django.core.management import execute_from_command_line

    sys.argv[0] = str(Path(django.__file__).with_name("__main__.py"))
    configure()
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
