"""A process of a site with reference tables: ``python -m …project FILE COMMAND…``, as that of the imports."""

from __future__ import annotations

from typing import Any

from tests.integration.imports.project import run_command, set_up
from tests.site_settings import NO_SITE, import_commands


def configure(content: dict[str, Any]) -> None:
    set_up(
        content,
        "sharded_orm.contrib.mirrors",
        "sharded_orm.contrib.references",
        "django.contrib.contenttypes",
        "tests.integration.references.geo",
    )


def prepare() -> None:
    """Set Django up for processes that are forked from this one."""
    from django.core.management import load_command_class

    configure(NO_SITE)
    import_commands()
    load_command_class("sharded_orm.contrib.mirrors", "mirrors")


if __name__ == "__main__":
    run_command(configure)
