"""The action ``move`` of ``manage.py shards``: move shards to another node."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser

from sharded_orm import runtime
from sharded_orm.exceptions import MoveRefused, TopologyError
from sharded_orm.management.actions import Action, line_writer, problems_error
from sharded_orm.management.arguments import add_kill, days, positive
from sharded_orm.management.selection import shard_numbers
from sharded_orm.management.stop_signals import stop_signals
from sharded_orm.operations import shard_moves
from sharded_orm.operations.exceptions import SwitchRefused
from sharded_orm.operations.pairs.report import SwitchReport


class MoveShards(Action):
    name = "move"
    help = (
        "Move shards to another node, while the site reads and writes them. After an interruption,"
        " run the command again to go on."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("group", metavar="GROUP", help="A group of shards.")
        parser.add_argument(
            "shards", nargs="?", type=shard_numbers, metavar="SHARDS", help="Such as 0-7,12."
        )
        parser.add_argument("--to", metavar="NODE", help="The node to which they move.")
        parser.add_argument(
            "--replica",
            metavar="NODE",
            help="The replica of that node. Default: the one that its other shards have",
        )
        add_rate(parser)
        add_switch_options(parser)
        mode = parser.add_mutually_exclusive_group()
        mode.add_argument(
            "--check", action="store_true", help="Only check, and show what would be moved."
        )
        mode.add_argument(
            "--repair",
            action="store_true",
            help="End a move that was broken off, and delete old tables whose time is over. A shard"
            " stays where it is, unless its new place was published already.",
        )
        mode.add_argument(
            "--cleanup",
            action="store_true",
            help="Like --repair, but delete all old tables at once.",
        )
        add_kill(parser)
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        tell = line_writer(command, options)
        group, status = options["group"], 1
        with refusals_as_json(command, options, group=group):
            if options["repair"] or options["cleanup"]:
                report = shard_moves.repair(
                    group, discard=options["cleanup"], kill=options["kill"], tell=tell
                )
            elif options["kill"]:
                raise CommandError("--kill goes with --repair or --cleanup.")
            else:
                numbers = _required(options)
                if options["check"]:
                    _check(command, options, numbers)
                    return
                with stop_signals() as stopping:
                    report = shard_moves.move_shards(
                        group,
                        numbers,
                        options["to"],
                        replica=options["replica"],
                        options=move_options(options),
                        stopping=stopping,
                        tell=tell,
                    )
                status = stopping.status
        is_repair = options["repair"] or options["cleanup"]
        _show(command, report, as_json=options["json"], is_repair=is_repair)
        if not options["repair"]:
            raise_failures([report], status)


def _required(options: dict[str, Any]) -> list[int]:
    if options["shards"] is None or options["to"] is None:
        raise CommandError(
            "Name the shards and --to NODE, such as: shards move photos 0-7 --to db3"
        )
    return [number for part in options["shards"] for number in part]


def _check(command: BaseCommand, options: dict[str, Any], numbers: list[int]) -> None:
    runtime.refresh()
    plan = shard_moves.check_shard_moves(
        options["group"], numbers, options["to"], options["replica"]
    )
    if options["json"]:
        moves = [move.to_json() for move in plan.shards]
        command.stdout.write(json.dumps({"moves": moves, "already": plan.already}, indent=2))
        return
    for move in plan.shards:
        command.stdout.write(f"{move} from {move.source} to {move.target}")
    if plan.already:
        command.stdout.write(f"{len(plan.already)} shards are there already.")
    command.stdout.write("Nothing was changed.")


def _show(
    command: BaseCommand, report: shard_moves.ShardMoveReport, *, as_json: bool, is_repair: bool
) -> None:
    if as_json:
        command.stdout.write(json.dumps(report.to_json(), indent=2))
        return
    if report.already:
        command.stdout.write(f"{len(report.already)} shards were there already.")
    for note in report.notes:
        command.stdout.write(f"Note: {note}.")
    if is_repair and report.ok and not report.moved:
        command.stdout.write(command.style.SUCCESS("No shard is on its way any more."))
        return
    text = f"{len(report.moved)} shards moved"
    if report.pauses:
        text += f", {report.rows:,} rows{pauses_text([report])}"
    command.stdout.write(command.style.SUCCESS(f"{text}.") if report.ok else f"{text}.")


ACTIONS: tuple[type[Action], ...] = (MoveShards,)


# ##### What other actions share #####


def add_rate(parser: CommandParser) -> None:
    parser.add_argument(
        "--rate",
        type=positive,
        metavar="ROWS",
        help="Copy at most this many rows per second. Default: no limit",
    )


def add_switch_options(parser: CommandParser) -> None:
    """Add the options of all commands that switch shards to another node."""
    parser.add_argument(
        "--patience",
        type=positive,
        default=60,
        metavar="SECONDS",
        help="For how long to try again if transactions use a shard at its switch. Default:"
        " %(default)s",
    )
    parser.add_argument(
        "--keep",
        type=days,
        default=timedelta(days=1),
        metavar="DAYS",
        help="Keep the old tables for so long, under other names. Default: 1",
    )


def move_options(options: dict[str, Any]) -> shard_moves.ShardMoveOptions:
    """Return the values of the options that :func:`add_rate` and :func:`add_switch_options` add."""
    return shard_moves.ShardMoveOptions(
        patience=options["patience"], rate=options.get("rate"), keep=options["keep"]
    )


@contextmanager
def refusals_as_json(
    command: BaseCommand, options: dict[str, Any], **content: Any
) -> Iterator[None]:
    """Context manager. If the operation in its block is refused and the command has the option
    ``--json``, the reasons are also printed as JSON.

    :param content: further entries of the JSON object, such as ``group="photos"``.
    """
    try:
        yield
    except (MoveRefused, SwitchRefused, TopologyError) as exc:
        if options["json"]:
            problems = exc.problems if isinstance(exc, MoveRefused | SwitchRefused) else (str(exc),)
            refusal = {"ok": False, **content, "problems": list(problems)}
            command.stdout.write(json.dumps(refusal, indent=2))
        raise


def raise_failures(
    reports: Iterable[shard_moves.ShardMoveReport | SwitchReport], status: int
) -> None:
    """If some shards were not moved or switched, raise an error that lists them.

    :param reports: the results of the moves or switches.
    :param status: the exit status of the command, if the error is raised.
    """
    failures = [
        failure
        for report in reports
        for failure in (
            *(f"shard {n} of group {report.group!r}: {why}" for n, why in report.failures.items()),
            *filter(None, [report.stopped]),
        )
    ]
    if failures:
        error = problems_error(failures)
        error.returncode = status
        raise error


def pauses_text(reports: Iterable[shard_moves.ShardMoveReport]) -> str:
    """Return a text such as ``; statements waited for 120 ms at most``, to be appended to a
    sentence.

    The time in it is the longest wait of all moves. The text is empty if nothing has moved.
    """
    longest = max((pause for report in reports for pause in report.pauses), default=None)
    return "" if longest is None else f"; statements waited for {longest * 1000:.0f} ms at most"
