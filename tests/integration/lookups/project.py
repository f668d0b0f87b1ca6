"""A process of a site with lookups: ``python -m …project FILE COMMAND…``, as that of the imports."""

from __future__ import annotations

from typing import Any

from tests.integration.imports.project import run_command, set_up
from tests.site_settings import NO_SITE, import_commands


def configure(content: dict[str, Any]) -> None:
    set_up(
        content,
        "sharded_orm.contrib.lookups",
        "django.contrib.contenttypes",
        "tests.integration.lookups.guests",
    )
    from sharded_orm.contrib.lookups import states

    # A process that is forked has the name of a site without databases. With another name than at
    # its start, a process takes its database for that of a test run.
    states._NAME = content["databases"]["default"]["NAME"]


def prepare() -> None:
    """Set Django up for processes that are forked from this one."""
    from django.core.management import load_command_class

    configure({**NO_SITE, "databases": {"default": {"NAME": ""}}})
    import_commands()
    load_command_class("sharded_orm.contrib.lookups", "lookups")


if __name__ == "__main__":
    run_command(configure)
