"""The actions ``setup``, ``check`` and ``rejoin`` of ``manage.py pairs``: replication in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser

from sharded_orm.management.actions import Action, line_writer, problems_error
from sharded_orm.management.arguments import seconds
from sharded_orm.operations.exceptions import PairRefused
from sharded_orm.operations.pairs import rejoin, replication_check, replication_setup, upgrade_state
from sharded_orm.operations.pairs.pair_servers import all_pairs


class _PairAction(Action):
    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "nodes",
            nargs="*",
            metavar="NODE",
            help="The two nodes of the pair. Default: all pairs of the topology.",
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")


def _add_timeout(parser: CommandParser) -> None:
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=replication_setup.TIMEOUT,
        metavar="SECONDS",
        help="The time in which each server must execute what it lacks. Default: %(default)g",
    )


class SetUpPair(_PairAction):
    name = "setup"
    help = (
        "Let two MariaDB servers replicate from each other. NODE_B is empty, or a copy or replica of"
        " NODE_A. What is set up already stays."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        _add_timeout(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        tell = line_writer(command, options)
        pairs = _pairs(options)
        try:
            for first, second in pairs:
                replication_setup.set_up(first, second, timeout=options["timeout"], tell=tell)
        except PairRefused as exc:
            _write_json(command, options, exc.problems)
            raise
        _write_json(command, options, ())
        for first, second in pairs:
            _write_success(command, options, f"{first} and {second} replicate from each other.")


class CheckPair(_PairAction):
    name = "check"
    help = (
        "Check that two MariaDB servers replicate from each other safely: their settings, accounts,"
        " replication, and the columns of all tables. Exits with status 1 if not."
    )

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        pairs = _pairs(options)
        problems: list[str] = []
        for first, second in pairs:
            upgrade = upgrade_state.unfinished(first, second)
            problems += [upgrade] if upgrade else replication_check.check(first, second)
        _write_json(command, options, problems)
        if problems:
            raise problems_error(problems)
        for first, second in pairs:
            _write_success(command, options, f"{first} and {second} are a pair in order.")


class Rejoin(Action):
    name = "rejoin"
    help = (
        "Bring a side that was down back into its pair: compare it with the other side, put aside what only"
        " it has, start replication in both directions, and open it. After an interruption, run the command"
        " again to go on."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("node", metavar="NODE", help="The side that was down.")
        parser.add_argument(
            "--folder",
            type=Path,
            default=Path(),
            metavar="FOLDER",
            help="Where a file is made with what the side had, and the other side has not, if the side was"
            " given up. Default: the current folder",
        )
        _add_timeout(parser)
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        try:
            report = rejoin.rejoin(
                options["node"],
                folder=options["folder"],
                timeout=options["timeout"],
                tell=line_writer(command, options),
            )
        except PairRefused as exc:
            _write_json(command, options, exc.problems)
            raise
        if options["json"]:
            command.stdout.write(json.dumps(report.to_json(), indent=2))
            return
        if report.file:
            command.stdout.write(
                f"{report.transactions} transactions and {report.rows} rows that differed are in"
                f" {report.file}"
            )
        _write_success(command, options, f"{report.node} is a side of its pair again.")


def _pairs(options: dict[str, Any]) -> list[tuple[str, str]]:
    nodes = options["nodes"]
    if len(nodes) not in (0, 2):
        raise CommandError("Name the two nodes of a pair, or none for all pairs of the topology.")
    pairs = [(nodes[0], nodes[1])] if nodes else all_pairs()
    if not pairs:
        raise CommandError("The topology has no pairs: a range of a pair has 'pair' and 'active'.")
    return pairs


def _write_json(command: BaseCommand, options: dict[str, Any], problems: Any) -> None:
    if options["json"]:
        value = {"ok": not problems, "problems": list(problems)}
        command.stdout.write(json.dumps(value, indent=2))


def _write_success(command: BaseCommand, options: dict[str, Any], text: str) -> None:
    if not options["json"] and options["verbosity"]:
        command.stdout.write(command.style.SUCCESS(text))


ACTIONS = (SetUpPair, CheckPair, Rejoin)
