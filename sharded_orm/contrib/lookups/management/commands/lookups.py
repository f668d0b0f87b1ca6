"""The command ``manage.py lookups``, which builds, checks and drops the lookups of models."""

from __future__ import annotations

from typing import Any

from django.core.management import BaseCommand
from django.core.management.base import CommandParser

from sharded_orm.contrib.lookups import maintenance
from sharded_orm.contrib.lookups.maintenance import LookupDifferences
from sharded_orm.management.actions import Action, CommandOfActions, line_writer, problems_error
from sharded_orm.management.tables import write_table


class _OfLookups(Action):
    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "names", nargs="*", metavar="LOOKUP", help="app.model.field; all if there is none."
        )


class ShowLookups(Action):
    name = "status"
    help = "Show the lookups: whether queries rely on them, and the number of entries."

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        write_table(
            command,
            ("lookup", "unique", "served", ">entries"),
            [
                (
                    status.lookup,
                    "yes" if status.unique else "",
                    "yes" if status.is_served else "no",
                    str(status.entries),
                )
                for status in maintenance.statuses()
            ],
        )


class BuildLookups(_OfLookups):
    name = "build"
    help = (
        "Write the entries of all rows, then let queries rely on the lookups. Run it when every process"
        " that writes has the declaration. It can be run again at any time."
    )

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        tell, problems = line_writer(command, options), list[str]()
        for lookup in maintenance.selected(options["names"]):
            differences = maintenance.build(lookup)
            tell(f"{lookup.name}: {differences.rows} rows, {differences.repaired} entries written")
            if not differences.is_clean:
                problems += _problems(differences, "is not served")
        if problems:
            raise problems_error(problems)


class CheckLookups(_OfLookups):
    name = "check"
    help = "Compare rows and entries, both ways; exit status 1 if they differ afterwards."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--repair",
            action="store_true",
            help="Write missing entries, and remove entries without a row whose writers have ended.",
        )

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        tell, problems = line_writer(command, options), list[str]()
        for lookup in maintenance.selected(options["names"]):
            differences = maintenance.check(lookup, repair=options["repair"])
            tell(
                f"{lookup.name}: {differences.rows} rows, {differences.entries} entries,"
                f" {differences.missing} missing, {differences.surplus} superfluous,"
                f" {differences.duplicates} duplicates, {differences.repaired} repaired"
            )
            if not differences.is_clean:
                problems += _problems(differences, "differs from the rows")
        if problems:
            raise problems_error(problems)


class DropLookup(Action):
    name = "drop"
    help = "Remove the entries of a lookup that no process uses any more."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", metavar="LOOKUP", help="app.model.field")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        removed = maintenance.drop(options["name"])
        line_writer(command, options)(f"{options['name']}: {removed} entries removed")


def _problems(differences: LookupDifferences, what: str) -> list[str]:
    return [f"{differences.lookup} {what}: {example}" for example in differences.examples]


class Command(CommandOfActions):
    help = "Looks after lookups, by which rows are found without their shard key."
    requires_system_checks = []
    actions = (ShowLookups, BuildLookups, CheckLookups, DropLookup)
