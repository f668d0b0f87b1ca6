"""The actions ``status`` and ``verify`` of ``manage.py keys``: show moves of keys, and check the
directory (the table that records the shard of each key).
"""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from dataclasses import asdict
from typing import Any

from django.core.management import BaseCommand
from django.core.management.base import CommandParser

from sharded_orm.management.actions import Action, problems_error
from sharded_orm.management.tables import write_table
from sharded_orm.operations.moves import status


class Status(Action):
    name = "status"
    help = "Show moves of keys: moves under way, moves that have left something behind, and the latest others."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("group", metavar="GROUP", help="A group with a directory.")
        parser.add_argument(
            "--last",
            type=_count,
            default=10,
            metavar="N",
            help="Show the last N moves that have ended completely. Default: %(default)s",
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        moves = status.moves_of(options["group"], options["last"])
        if options["json"]:
            rows = [asdict(move) for move in moves]
            command.stdout.write(json.dumps({"moves": rows}, indent=2, default=str))
            return
        if not moves:
            command.stdout.write(f"No key of group {options['group']!r} was ever moved.")
            return
        write_table(
            command,
            (">move", "key", ">from", ">to", "phase", "left", "error"),
            [
                (
                    str(move.number),
                    move.key,
                    str(move.source),
                    str(move.target),
                    move.phase,
                    _left(move),
                    move.error[:60],
                )
                for move in moves
            ],
        )


class Verify(Action):
    name = "verify"
    help = (
        "Count the rows of keys on every shard; exit status 1 if a shard has rows that it should not"
        " have."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("group", metavar="GROUP", help="A group with a directory.")
        parser.add_argument("keys", nargs="+", metavar="KEY", help="Shard keys, such as 42.")
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        found = status.verify(options["group"], options["keys"])
        if options["json"]:
            command.stdout.write(json.dumps({"keys": [asdict(key) for key in found]}, indent=2))
        else:
            for key in found:
                command.stdout.write(f"{key.key}: {key.rows} rows on shard {key.shard}")
        problems = [
            f"{key.key} belongs to shard {key.shard}, but shard {number} has {count} rows of it:"
            f" {', '.join(key.examples[number])}"
            for key in found
            for number, count in key.elsewhere.items()
        ]
        if problems:
            raise problems_error(problems)


ACTIONS: tuple[type[Action], ...] = (Status, Verify)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ArgumentTypeError(f"{text!r} is no number of moves")
    return int(text)


def _left(move: status.MoveStatus) -> str:
    parts = ["under way"] if move.in_flight else []
    if move.fenced:
        parts.append(f"fence on {move.source}")
    if move.kept_until:
        parts.append(f"old rows until {move.kept_until[:10]}")
    return ", ".join(parts)
