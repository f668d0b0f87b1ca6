"""The action ``split`` of ``manage.py shards``: move a part of a server's shards to another server."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser

from sharded_orm import runtime
from sharded_orm.management.actions import Action, line_writer
from sharded_orm.management.selection import shard_numbers
from sharded_orm.management.shards.move import (
    add_rate,
    add_switch_options,
    move_options,
    pauses_text,
    raise_failures,
    refusals_as_json,
)
from sharded_orm.management.stop_signals import stop_signals
from sharded_orm.operations import server_splits, shard_moves
from sharded_orm.operations.shard_moves.plan import ShardMovePlan


class Split(Action):
    name = "split"
    help = (
        "Split a server in two: shards of NODE go to another server, while the site reads and writes"
        " them. On MariaDB that server replicates from NODE, elsewhere the rows are copied. After an"
        " interruption, run the command again to go on."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("node", metavar="NODE", help="The server that has the shards.")
        parser.add_argument(
            "--to", required=True, metavar="NODE", help="The server that gets shards."
        )
        parser.add_argument(
            "--shards",
            nargs="+",
            type=_of_group,
            metavar="GROUP:SHARDS",
            help="The shards that move to the other server, such as photos:256-511 albums:32-63.",
        )
        parser.add_argument(
            "--replica", metavar="NODE", help="The replica that these shards have afterwards."
        )
        add_rate(parser)
        add_switch_options(parser)
        mode = parser.add_mutually_exclusive_group()
        mode.add_argument(
            "--check", action="store_true", help="Only check, and show what would be moved."
        )
        mode.add_argument(
            "--cleanup",
            action="store_true",
            help="Afterwards: end the replication if there is one, and drop on both servers what they no"
            " longer serve.",
        )
        parser.add_argument("--json", action="store_true", help="Print the outcome as JSON.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        node, to = options["node"], options["to"]
        tell = line_writer(command, options)
        with refusals_as_json(command, options):
            if options["cleanup"]:
                runtime.refresh()
                notes = server_splits.clean_up(node, to, tell=tell)
                _show_notes(command, notes, as_json=options["json"])
                return
            shards = _shards(options)
            if options["check"]:
                plans = server_splits.check(
                    node, to, shards, replica=options["replica"], options=move_options(options)
                )
                _show_plans(command, plans, as_json=options["json"])
                return
            with stop_signals() as stopping:
                reports = server_splits.split(
                    node,
                    to,
                    shards,
                    replica=options["replica"],
                    options=move_options(options),
                    stopping=stopping,
                    tell=tell,
                )
            status = stopping.status
        _show(command, reports, as_json=options["json"])
        raise_failures(reports, status)


def _of_group(text: str) -> tuple[str, list[range]]:
    group, colon, numbers = text.partition(":")
    if not colon:
        raise ArgumentTypeError(f"{text!r} is not like photos:256-511")
    return group, shard_numbers(numbers)


def _shards(options: dict[str, Any]) -> dict[str, list[int]]:
    if not options["shards"]:
        raise CommandError("Name the shards that go, such as: --shards photos:256-511 albums:32-63")
    shards: dict[str, list[int]] = {}
    for group, ranges in options["shards"]:
        shards.setdefault(group, []).extend(number for each in ranges for number in each)
    return shards


def _show_plans(command: BaseCommand, plans: list[ShardMovePlan], *, as_json: bool) -> None:
    if as_json:
        moves = [move.to_json() for plan in plans for move in plan.shards]
        command.stdout.write(json.dumps({"ok": True, "moves": moves}, indent=2))
        return
    for plan in plans:
        for move in plan.shards:
            command.stdout.write(f"{move} from {move.source} to {move.target}")
    command.stdout.write("Nothing was changed.")


def _show(
    command: BaseCommand, reports: list[shard_moves.ShardMoveReport], *, as_json: bool
) -> None:
    if as_json:
        outcome = {
            "ok": all(report.ok for report in reports),
            "groups": [report.to_json() for report in reports],
        }
        command.stdout.write(json.dumps(outcome, indent=2))
        return
    for report in reports:
        for note in report.notes:
            command.stdout.write(f"Note: {note}.")
    if already := sum(len(report.already) for report in reports):
        command.stdout.write(f"{already} shards were there already.")
    moved = sum(len(report.moved) for report in reports)
    command.stdout.write(f"{moved} shards moved{pauses_text(reports)}.")


def _show_notes(command: BaseCommand, notes: list[str], *, as_json: bool) -> None:
    if as_json:
        command.stdout.write(json.dumps({"ok": True, "notes": notes}, indent=2))
        return
    for note in notes:
        command.stdout.write(f"{note[0].upper()}{note[1:]}.")
    if not notes:
        command.stdout.write("Nothing is left to clean up.")


ACTIONS: tuple[type[Action], ...] = (Split,)
