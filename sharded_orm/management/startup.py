"""Ends a management command with a short message if the configuration is wrong."""

from __future__ import annotations

import sys
from traceback import walk_stack

from django.core.management import BaseCommand, ManagementUtility


def starting_command() -> list[str] | None:
    """Return the program and the arguments of the management command that Django is starting.

    Return None if Django was set up for something else, such as a web server. The command line
    alone does not tell this: a test runner may have an argument that is also the name of a command.
    """
    for frame, _line in walk_stack(None):
        if frame.f_code is ManagementUtility.execute.__code__:
            return list(frame.f_locals["self"].argv)
    return None


def runs_without_topology(argv: list[str]) -> bool:
    """Return whether a command can run before the first topology is published.

    :param argv: the program and the arguments of the command, such as ``["manage.py", "help",
        "topology"]``.
    """
    arguments = argv[1:]
    lists_commands = arguments in (["help"], ["help", "--commands"], ["--help"], ["-h"])
    return lists_commands or arguments[:1] == ["topology"] or arguments[:2] == ["help", "topology"]


def end_command(error: Exception, argv: list[str]) -> None:
    """End the process with exit status 1, before it runs a management command.

    Prints only the message of ``error``. Without this function, Django would show a traceback. In
    two cases, the function does nothing: the command has the option ``--traceback``, or it is
    ``runserver`` without ``--noreload``, which waits until the code is corrected and starts again.

    :param argv: the program and the arguments of the command.
    """
    restarts = argv[1:2] == ["runserver"] and "--noreload" not in argv
    if not restarts and "--traceback" not in argv:
        command = BaseCommand(no_color="--no-color" in argv)
        command.stderr.write(f"CommandError: {error}")
        sys.exit(1)
