"""A process of the gallery: ``python -m …project FILE COMMAND…``, as that of the imports."""

from __future__ import annotations

from typing import Any

from tests.integration.imports.project import run_command, set_up
from tests.site_settings import NO_SITE, import_commands


def configure(content: dict[str, Any]) -> None:
    set_up(
        content,
        "sharded_orm.contrib.mirrors",
        "sharded_orm.contrib.objects",
        "django.contrib.contenttypes",
        "tests.integration.objects.gallery",
    )


def prepare() -> None:
    """Set Django up for processes that are forked from this one."""
    configure(NO_SITE)
    import_commands()


if __name__ == "__main__":
    run_command(configure)
