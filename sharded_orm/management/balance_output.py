"""The options and the output that ``shards balance`` and ``keys balance`` have in common."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from django.core.management import BaseCommand
from django.core.management.base import CommandParser
from django.template.defaultfilters import filesizeformat

from sharded_orm.management.tables import write_table
from sharded_orm.operations.balancing import measure
from sharded_orm.operations.balancing.options import COOL_DOWN, THRESHOLD, BalanceOptions
from sharded_orm.operations.balancing.problem import BalancePlan
from sharded_orm.operations.balancing.step import BalanceStep

_TOO_FULL = "TOO FULL"


def add_balance_options(parser: CommandParser, measures: Sequence[str], example: str) -> None:
    """Add the options that say what is balanced, and how evenly.

    :param measures: the choices of the option ``--by``; the first is the default.
    :param example: the name of a shard or key, as an example in the help text of the option
        ``--load``.
    """
    parser.add_argument(
        "--by", choices=measures, default=measures[0], help="What to balance. Default: %(default)s"
    )
    parser.add_argument(
        "--load",
        metavar="FILE",
        help=f'For --by load: a JSON object of names and numbers, such as {{"{example}": 12.5}}.',
    )
    parser.add_argument(
        "--threshold",
        type=_part,
        default=THRESHOLD,
        metavar="PERCENT",
        help="Take nothing away from a node or shard that has at most this much more than its share."
        " Default: 10",
    )
    parser.add_argument(
        "--goal",
        type=_part,
        metavar="PERCENT",
        help="Move until no node or shard has more than this above its share. Default: the threshold",
    )
    parser.add_argument(
        "--cool-down",
        type=_hours,
        default=COOL_DOWN,
        metavar="HOURS",
        help="Leave a shard or key in place for this long after it has moved. Default: 24",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")


def balance_options(options: Mapping[str, Any]) -> BalanceOptions:
    """Return the values of the options that :func:`add_balance_options` adds.

    :raises BalanceRefused: the options contradict each other.
    """
    return BalanceOptions(
        options["by"], options["threshold"], options["goal"], options["cool_down"], options["load"]
    )


def _part(text: str) -> float:
    try:
        part = float(text) / 100
    except ValueError:
        part = -1.0
    if not 0 <= part < math.inf:
        raise ArgumentTypeError(f"{text!r} is no percentage, such as 10")
    return part


def _hours(text: str) -> timedelta:
    try:
        hours = timedelta(hours=float(text))
    except (ValueError, OverflowError):
        hours = timedelta(hours=-1)
    if hours < timedelta(0):
        raise ArgumentTypeError(f"{text!r} is no number of hours")
    return hours


# ##### Output #####


def write_bins(command: BaseCommand, plan: BalancePlan, kind: str, by: str) -> None:
    """Print a table of the nodes or shards: how full each is now, and how full after the moves."""
    obstacles = {obstacle.bin for obstacle in plan.obstacles}
    write_table(
        command,
        (kind, f">{by}", ">share", ">after", ">of it", ""),
        [
            [
                name,
                size_text(plan.before[name], by),
                size_text(plan.shares[name], by),
                size_text(plan.after[name], by),
                f"{plan.after[name] / plan.shares[name]:.0%}" if plan.shares[name] else "",
                _TOO_FULL if name in obstacles else "",
            ]
            for name in sorted(plan.before)
        ],
        {_TOO_FULL},
    )


def write_obstacles(command: BaseCommand, plan: BalancePlan) -> None:
    """Print which nodes or shards stay too full, and why the plan does not change that."""
    if len(plan.parts) > 1:
        parts = " | ".join(", ".join(part) for part in plan.parts)
        command.stdout.write(
            f"These cannot exchange anything, so each has a share of its own: {parts}"
        )
    for obstacle in plan.obstacles:
        command.stdout.write(
            command.style.WARNING(f"{obstacle.bin} stays too full: {obstacle.text}.")
        )


def size_text(size: float, by: str) -> str:
    if by == measure.BYTES:
        return filesizeformat(size).replace("\xa0", " ")
    return f"{size:,.0f}" if size == int(size) else f"{size:,.1f}"


def plan_json(
    plan: BalancePlan, steps: Iterable[BalanceStep], write_command: Callable[[BalanceStep], str]
) -> dict[str, Any]:
    return {
        "before": dict(plan.before),
        "shares": dict(plan.shares),
        "after": dict(plan.after),
        "moved": plan.moved,
        "least": plan.least,
        "steps": [
            {
                "command": write_command(step),
                "reason": step.reason,
                "group": step.group,
                "moves": [asdict(move) for move in step.moves],
            }
            for step in steps
        ],
        "parts": plan.parts,
        "obstacles": [asdict(obstacle) for obstacle in plan.obstacles],
    }
