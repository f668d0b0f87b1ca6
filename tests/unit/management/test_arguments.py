"""The arguments of all commands of this package."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import get_commands, load_command_class


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of ``parser``, and of the parsers of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
        else:
            yield action


def _waits() -> Iterator[Any]:
    for name, app in get_commands().items():
        if isinstance(app, str) and app.startswith("sharded_orm"):
            parser = load_command_class(app, name).create_parser("manage.py", name)
            for action in _actions(parser):
                if action.metavar == "SECONDS":
                    yield pytest.param(action, id=f"{name} {action.option_strings[0]}")


@pytest.mark.parametrize("action", list(_waits()))
@pytest.mark.parametrize("text", ["nan", "-1", "1e30", "soon", ""])
def test_a_time_that_cannot_be_waited_is_refused(action: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="number"):
        action.type(text)
