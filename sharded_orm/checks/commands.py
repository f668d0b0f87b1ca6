"""A system check of the library's commands, some of which override commands of Django.

The ids of the checks never change. All modules of ``sharded_orm.checks`` share one range of numbers.

==================  ==========================================================
``sharded_orm.W023``  another app's command hides one of this library
==================  ==========================================================
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.apps import apps
from django.core import checks
from django.core.management import (
    CommandError,
    find_commands,
    get_commands,
    load_command_class,
)

APP = "sharded_orm"


@checks.register(checks.Tags.commands)
def check_commands(**kwargs: Any) -> list[checks.CheckMessage]:
    """Warn if another app hides a command of this library.

    If two apps have a command of the same name, such as ``migrate``, Django runs the command of the
    app that comes first in ``INSTALLED_APPS``. There is no warning if that command is a subclass of
    the library's command.
    """
    app_by_command = get_commands()
    folder = Path(apps.get_app_config(APP).path) / "management"
    return [
        checks.Warning(
            f"'manage.py {name}' is the command of {app!r}, which does not know shards and hides that"
            f" of {APP!r}.",
            hint=f"List {APP!r} before {app!r} in INSTALLED_APPS, or derive that command from"
            f" {APP}.management.commands.{name}.Command.",
            id="sharded_orm.W023",
        )
        for name in sorted(find_commands(str(folder)))
        if (app := app_by_command[name]) != APP and not _derives_from_ours(name, app)
    ]


def _derives_from_ours(name: str, app: str) -> bool:
    """Whether the command ``name`` of ``app`` is a subclass of this library's command.

    Also True if this library's command cannot be loaded, because the app of Django that it needs is
    not installed.
    """
    try:
        ours = load_command_class(APP, name)
    except CommandError:
        return True
    return isinstance(load_command_class(app, name), type(ours))
