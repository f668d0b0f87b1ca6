"""The actions ``move``, ``abort`` and ``repair`` of ``manage.py keys``: move keys, and end
interrupted moves.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser

from sharded_orm.management.actions import Action, problems_error
from sharded_orm.management.arguments import add_kill, days, positive
from sharded_orm.management.progress import ShardProgress
from sharded_orm.management.stop_signals import stop_signals
from sharded_orm.operations import moves
from sharded_orm.operations.moves.plan import shards_of


class MoveKeys(Action):
    name = "move"
    help = (
        "Move all rows of keys to another shard, while the site reads and writes them. After an"
        " interruption, run the command again to go on."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("group", metavar="GROUP", help="A group with a directory.")
        parser.add_argument("keys", nargs="*", metavar="KEY", help="Shard keys, such as 42.")
        parser.add_argument(
            "--from-file",
            metavar="FILE",
            help="Read more keys from a file, one per line; - for standard input.",
        )
        parser.add_argument(
            "--to",
            required=True,
            type=_target,
            metavar="SHARD",
            help="The number of the shard, or 'auto' for an open shard that is drawn for each key.",
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="Only check, and show what would be moved."
        )
        add_move_options(parser)
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        keys = [*options["keys"], *_keys_in(options["from_file"])]
        if not keys:
            raise CommandError("Name one key at least, or give --from-file.")
        if options["dry_run"]:
            self._show_plan(command, options, keys)
            return
        progress = ShardProgress(
            command, options["verbosity"], bar=not options["json"], unit="keys"
        )
        with stop_signals() as stopping:
            report = moves.move_keys(
                options["group"],
                keys,
                options["to"],
                options=move_options(options),
                progress=progress,
                stopping=stopping,
            )
        show_report(command, report, as_json=options["json"])
        if not report.ok:
            error = problems_error(
                report.problems()
                + (
                    [f"{report.stopped}; keys that are left: {report.left}"]
                    if report.stopped
                    else []
                )
            )
            error.returncode = stopping.status
            raise error

    def _show_plan(self, command: BaseCommand, options: dict[str, Any], keys: list[str]) -> None:
        plan = moves.plan_moves(options["group"], keys, options["to"])
        if options["json"]:
            command.stdout.write(
                json.dumps(
                    {
                        "group": plan.group,
                        "keys": [
                            {"key": str(key.value), "source": key.source, "target": key.target}
                            for key in plan.keys
                        ],
                        "already": plan.already,
                        "notes": plan.notes,
                    },
                    indent=2,
                )
            )
            return
        for (source, target), count in sorted(shards_of(plan.keys).items()):
            command.stdout.write(f"{count} keys from shard {source} to shard {target}")
        if plan.already:
            command.stdout.write(f"{len(plan.already)} keys are there already.")
        for note in plan.notes:
            command.stdout.write(f"Note: {note}.")
        command.stdout.write("Nothing was changed.")


class Abort(Action):
    name = "abort"
    help = (
        "Abort moves that are not switched yet. The keys stay where they are. To bring back a key that"
        " has moved, move it back."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("group", metavar="GROUP", help="A group with a directory.")
        parser.add_argument("keys", nargs="*", metavar="KEY", help="By default all under way.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        report = moves.abort(options["group"], options["keys"])
        for key in report.aborted:
            command.stdout.write(f"{key}: aborted; its rows are where they were")
        if not report.aborted:
            command.stdout.write("No move could be aborted: none is under way before its switch.")
        for note in report.notes:
            command.stdout.write(f"Note: {note}.")
        if not report.ok:
            raise problems_error(report.problems())


class Repair(Action):
    name = "repair"
    help = (
        "Bring moves that were broken off to their end, and remove fences and old rows that nobody"
        " needs any more. Can be run at any time, and regularly."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("group", metavar="GROUP", help="A group with a directory.")
        add_kill(parser)
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        report = moves.repair(options["group"], options=moves.MoveOptions(kill=options["kill"]))
        show_report(command, report, as_json=options["json"], moves_keys=False)
        if not report.ok:
            raise problems_error(report.problems())


ACTIONS: tuple[type[Action], ...] = (MoveKeys, Abort, Repair)


def add_move_options(parser: CommandParser) -> None:
    """Add the options that say how fast keys are moved, how long writes may wait, and how long the
    old rows are kept after a move.
    """
    parser.add_argument(
        "--max-pause",
        type=positive,
        default=1000,
        metavar="MS",
        help="Milliseconds for which writes of a key may wait until its copy is complete; storing the"
        " last changes and comparing the rows come in addition. If they are not enough, the key stays where it"
        " is. Default: %(default)s",
    )
    parser.add_argument(
        "--rate",
        type=positive,
        metavar="ROWS",
        help="Each worker copies at most this many rows per second. Default: no limit",
    )
    parser.add_argument(
        "--workers",
        type=positive,
        default=4,
        metavar="N",
        help="Move N keys at once. Default: %(default)s",
    )
    parser.add_argument(
        "--keep",
        type=days,
        default=timedelta(days=7),
        metavar="DAYS",
        help="Keep the old rows for so long, in tables of their own. Default: 7",
    )


def move_options(options: dict[str, Any]) -> moves.MoveOptions:
    """Return the values of the options that :func:`add_move_options` has added."""
    return moves.MoveOptions(
        max_pause=options["max_pause"] / 1000,
        rate=options["rate"],
        workers=options["workers"],
        keep=options["keep"],
    )


def show_report(
    command: BaseCommand,
    report: moves.MoveReport,
    *,
    as_json: bool,
    moves_keys: bool = True,
) -> None:
    """Print the outcome of a command that moves keys or ends interrupted moves.

    :param as_json: whether to print the report as JSON instead of sentences.
    :param moves_keys: True if the command was to move keys; False if it was only to end interrupted
        moves.
    """
    if as_json:
        command.stdout.write(json.dumps(report.to_json(), indent=2))
        return
    if report.recovered:
        places = [f"{key!r} is on shard {shard}" for key, shard in report.recovered.items()]
        command.stdout.write(
            f"{len(places)} moves that were broken off were ended{' first' if moves_keys else ''}:"
            f" {', '.join(places)}."
        )
    if report.already:
        command.stdout.write(f"{len(report.already)} keys were there already.")
    for note in report.notes:
        command.stdout.write(f"Note: {note}.")
    if not moves_keys:
        if not report.recovered and report.ok:
            command.stdout.write("No move was broken off.")
        return
    text = f"{len(report.moved)} keys moved"
    if report.pauses:
        text += f", {report.rows:,} rows; writes of a key waited for {max(report.pauses) * 1000:.0f} ms at most"
    command.stdout.write(command.style.SUCCESS(f"{text}.") if report.ok else f"{text}.")


def _keys_in(path: str | None) -> Iterator[str]:
    if path is None:
        return
    if path == "-":
        lines = sys.stdin.read().splitlines()
    else:
        try:
            with open(path, encoding="utf-8") as file:
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as exc:
            raise CommandError(f"The keys cannot be read from {path!r}: {exc}") from exc
    yield from (line for line in lines if line)


def _target(text: str) -> int | str:
    if text == moves.AUTO:
        return text
    if not text.isascii() or not text.isdigit():
        raise ArgumentTypeError(f"{text!r} is neither the number of a shard nor {moves.AUTO!r}")
    return int(text)
