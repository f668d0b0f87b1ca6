"""The actions ``grow``, ``open``, ``close`` and ``weight`` of ``manage.py shards``: add shards to a
group, and change which shards get new keys.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser

from sharded_orm.management.actions import Action, line_writer, problems_error
from sharded_orm.management.progress import ShardProgress, failure_line
from sharded_orm.operations import growth
from sharded_orm.topology.model import MAX_WEIGHT, is_weight


class Grow(Action):
    name = "grow"
    help = (
        "Give a group more shards: create and migrate them, publish their range, open it. After an"
        " interruption, run the command again to go on."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        _add_group(parser)
        parser.add_argument("--count", type=int, metavar="N", help="The number of new shards.")
        parser.add_argument("--primary", metavar="NODE", help="The node to create them on.")
        parser.add_argument("--replica", metavar="NODE", help="The node that replicates them.")
        parser.add_argument(
            "--pair",
            nargs=2,
            metavar="NODE",
            help="Instead of --primary and --replica: two servers that replicate from each other. Half of"
            " the new shards are active on each.",
        )
        parser.add_argument(
            "--weight",
            type=_weight,
            default=1,
            metavar="W",
            help="How often each gets a new key. Default: %(default)s",
        )
        parser.add_argument(
            "--bounds",
            nargs="+",
            default=[],
            metavar="KEY",
            help="For a range group with BOUNDS: the lowest key of each new shard.",
        )
        parser.add_argument(
            "--closed", action="store_true", help="Do not open the range for new keys."
        )
        parser.add_argument(
            "--abort",
            action="store_true",
            help="Give up a growth that was interrupted before its range was published. Shards that"
            " were created stay.",
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        if options["abort"]:
            new = growth.give_up(options["group"])
            text = "Nothing was broken off." if new is None else f"Range {new} is given up."
            command.stdout.write(text)
            return
        primary, replica = options["pair"] or (options["primary"], options["replica"])
        if options["count"] is None or primary is None:
            raise CommandError(
                "Tell how many shards and where: --count N --primary NODE, or --count N --pair NODE NODE."
            )
        if options["pair"] and (options["primary"] or options["replica"]):
            raise CommandError("--pair is instead of --primary and --replica.")
        report = growth.grow(
            options["group"],
            options["count"],
            primary=primary,
            replica=replica,
            is_pair=bool(options["pair"]),
            weight=options["weight"],
            bounds=growth.parse_bounds(options["group"], options["bounds"]),
            open_it=not options["closed"],
            progress=ShardProgress(command, options["verbosity"]),
            tell=line_writer(command, options),
        )
        if options["json"]:
            command.stdout.write(json.dumps(report.to_json(), indent=2))
        elif not report.problems:
            state = {True: "open", False: "closed", None: "in use"}[report.open]
            where = " and ".join(options["pair"] or [primary])
            command.stdout.write(f"Range {report.range} on {where} is {state}.")
        if report.problems:
            failures = report.migrated.failures if report.migrated is not None else []
            raise problems_error([*map(failure_line, failures), *report.problems])


class _Setting(Action):
    """Base class of the actions that set one property of a range of shards, such as its weight."""

    def add_arguments(self, parser: CommandParser) -> None:
        _add_group(parser)
        parser.add_argument("range", type=_range, metavar="RANGE", help="Such as 512-1023.")


class Open(_Setting):
    name = "open"
    help = "Let a range take new keys."

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        first, last = options["range"]
        document = growth.set_open(options["group"], first, last, True)
        _report_range(command, options, f"is open (version {document.version})")


class Close(_Setting):
    name = "close"
    help = "Give a range no more new keys; its existing keys stay."

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        first, last = options["range"]
        document = growth.set_open(options["group"], first, last, False)
        _report_range(command, options, f"is closed (version {document.version})")


class Weight(_Setting):
    name = "weight"
    help = "Set how often each shard of a range gets a new key."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("weight", type=_weight, metavar="W", help="1 is usual; 0 for never.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        first, last = options["range"]
        document = growth.set_weight(options["group"], first, last, options["weight"])
        _report_range(
            command, options, f"has weight {options['weight']:g} (version {document.version})"
        )


def _report_range(command: BaseCommand, options: dict[str, Any], state: str) -> None:
    first, last = options["range"]
    command.stdout.write(f"Range {options['group']} {first}-{last} {state}.")


def _add_group(parser: CommandParser) -> None:
    parser.add_argument("group", metavar="GROUP", help="The group's name.")


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,18})-(\d{1,18})", text, re.ASCII)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not a range such as 512-1023")
    return int(match[1]), int(match[2])


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not is_weight(weight):
        raise ArgumentTypeError(f"{text!r} is not a weight: a number from 0 to {MAX_WEIGHT:,}")
    return int(weight) if weight.is_integer() else weight


ACTIONS: tuple[type[Action], ...] = (Grow, Open, Close, Weight)
