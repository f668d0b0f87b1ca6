"""A process of a site with entities: ``python -m …project FILE COMMAND…``, as that of the imports."""

from __future__ import annotations

import os
from typing import Any

from tests.integration.imports.project import run_command, set_up
from tests.settings.base import MIDDLEWARE, TEMPLATES
from tests.site_settings import NO_SITE, import_commands


def configure(content: dict[str, Any]) -> None:
    set_up(
        content,
        "sharded_orm.contrib.entities",
        "django.contrib.contenttypes",
        "django.contrib.auth",
        "django.contrib.sessions",
        "django.contrib.messages",
        "django.contrib.admin",
        "tests.integration.entities.feeds",
        MIDDLEWARE=MIDDLEWARE,
        TEMPLATES=TEMPLATES,
        STATIC_URL="static/",
        SECRET_KEY="tests",
        ROOT_URLCONF="tests.integration.entities.urls",
    )
    if "REMEMBERED" in os.environ:
        # Processes learn new states of indexes sooner, so that tests need not wait.
        from sharded_orm.contrib.entities import index_build, index_states

        index_states.REMEMBERED = float(os.environ["REMEMBERED"])
        index_build.LEARNED_AFTER = 2 * index_states.REMEMBERED


def prepare() -> None:
    """Set Django up for processes that are forked from this one."""
    from django.core.management import load_command_class

    configure(NO_SITE)
    import_commands()
    load_command_class("sharded_orm.contrib.entities", "entities")


if __name__ == "__main__":
    run_command(configure)
