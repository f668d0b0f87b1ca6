"""Gives the option ``--database`` of Django's commands no default: without the option, its value is
None.
"""

from __future__ import annotations

from django.core.management.base import CommandParser


def make_optional(parser: CommandParser, help: str) -> None:
    """Change the default of the option ``--database`` from the alias ``default`` to None.

    :param help: the new help text of the option.
    """
    for action in parser._actions:
        if "--database" in action.option_strings:
            action.default, action.help = None, help
