"""A process of the fleet: ``python -m …project -m MODULE ARGUMENT…`` or ``… -c CODE ARGUMENT…``.

It does what ``python`` does with these arguments, with the settings that ``DJANGO_SETTINGS_MODULE``
names.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

from tests.site_settings import import_commands, set_up_django

SETTINGS = "tests.integration.shards.settings"


def set_up() -> None:
    settings = importlib.import_module(os.environ["DJANGO_SETTINGS_MODULE"])
    set_up_django(**{name: value for name, value in vars(settings).items() if name.isupper()})


def prepare(apps: str) -> None:
    """Set Django up for processes that are forked from this one.

    :param apps: ``FLEET_APPS`` of the processes.
    """
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": SETTINGS,
        "FLEET_APPS": apps,
        "FLEET_FOLDER": os.devnull,
    }
    sys.argv = ["django"]
    set_up()
    import_commands()
    del sys.modules[SETTINGS]  # A fork reads its own environment.


def main() -> None:
    option, program, *arguments = sys.argv[1:]
    sys.argv = [option, *arguments]
    set_up()
    if option == "-c":
        exec(program, {"__name__": "__main__"})
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
