"""The action ``import`` of ``manage.py shards``: copy the rows of tables of one database to the shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser

from sharded_orm.management.actions import Action, problems_error
from sharded_orm.management.arguments import positive, positive_seconds
from sharded_orm.management.progress import ShardProgress
from sharded_orm.management.stop_signals import stop_signals
from sharded_orm.management.tables import write_table
from sharded_orm.operations import imports
from sharded_orm.operations.exceptions import ImportRefused
from sharded_orm.operations.imports import source_follower
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
        modes.add_argument(
            "--follow",
            action="store_true",
            help="After the rows, apply each later change of the source, deletes included, until the"
            " command is interrupted. Triggers on the source record the changes.",
        )
        modes.add_argument(
            "--switch",
            action="store_true",
            help="Follow the source until few changes are left. Then close its tables for writes, and"
            " apply the last changes.",
        )
        modes.add_argument(
            "--unfollow",
            action="store_true",
            help="Remove the triggers of --follow from the source, and open its tables for writes.",
        )
        parser.add_argument(
            "--until-current",
            action="store_true",
            help="With --follow: end as soon as no change is left.",
        )
        parser.add_argument(
            "--patience",
            type=positive_seconds,
            default=source_follower.PATIENCE,
            metavar="SECONDS",
            help="With --switch: how long to wait for open transactions on the source."
            " Default: %(default)s",
        )
        parser.add_argument(
            "--workers",
            type=positive,
            default=1,
            metavar="N",
            help="Work in N threads. Default: %(default)s",
        )
        parser.add_argument(
            "--rows",
            type=positive,
            default=ROWS,
            metavar="N",
            help="The number of rows that a worker takes at a time. Default: %(default)s",
        )
        parser.add_argument(
            "--rounds",
            type=positive,
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
        if options["until_current"] and not options["follow"]:
            raise CommandError("--until-current goes with --follow only.")
        if options["follow"] or options["switch"] or options["unfollow"]:
            self._follow(command, request, options)
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
        self._show_counts(command, report.tables)
        for note in report.notes:
            command.stdout.write(note)
        if report.ok:
            rounds = "1 round" if report.rounds == 1 else f"{report.rounds} rounds"
            command.stdout.write(command.style.SUCCESS(f"Done in {rounds}."))

    def _show_counts(self, command: BaseCommand, tables: dict[str, dict[str, int]]) -> None:
        if not tables:
            return
        names = list(next(iter(tables.values())))
        rows = [
            (label, *(f"{counts[name]:,}" for name in names)) for label, counts in tables.items()
        ]
        write_table(command, ("table", *(f">{name}" for name in names)), rows)

    def _follow(
        self, command: BaseCommand, request: imports.ImportRequest, options: dict[str, Any]
    ) -> None:
        progress = ShardProgress(
            command, options["verbosity"], bar=not options["json"], unit="ranges"
        )

        def tell(line: str) -> None:
            if options["verbosity"]:
                command.stderr.write(line, style_func=str)

        with stop_signals() as stopping:
            work = (request, options["workers"], progress, stopping, tell)
            try:
                if options["unfollow"]:
                    report = imports.unfollow_source(request)
                elif options["switch"]:
                    report = imports.switch_source(*work, patience=options["patience"])
                else:
                    until_current = options["until_current"]
                    report = imports.follow_source(*work, until_current=until_current)
            finally:
                progress.end()
        if options["json"]:
            command.stdout.write(json.dumps(report.to_json(), indent=2))
        else:
            self._show_following(command, request, report, options)
        if not report.ok:
            problems = list(report.problems)
            if report.stopped:
                problems += [report.stopped, "the same command goes on from here"]
            error = problems_error(problems)
            error.returncode = stopping.status
            raise error

    def _show_following(
        self,
        command: BaseCommand,
        request: imports.ImportRequest,
        report: imports.FollowReport,
        options: dict[str, Any],
    ) -> None:
        if options["unfollow"]:
            command.stdout.write(
                f"{request.source!r} is followed no more: its tables have no triggers of the import,"
                " and take writes."
            )
            return
        self._show_counts(command, report.tables)
        for note in report.notes:
            command.stdout.write(note)
        command.stdout.write(f"{report.applied:,} changes were applied.")
        if report.seconds is not None:
            command.stdout.write(
                f"{request.source!r} is closed for writes of these tables. The shards had all rows"
                f" {report.seconds:.1f} s after that."
            )

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


ACTIONS: tuple[type[Action], ...] = (Import,)
