"""The actions ``create``, ``sql`` and ``run`` of ``manage.py shards``: create schemas, open an SQL
shell on a shard, and run commands on shards.
"""

from __future__ import annotations

import threading
from argparse import ArgumentTypeError
from typing import Any

from django.core.management import BaseCommand, CommandError, call_command
from django.core.management.base import CommandParser
from django.db import connections

from sharded_orm import runtime
from sharded_orm.management.actions import Action
from sharded_orm.management.progress import ShardProgress
from sharded_orm.management.selection import add_selection, selection_of
from sharded_orm.operations.shards import command_runner
from sharded_orm.operations.shards.creation import create
from sharded_orm.operations.shards.fleet_status import aliases_text
from sharded_orm.topology.model import Shard


class Create(Action):
    name = "create"
    help = "Create the schemas of shards that do not exist yet, empty. Existing ones stay."

    def add_arguments(self, parser: CommandParser) -> None:
        add_selection(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        shards = [shard for part in selection_of(options) for shard in part.shards]

        progress = ShardProgress(command, options["verbosity"])
        # create() calls report() in several threads, and ShardProgress is not thread-safe.
        lock = threading.Lock()

        def report(shard: Shard, is_new: bool) -> None:
            with lock:
                progress.done(shard.alias, "made" if is_new else "was there")

        progress.begin("shards", len(shards))
        try:
            result = create(shards, progress=report)
        finally:
            progress.end()
        command.stdout.write(f"{len(result.made)} made, {result.existing} were there.")
        if result.made:
            command.stdout.write("Those are empty: run 'manage.py migrate_shards'.")
        for name, why in result.failures.items():
            command.stderr.write(command.style.ERROR(f"{name}: {why}"))
        if result.failures:
            raise CommandError(
                f"{len(shards) - len(result.made) - result.existing} of {len(shards)} shards could not"
                " be made. Run the command again when the cause is mended; the others are done."
            )


class SQL(Action):
    name = "sql"
    help = "Open the database's own shell in a shard, as dbshell does."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("shard", metavar="SHARD", help="Its alias, such as photos_00042.")
        parser.add_argument(
            "parameters", nargs="*", metavar="-- ARGUMENT", help="Arguments for the shell."
        )

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        alias = options["shard"]
        if runtime.topology().resolve(alias) is None:
            examples = [group.shard(0).alias for group in runtime.topology().groups.values()]
            raise CommandError(
                f"There is no shard {alias!r}; they are called {examples!r} and so on."
            )
        # If the shard does not exist, SQLite's shell would create its file. So connect first, which
        # raises an error in this case.
        connections[alias].ensure_connection()
        connections[alias].close()
        call_command("dbshell", "--", *options["parameters"], database=alias)


class RunAction(Action):
    name = "run"
    help = "Run a management command once for each of many shards."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "command_line",
            metavar="COMMAND",
            help="The command with its arguments, in quotes. It gets '--database ALIAS', unless it"
            " contains {alias}.",
        )
        add_selection(parser)
        parser.add_argument(
            "--parallel",
            type=_processes,
            default=1,
            metavar="N",
            help="Work in N processes. By default, one shard after the other in this process.",
        )

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        shards = [shard for part in selection_of(options) for shard in part.shards]
        parsed = command_runner.parse(options["command_line"])
        failures: dict[str, str] = {}
        for outcome in command_runner.run(parsed, shards, parallel=options["parallel"]):
            self._report(command, outcome, options["verbosity"])
            if outcome.error is not None:
                failures[outcome.alias] = outcome.error
        if failures:
            failing = [shard for shard in shards if shard.alias in failures]
            raise CommandError(
                f"{len(failures)} of {len(shards)} shards failed: {aliases_text(failing)}. The others are"
                " done."
            )
        command.stdout.write(command.style.SUCCESS(f"{len(shards)} shards are done."))

    def _report(
        self, command: BaseCommand, outcome: command_runner.Outcome, verbosity: int
    ) -> None:
        if verbosity or outcome.error is not None:
            state = "ok" if outcome.error is None else "FAILED"
            head = f"{outcome.alias}: {state} in {outcome.seconds:.2f} s"
            style = command.style.SUCCESS if outcome.error is None else command.style.ERROR
            command.stdout.write(style(head))
        for line in outcome.output.splitlines() if verbosity else ():
            command.stdout.write(f"  {line}")
        if outcome.error is not None:
            command.stderr.write(command.style.ERROR(f"{outcome.alias}: {outcome.error}"))


ACTIONS: tuple[type[Action], ...] = (Create, SQL, RunAction)


def _processes(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise ArgumentTypeError(f"{text!r} is no number of processes")
    return int(text)
