"""The command-line options ``--group``, ``--shards`` and ``--node``, which select shards."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping
from typing import Any

from django.core.management import CommandError

from sharded_orm.operations.exceptions import InvalidSelection
from sharded_orm.operations.selection import Selected, parse_numbers, select


def add_selection(parser: ArgumentParser) -> None:
    """Add the options ``--group``, ``--shards`` and ``--node``. By default, all shards are selected."""
    parser.add_argument("--group", metavar="GROUP", help="Only the shards of this group.")
    parser.add_argument(
        "--shards",
        type=shard_numbers,
        metavar="NUMBERS",
        help="Only these numbers, e.g. 0-511,700; needs --group if there are several groups.",
    )
    parser.add_argument("--node", metavar="NODE", help="Only shards whose primary is this node.")


def selection_of(options: Mapping[str, Any]) -> list[Selected]:
    """Return the shards that the parsed options select, with one item for each group. The list is
    never empty.

    :raises CommandError: a group, node or shard does not exist, or the options select no shard.
    """
    numbers = options["shards"]
    try:
        if isinstance(numbers, str):
            # call_command() may pass the numbers as a text.
            numbers = parse_numbers(numbers)
        return select(options["group"], numbers, options["node"])
    except (InvalidSelection, ValueError) as exc:
        raise CommandError(str(exc)) from exc


def shard_numbers(text: str) -> list[range]:
    """Return the ranges of shard numbers in an argument such as ``0-511,700``.

    ``argparse`` calls this function to convert the text of an option.
    """
    try:
        return parse_numbers(text)
    except ValueError as exc:
        raise ArgumentTypeError(str(exc)) from exc
