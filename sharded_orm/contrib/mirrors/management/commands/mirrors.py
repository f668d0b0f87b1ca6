"""The command ``manage.py mirrors``, which delivers writes to mirrors, and builds, checks and
reports mirrors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser

from sharded_orm.contrib.mirrors import build, comparison, declaration, relay
from sharded_orm.contrib.mirrors.backlog import backlog
from sharded_orm.contrib.mirrors.companions import Companion, companions, find_companion
from sharded_orm.contrib.mirrors.differences import ComparisonReport
from sharded_orm.management.actions import Action, CommandOfActions, problems_error
from sharded_orm.management.arguments import seconds
from sharded_orm.management.connections import leave_broken_connections
from sharded_orm.management.stop_signals import stop_signals


class RelayMirrors(Action):
    name = "relay"
    help = (
        "Deliver what writers have left in the outboxes, until the command is stopped. Any number of"
        " relays may run and share the shards."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--once",
            action="store_true",
            help="One round with rows of any age. Status 1 if rows stay.",
        )
        parser.add_argument(
            "--interval",
            type=seconds,
            default=1.0,
            metavar="SECONDS",
            help="Pause between two rounds.",
        )
        parser.add_argument(
            "--retry-dead", action="store_true", help="First try again what relays have given up."
        )
        parser.add_argument(
            "--json", action="store_true", help="With --once: print one JSON object."
        )

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        if options["retry_dead"]:
            relay.retry_dead_letters()
        with stop_signals() as stopping:
            if options["once"]:
                report = _relay(relay.relay(min_age=0, stopping=stopping), stopping)
                self._show(command, report, options)
                if report.failed or report.problems:
                    raise problems_error(report.problems)
                return
            while not stopping():
                report = _relay(relay.relay(stopping=stopping), stopping)
                if report.delivered or report.problems:
                    self._show(command, report, options)
                    for problem in report.problems:
                        command.stderr.write(problem)
                leave_broken_connections()
                stopping.wait(options["interval"])

    def _show(
        self, command: BaseCommand, report: relay.RelayReport, options: dict[str, Any]
    ) -> None:
        if options["json"]:
            command.stdout.write(json.dumps(relay.describe(report), indent=2))
        elif options["verbosity"]:
            command.stdout.write(f"{report.delivered} rows delivered, {report.failed} failed.")


def _relay(report: relay.RelayReport, stopping: Callable[[], bool]) -> relay.RelayReport:
    """Let the relays of other apps, such as that of reference tables, deliver their changes as
    well. Add the outcome to ``report``.
    """
    for companion in companions():
        copied = companion.relay(stopping)
        report.delivered += copied.rows
        report.problems += copied.problems
    return report


class CheckMirrors(Action):
    name = "check"
    help = "Compare mirrors with their sources. Status 1 if they differ and are not repaired."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("mirrors", nargs="*", metavar="MIRROR", help="By default all mirrors.")
        parser.add_argument("--repair", action="store_true", help="Mend the rows that differ.")
        parser.add_argument(
            "--newest-first", action="store_true", help="Begin with the highest primary keys."
        )
        parser.add_argument(
            "--sample",
            type=_share,
            metavar="PERCENT",
            help="Compare only so many percent of the chunks, drawn at random. A chunk has some thousand rows"
            " of a mirror, or 500 copies of a reference table on one shard.",
        )

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        names = options["mirrors"]
        copied = [found for name in names if (found := find_companion(name)) is not None]
        chosen = [build.find_mirror(name) for name in names if find_companion(name) is None]
        if not names:
            chosen = declaration.mirrors()
            copied = [(kind, label) for kind in companions() for label in kind.labels()]
        different, problems = 0, list[str]()
        for mirror in chosen:
            different += self._check(command, mirror, options, problems)
        for companion, label in copied:
            different += self._check_companion(command, companion, label, options, problems)
        if problems:
            raise problems_error(problems)
        if different and not options["repair"]:
            raise CommandError(f"{different} rows differ; --repair mends them.")

    def _check(
        self,
        command: BaseCommand,
        mirror: declaration.Mirror,
        options: dict[str, Any],
        problems: list[str],
    ) -> int:
        report, shown = ComparisonReport(), 0
        for report in comparison.compare(
            mirror,
            repair=options["repair"],
            newest_first=options["newest_first"],
            sample=options["sample"],
        ):
            for difference in report.differences[shown:]:
                ending = ": repaired" if options["repair"] else ""
                if (exc := report.failures.get(difference)) is not None:
                    problems.append(f"{difference}: {exc}")
                    ending = ": not repaired"
                command.stdout.write(f"{difference}{ending}")
            shown = len(report.differences)
        if options["verbosity"]:
            pending = f", {report.pending} not delivered yet" if report.pending else ""
            command.stdout.write(
                f"{mirror.label}: {report.compared} rows compared, {shown} differ{pending}."
            )
        return shown

    def _check_companion(
        self,
        command: BaseCommand,
        companion: Companion,
        label: str,
        options: dict[str, Any],
        problems: list[str],
    ) -> int:
        report = companion.check(
            label,
            repair=options["repair"],
            newest_first=options["newest_first"],
            sample=options["sample"],
        )
        problems += report.problems
        ending = ": repaired" if options["repair"] else ""
        for difference in report.differences:
            command.stdout.write(f"{difference}{ending}")
        if options["verbosity"]:
            pending = f", {report.pending} not delivered yet" if report.pending else ""
            command.stdout.write(
                f"{label}: {report.rows} rows compared, {len(report.differences)} differ{pending}."
            )
        return len(report.differences)


class BuildMirror(Action):
    name = "build"
    help = (
        "Copy the rows of the source that a mirror does not have. First deploy the mirror to every"
        " process that writes the source."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("mirror", metavar="MIRROR", help="Such as photos.WrittenComment.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        if (found := find_companion(options["mirror"])) is not None:
            self._build_companion(command, *found)
            return
        mirror = build.find_mirror(options["mirror"])
        copied, began = 0, time.monotonic()
        with stop_signals() as stopping:
            for copied in build.build(mirror, stopping=stopping):
                if options["verbosity"] and time.monotonic() - began > 10:
                    began = time.monotonic()
                    command.stderr.write(f"{copied} rows of {mirror.source.model.__name__} so far")
            if stopping():
                raise CommandError(
                    "Stopped. Run the command again to go on.", returncode=stopping.status
                )
        command.stdout.write(
            f"{mirror.label} has all {copied} rows of its source that belong to it."
        )

    def _build_companion(self, command: BaseCommand, companion: Companion, label: str) -> None:
        with stop_signals() as stopping:
            report = companion.build(label, stopping)
            if stopping():
                raise CommandError(
                    "Stopped. Run the command again to go on.", returncode=stopping.status
                )
        if report.problems:
            raise problems_error(report.problems)
        command.stdout.write(f"All shards have the rows of {label}; {report.rows} were written.")


class MirrorStatus(Action):
    name = "status"
    help = "Show the mirrors, and what is left in the outboxes. Status 1 if there are dead letters."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        found = backlog()
        names = [
            {"mirror": mirror.label, "source": mirror.source.model._meta.label}
            for mirror in declaration.mirrors()
        ]
        copies, copy_problems = list[dict[str, Any]](), list[str]()
        for companion in companions():
            shown, problems_of_kind = companion.status()
            copies += shown
            copy_problems += problems_of_kind
        if options["json"]:
            command.stdout.write(
                json.dumps(
                    {
                        "mirrors": names,
                        "references": copies,
                        "rows": found.rows,
                        "lag": round(found.lag, 3),
                        "dead": found.dead,
                        "problems": found.problems,
                    },
                    indent=2,
                )
            )
        else:
            for name in names:
                command.stdout.write(f"{name['mirror']} mirrors {name['source']}")
            command.stdout.write(
                f"{found.rows} rows in the outboxes, the oldest of {found.lag:.1f} s"
            )
            for copy in copies:
                command.stdout.write(
                    f"{copy['reference']} is copied to {copy['shards']} shards, {copy['behind']} of them"
                    f" behind, by up to {copy['lag']:.1f} s"
                )
        problems = [
            *found.problems,
            *copy_problems,
            *(f"dead letter: {text}" for text in found.dead),
        ]
        if problems:
            raise problems_error(problems)


def _share(text: str) -> float:
    percent = float(text)
    if not 0 < percent <= 100:
        raise ValueError(text)
    return percent / 100


class Command(CommandOfActions):
    help = "Looks after mirrors: rows that are stored a second time, on another shard."
    actions = (RelayMirrors, CheckMirrors, BuildMirror, MirrorStatus)
