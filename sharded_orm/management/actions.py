"""Commands with actions, such as ``manage.py shards status``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import SUPPRESS
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser
from django.db import Error

from sharded_orm.exceptions import ShardedOrmError


class Action(ABC):
    """One action of a command. It takes Django's options and its own."""

    name: ClassVar[str]
    help: ClassVar[str]

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the action's arguments; by default none."""
        return

    @abstractmethod
    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        """Carry out the action.

        :param command: has the streams and styles for the output.
        :raises CommandError: the action failed, or found a problem; the exit status is 1.
        """


class CommandOfActions(BaseCommand):
    """A command whose first argument is the name of one of its :attr:`actions`."""

    actions: ClassVar[tuple[type[Action], ...]]

    def add_arguments(self, parser: CommandParser) -> None:
        commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        for action in self.actions:
            action().add_arguments(add_action(commands, action.name, action.help))

    def handle(self, **options: Any) -> None:
        (action_class,) = (action for action in self.actions if action.name == options["action"])
        try:
            action_class().run(self, options)
        except (ShardedOrmError, ImproperlyConfigured, Error) as exc:
            # The message is for people; --traceback shows the origin.
            raise CommandError(str(exc)) from exc


def add_action(commands: Any, name: str, text: str) -> CommandParser:
    """Add the parser of an action. Django's own options may also follow the action's name."""
    parser: CommandParser = commands.add_parser(name, help=text, description=text)
    for option in ("--settings", "--pythonpath"):
        parser.add_argument(option, default=SUPPRESS, help=SUPPRESS)
    for option in ("--traceback", "--no-color", "--force-color"):
        parser.add_argument(option, action="store_true", default=SUPPRESS, help=SUPPRESS)
    parser.add_argument("-v", "--verbosity", type=int, default=SUPPRESS, help=SUPPRESS)
    return parser


def problems_error(texts: Iterable[str]) -> CommandError:
    """The error of a command that found problems, without duplicates."""
    problems = list(dict.fromkeys(texts))
    if len(problems) == 1:
        return CommandError(problems[0])
    return CommandError(f"{len(problems)} problems:\n  - " + "\n  - ".join(problems))


def line_writer(command: BaseCommand, options: dict[str, Any]) -> Callable[[str], None]:
    """A function that writes lines about the progress to standard error, unless verbosity is 0."""

    def tell(line: str) -> None:
        if options["verbosity"]:
            command.stderr.write(line, style_func=lambda text: text)

    return tell
