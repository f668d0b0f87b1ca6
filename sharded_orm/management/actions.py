"""Base classes of commands that have several actions, such as ``manage.py shards status``."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from argparse import SUPPRESS
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser
from django.db import Error

from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.management.error_text import error_text


class Action(ABC):
    """One action of a management command, such as ``status`` in ``manage.py shards status``.

    Each action also has Django's general options, such as ``--verbosity``.
    """

    name: ClassVar[str]
    help: ClassVar[str]

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the arguments of this action to ``parser``; none unless overridden."""
        return

    @abstractmethod
    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        """Execute the action.

        :param command: the running command; gives access to the output streams and styles.
        :param options: the parsed options of the command line.
        :raises CommandError: the action has failed, or has found a problem. The exit status is then
            1, unless the error has another ``returncode``.
        """


class CommandOfActions(BaseCommand):
    """A command whose first argument is the name of one of its :attr:`actions`."""

    actions: ClassVar[tuple[type[Action], ...]]

    def add_arguments(self, parser: CommandParser) -> None:
        commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        for action in self.actions:
            action().add_arguments(add_action(commands, action.name, action.help))

    def run_from_argv(self, argv: list[str]) -> None:
        try:
            super().run_from_argv(argv)
        except KeyboardInterrupt:
            if "--traceback" in argv:
                raise
            self.stderr.write(
                "Interrupted. 'manage.py shards status' names an operation that was broken off; the"
                " how-to guide of the command says how to go on."
            )
            # Python ends itself by SIGINT if nobody catches this error. So a shell script that runs
            # the command ends as well. Only leave out the traceback.
            sys.excepthook = lambda *exc_info: None
            raise

    def handle(self, **options: Any) -> None:
        (action_class,) = (action for action in self.actions if action.name == options["action"])
        try:
            action_class().run(self, options)
        except (ShardedOrmError, ImproperlyConfigured, Error) as exc:
            # With --traceback, Django also shows the original exception.
            raise CommandError(error_text(exc)) from exc


def add_action(commands: Any, name: str, text: str) -> CommandParser:
    """Add a subparser for the action ``name``, and return it.

    Django's general options, such as ``--verbosity``, may stand before or after the action's name
    on the command line.

    :param commands: the return value of ``add_subparsers()``.
    :param text: the help text.
    """
    parser: CommandParser = commands.add_parser(name, help=text, description=text)
    for option in ("--settings", "--pythonpath"):
        parser.add_argument(option, default=SUPPRESS, help=SUPPRESS)
    for option in ("--traceback", "--no-color", "--force-color"):
        parser.add_argument(option, action="store_true", default=SUPPRESS, help=SUPPRESS)
    parser.add_argument("-v", "--verbosity", type=int, default=SUPPRESS, help=SUPPRESS)
    return parser


def problems_error(texts: Iterable[str]) -> CommandError:
    """Return an error that lists ``texts``, the problems that a command has found, without
    repetition.
    """
    problems = list(dict.fromkeys(texts))
    if len(problems) == 1:
        return CommandError(problems[0])
    return CommandError(f"{len(problems)} problems:\n  - " + "\n  - ".join(problems))


def line_writer(command: BaseCommand, options: dict[str, Any]) -> Callable[[str], None]:
    """Return a function with which a command writes lines about its progress to standard error.

    With ``--verbosity 0``, the function does nothing.
    """

    def tell(line: str) -> None:
        if options["verbosity"]:
            command.stderr.write(line, style_func=lambda text: text)

    return tell
