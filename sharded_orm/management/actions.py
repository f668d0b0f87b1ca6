"""Commands with actions: ``manage.py shards status``."""

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
    """One action of a command; its options are Django's and its own."""

    name: ClassVar[str]
    help: ClassVar[str]

    def add_arguments(self, parser: CommandParser) -> None:
        """Add what the action takes; by default nothing."""
        return

    @abstractmethod
    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        """Do it; ``command`` has the streams and styles to print with.

        :raises CommandError: it failed, or found something wrong; the status is 1.
        """


class CommandOfActions(BaseCommand):
    """A command whose first argument is the name of one of its :attr:`actions`."""

    actions: ClassVar[tuple[type[Action], ...]]

    def add_arguments(self, parser: CommandParser) -> None:
        commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        for action in self.actions:
            action().add_arguments(add_action(commands, action.name, action.help))

    def handle(self, **options: Any) -> None:
        (chosen,) = (action for action in self.actions if action.name == options["action"])
        try:
            chosen().run(self, options)
        except (ShardedOrmError, ImproperlyConfigured, Error) as exc:
            # Its message is for people; --traceback shows where it comes from.
            raise CommandError(str(exc)) from exc


def add_action(commands: Any, name: str, text: str) -> CommandParser:
    """The parser of one action, with Django's own options after its name as well as before it."""
    made: CommandParser = commands.add_parser(name, help=text, description=text)
    for option in ("--settings", "--pythonpath"):
        made.add_argument(option, default=SUPPRESS, help=SUPPRESS)
    for option in ("--traceback", "--no-color", "--force-color"):
        made.add_argument(option, action="store_true", default=SUPPRESS, help=SUPPRESS)
    made.add_argument("-v", "--verbosity", type=int, default=SUPPRESS, help=SUPPRESS)
    return made


def failed(found: Iterable[str]) -> CommandError:
    """The error of a command that found these problems; each is named once."""
    problems = list(dict.fromkeys(found))
    if len(problems) == 1:
        return CommandError(problems[0])
    return CommandError(f"{len(problems)} problems:\n  - " + "\n  - ".join(problems))


def teller(command: BaseCommand, options: dict[str, Any]) -> Callable[[str], None]:
    """Writes lines about what is done to standard error, unless nobody wants them."""

    def tell(line: str) -> None:
        if options["verbosity"]:
            command.stderr.write(line, style_func=lambda text: text)

    return tell
