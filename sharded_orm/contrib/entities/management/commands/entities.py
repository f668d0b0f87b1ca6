"""The command ``manage.py entities``, which runs the cleaner, and builds the indexes of stores."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser

from sharded_orm.contrib.entities import cleaner, index_build, status
from sharded_orm.contrib.entities.clean_report import CleanReport
from sharded_orm.contrib.entities.cleaner import ContinuousCleaner
from sharded_orm.contrib.entities.index import Index
from sharded_orm.management.actions import (
    Action,
    CommandOfActions,
    add_action,
    line_writer,
    problems_error,
)
from sharded_orm.management.arguments import not_negative, positive, seconds, share
from sharded_orm.management.connections import leave_broken_connections
from sharded_orm.management.stop_signals import stop_signals
from sharded_orm.management.tables import write_table

#: Seconds between two lines that report progress.
PROGRESS_INTERVAL = 10.0


class CleanEntities(Action):
    name = "clean"
    help = (
        "Write index rows that are missing and remove stale ones, until the command is stopped. Any"
        " number of cleaners may run and share the shards."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--once",
            action="store_true",
            help="One pass over marked entities of any age, and over the whole. Status 1 if something"
            " stays wrong.",
        )
        parser.add_argument(
            "--interval",
            type=seconds,
            default=0.25,
            metavar="SECONDS",
            help="Time between two looks for marked entities. Default: a quarter of a second.",
        )
        parser.add_argument(
            "--whole-every",
            type=seconds,
            default=3600.0,
            metavar="SECONDS",
            help="Pause between two passes over the whole. Default: an hour.",
        )
        parser.add_argument("--json", action="store_true", help="Print JSON, one object per line.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        with stop_signals() as stopping:
            if options["once"]:
                report = CleanReport()
                cleaner.clean_once(report, stopping)
                self._show(command, report, options)
                if stopping():
                    raise CommandError("Stopped.", returncode=stopping.status)
                if problems := [*report.problems, *report.damaged]:
                    raise problems_error(problems)
                return
            clean = ContinuousCleaner(options["interval"], options["whole_every"], stopping)
            told: set[str] = set()
            while not stopping():
                began = time.monotonic()
                report = clean.round()
                if report.settled or report.written or report.removed:
                    self._show(command, report, options)
                found = {*report.problems, *report.damaged}
                for problem in sorted(found - told):
                    command.stderr.write(problem)
                leave_broken_connections()
                told = found
                stopping.wait(options["interval"] - (time.monotonic() - began))
            clean.close()

    def _show(self, command: BaseCommand, report: CleanReport, options: dict[str, Any]) -> None:
        if options["json"]:
            command.stdout.write(json.dumps(asdict(report)))
        elif options["verbosity"]:
            skipped = f"; {report.skipped} times a shard was left to another cleaner"
            command.stdout.write(
                f"{report.settled} marked entities cleaned, {report.failed} failed;"
                f" {report.written} index rows written, {report.removed} removed;"
                f" {report.compared} compared{skipped if report.skipped else ''}."
            )


class BuildIndex(Action):
    name = "build"
    help = (
        "Write the rows of all entities while the site goes on, verify them, and let reads rely on the"
        " index. Run it when every process that puts entities has the declaration."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "names",
            nargs="+",
            metavar="NAME",
            help="Such as feed.index_user; a store for all of its.",
        )
        parser.add_argument(
            "--rate",
            type=positive,
            metavar="ROWS",
            help="The most entities or index rows per second. Default: no limit.",
        )
        parser.add_argument(
            "--share",
            type=share,
            default=index_build.SHARE,
            metavar="PART",
            help="The part of the time in which the build works, from 0 to 1. It waits for the rest, to"
            f" spare the site. Default: {index_build.SHARE}.",
        )

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        problems: list[str] = []
        for index in index_build.find_indexes(options["names"]):
            problems += self._build(command, index, options)
        if problems:
            raise problems_error(problems)

    def _build(self, command: BaseCommand, index: Index, options: dict[str, Any]) -> list[str]:
        tell = line_writer(command, options)
        told_at, told = time.monotonic(), ""
        with stop_signals() as stopping:
            report = index_build.BuildReport()
            steps = index_build.build(
                index,
                rate=options["rate"],
                share=options["share"],
                stopping=stopping,
                pause=stopping.wait,
            )
            for report in steps:
                if report.phase != told or time.monotonic() - told_at > PROGRESS_INTERVAL:
                    told_at, told = time.monotonic(), report.phase
                    tell(f"{index.label}: {report.phase}, {report.entities} entities so far")
            if stopping():
                raise CommandError(
                    "Stopped. Run the command again to go on.", returncode=stopping.status
                )
        for text in report.damaged:
            command.stderr.write(text)
        if report.is_served:
            command.stdout.write(
                f"{index.label} is served: {report.entities} entities, {report.written} rows written,"
                f" {report.removed} stale ones removed."
            )
        return [f"{index.label} is not served: {problem}" for problem in report.problems]


class DropIndex(Action):
    name = "drop"
    help = (
        "Have nobody read or write an index, and remove its rows. Then remove its declaration and its"
        " table: makemigrations and migrate_shards."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", metavar="NAME", help="Such as feed.index_user.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        tell, told_at = line_writer(command, options), time.monotonic()
        index = index_build.find_index(options["name"])
        with stop_signals() as stopping:
            removed = 0
            for removed in index_build.drop(index, stopping=stopping, pause=stopping.wait):
                if time.monotonic() - told_at > PROGRESS_INTERVAL:
                    told_at = time.monotonic()
                    tell(f"{index.label}: {removed} rows removed so far")
            if stopping():
                raise CommandError(
                    "Stopped. Run the command again to go on.", returncode=stopping.status
                )
        command.stdout.write(f"{index.label} is dropped: {removed} rows removed.")


class LookAfterIndexes(Action):
    name = "index"
    help = "Build an index while the site goes on, or drop one."
    actions = (BuildIndex, DropIndex)

    def add_arguments(self, parser: CommandParser) -> None:
        commands = parser.add_subparsers(dest="index_action", metavar="ACTION", required=True)
        for action in self.actions:
            action().add_arguments(add_action(commands, action.name, action.help))

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        (action,) = (a for a in self.actions if a.name == options["index_action"])
        action().run(command, options)


class EntityStatus(Action):
    name = "status"
    help = (
        "Show the stores and indexes: how many entities no cleaner has looked at yet, since when, and"
        " how many index rows are stale. Status 1 if a shard does not answer."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--sample",
            type=not_negative,
            default=100,
            metavar="ROWS",
            help="Compare so many index rows of each shard with their entities. Default: 100.",
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        stores = list(status.store_statuses())
        indexes = list(status.index_statuses(sample=options["sample"]))
        if options["json"]:
            result = {"stores": list(map(asdict, stores)), "indexes": list(map(asdict, indexes))}
            command.stdout.write(json.dumps(result, indent=2))
        else:
            write_table(
                command,
                ("store", ">backlog", ">oldest"),
                [(s.name, str(s.backlog), f"{s.lag:.1f} s") for s in stores],
            )
            write_table(
                command,
                ("index", "unique", "state", ">sampled", ">stale"),
                [
                    (i.label, "yes" if i.is_unique else "", i.state, str(i.sampled), str(i.stale))
                    for i in indexes
                ],
            )
        problems = [text for store in stores for text in store.problems]
        problems += [text for index in indexes for text in index.problems]
        if problems:
            raise problems_error(problems)


class Command(CommandOfActions):
    help = "Looks after entities and their indexes."
    actions = (CleanEntities, LookAfterIndexes, EntityStatus)
