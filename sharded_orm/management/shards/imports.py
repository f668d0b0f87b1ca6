"""The action ``import`` of ``manage.py shards``."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Sequence
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser

from sharded_orm.exceptions import ImportRefused
from sharded_orm.management.actions import Action, problems_error
from sharded_orm.management.progress import ShardProgress
from sharded_orm.management.stop_signals import stop_signals
from sharded_orm.management.tables import write_table
from sharded_orm.operations import imports
from sharded_orm.operations.imports.request import ROWS


class Import(Action):
    name = "import"
    help = (
        "Copy the rows of unsharded tables to the shards of their keys, again and again until nothing"
        " new turns up. The source is only read. After an interruption, run the command again to go"
        " on. The same command on several machines shares the work."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "models",
            nargs="+",
            metavar="MODEL",
            help="Such as photos.Photo. Automatic many-to-many tables come along.",
        )
        parser.add_argument(
            "--from",
            dest="source",
            required=True,
            metavar="ALIAS",
            help="The alias of the database with the tables, such as default.",
        )
        modes = parser.add_mutually_exclusive_group()
        modes.add_argument(
            "--dry-run",
            action="store_true",
            help="Only check what must hold, and show what would be copied.",
        )
        modes.add_argument(
            "--verify",
            action="store_true",
            help="Do not copy: compare all rows on both sides; exit status 1 if some differ.",
        )
        modes.add_argument(
            "--update",
            action="store_true",
            help="Give rows that differ on their shard the values of the source. Only while nobody"
            " writes to the shards.",
        )
        parser.add_argument(
            "--workers",
            type=_positive,
            default=1,
            metavar="N",
            help="Work in N threads. Default: %(default)s",
        )
        parser.add_argument(
            "--rows",
            type=_positive,
            default=ROWS,
            metavar="N",
            help="The number of rows that a worker takes at a time. Default: %(default)s",
        )
        parser.add_argument(
            "--rounds",
            type=_positive,
            default=10,
            metavar="N",
            help="Go through the tables N times at most. Default: %(default)s",
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        request = imports.ImportRequest.of_labels(
            options["models"],
            options["source"],
            update=options["update"],
            rows=options["rows"],
            rounds=options["rounds"],
        )
        if options["dry_run"]:
            self._show_plan(command, request, options)
            return
        execute = imports.compare_rows if options["verify"] else imports.copy_rows
        progress = ShardProgress(
            command, options["verbosity"], bar=not options["json"], unit="ranges"
        )
        with stop_signals() as stopping:
            try:
                report = execute(request, options["workers"], progress, stopping)
            finally:
                progress.end()
        if options["json"]:
            command.stdout.write(json.dumps(report.to_json(), indent=2))
        else:
            self._show(command, report)
        if not report.ok:
            problems = list(report.problems)
            if report.stopped:
                problems.append(f"{report.stopped}; ranges that are not done: {report.left}")
            if not report.finished:
                problems.append("the same command goes on from here")
            error = problems_error(problems)
            error.returncode = stopping.status
            raise error

    def _show(self, command: BaseCommand, report: imports.ImportReport) -> None:
        if report.tables:
            names = list(next(iter(report.tables.values())))
            write_table(
                command,
                ("table", *(f">{name}" for name in names)),
                [
                    (label, *(f"{counts[name]:,}" for name in names))
                    for label, counts in report.tables.items()
                ],
            )
        for note in report.notes:
            command.stdout.write(note)
        if report.ok:
            rounds = "1 round" if report.rounds == 1 else f"{report.rounds} rounds"
            command.stdout.write(command.style.SUCCESS(f"Done in {rounds}."))

    def _show_plan(
        self, command: BaseCommand, request: imports.ImportRequest, options: dict[str, Any]
    ) -> None:
        plan = imports.plan_import(request)
        if options["json"]:
            command.stdout.write(
                json.dumps(
                    {
                        "ok": not plan.problems,
                        "tables": dict(plan.tables),
                        "problems": plan.problems,
                        "left_out": plan.left_out,
                    },
                    indent=2,
                )
            )
        else:
            self._show_tables(command, plan.tables)
            if plan.left_out:
                command.stdout.write(
                    f"Not imported, but on {request.source!r}, too: {', '.join(plan.left_out)}"
                )
        if plan.problems:
            raise CommandError(str(ImportRefused(plan.problems)))

    def _show_tables(self, command: BaseCommand, tables: Sequence[tuple[str, int]]) -> None:
        rows = [(label, f"{count:,}") for label, count in tables]
        write_table(command, ("table", ">rows"), rows)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


ACTIONS: tuple[type[Action], ...] = (Import,)
