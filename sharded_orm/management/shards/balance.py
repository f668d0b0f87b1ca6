"""The action ``balance`` of ``manage.py shards``: print which shards to move to which node, or move
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser

from sharded_orm.exceptions import MoveRefused
from sharded_orm.management.actions import Action, line_writer
from sharded_orm.management.balance_output import (
    add_balance_options,
    balance_options,
    plan_json,
    size_text,
    write_bins,
    write_obstacles,
)
from sharded_orm.management.shards.move import (
    add_rate,
    add_switch_options,
    move_options,
    pauses_text,
    raise_failures,
)
from sharded_orm.management.shards.side_balance import balance_pairs
from sharded_orm.management.stop_signals import stop_signals
from sharded_orm.operations import shard_moves
from sharded_orm.operations.balancing import measure
from sharded_orm.operations.balancing.shard_balance import ShardBalance, plan_shards
from sharded_orm.operations.balancing.step import BalanceStep, apply_steps
from sharded_orm.operations.selection import numbers_text

# Options that say which shards move and how. They have no meaning with --pairs, which only changes
# the active sides of shards.
_OF_MOVES = ("by", "load", "threshold", "goal", "cool_down", "rate", "patience", "keep")


class Balance(Action):
    name = "balance"
    help = (
        "Plan which shards to move to which node, so that no node has much more than its share. With"
        " --apply, move them. With --pairs, plan instead which shards of pairs change their active side,"
        " so that both servers of each pair have half of them."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--group", metavar="GROUP", help="Move only shards of this group.")
        what = parser.add_mutually_exclusive_group()
        what.add_argument(
            "--plan", action="store_true", help="Only show the moves. This is the default."
        )
        what.add_argument("--apply", action="store_true", help="Move or switch the shards.")
        parser.add_argument(
            "--pairs",
            action="store_true",
            help="Move nothing, but make half of the shards of each pair of servers active on each side.",
        )
        add_balance_options(
            parser, (measure.BYTES, measure.ROWS, measure.KEYS, measure.LOAD), "photos_00042"
        )
        add_rate(parser)
        add_switch_options(parser)
        parser.set_defaults(of_moves={name: parser.get_default(name) for name in _OF_MOVES})

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        if options["pairs"]:
            defaults = options["of_moves"]
            if given := [name for name in _OF_MOVES if options[name] != defaults[name]]:
                names = ", ".join("--" + name.replace("_", "-") for name in given)
                raise CommandError(f"--pairs moves no shards, so it does not go with {names}.")
            balance_pairs(command, options)
            return
        balance = plan_shards(options["group"], balance_options(options))
        if not options["json"]:
            self._show(command, balance, options)
        if options["apply"]:
            _apply(command, balance, options)
        elif options["json"]:
            command.stdout.write(json.dumps(_plan_json(balance), indent=2))
        elif balance.steps:
            command.stdout.write(
                "Nothing was changed. Each command by itself improves the balance. To move the shards,"
                " add --apply."
            )

    def _show(self, command: BaseCommand, balance: ShardBalance, options: dict[str, Any]) -> None:
        write_bins(command, balance.plan, "node", options["by"])
        if balance.recent:
            command.stdout.write(
                "1 shard stays, because it has moved a short time ago."
                if len(balance.recent) == 1
                else f"{len(balance.recent)} shards stay, because they have moved a short time ago."
            )
        write_obstacles(command, balance.plan)
        if not balance.steps:
            command.stdout.write("There is nothing to move.")
            return
        moved = size_text(_bytes(balance), measure.BYTES)
        command.stdout.write(f"{len(balance.plan.moves)} shards move, {moved}:")
        write_command = step_command(balance)
        for step in balance.steps:
            command.stdout.write(f"manage.py {write_command(step)}")
            command.stdout.write(f"    {step.reason}")


def step_command(balance: ShardBalance) -> Callable[[BalanceStep], str]:
    """Return a function that returns the command for a step of ``balance``.

    The command is a text such as ``shards move photos 0-7 --to db2``, without ``manage.py``.
    """

    def text(step: BalanceStep) -> str:
        shards = sorted(
            (balance.shards[move.item] for move in step.moves), key=lambda shard: shard.number
        )
        return f"shards move {step.group} {numbers_text(shards)} --to {step.target}"

    return text


def _plan_json(balance: ShardBalance) -> dict[str, Any]:
    content = plan_json(balance.plan, balance.steps, step_command(balance))
    return {**content, "bytes": _bytes(balance), "recent": sorted(balance.recent)}


def _apply(command: BaseCommand, balance: ShardBalance, options: dict[str, Any]) -> None:
    reports: list[shard_moves.ShardMoveReport] = []
    tell = line_writer(command, options)
    with stop_signals() as stopping:

        def apply(step: BalanceStep) -> bool:
            numbers = [balance.shards[move.item].number for move in step.moves]
            try:
                report = shard_moves.move_shards(
                    step.group,
                    numbers,
                    step.target,
                    options=move_options(options),
                    stopping=stopping,
                    tell=tell,
                )
            except MoveRefused as exc:
                # The step was refused, so none of its shards has moved. Report them as failed.
                failures = dict.fromkeys(numbers, "; ".join(exc.problems))
                report = shard_moves.ShardMoveReport(step.group, failures=failures)
            reports.append(report)
            return report.ok

        made = apply_steps(balance.steps, apply)
    moved = sum(len(report.moved) for report in reports)
    if options["json"]:
        content = {**_plan_json(balance), "reports": [report.to_json() for report in reports]}
        command.stdout.write(json.dumps(content, indent=2))
    else:
        command.stdout.write(
            f"{moved} shards moved, {len(made)} of {len(balance.steps)} steps"
            f" made{pauses_text(reports)}."
        )
    raise_failures(reports, stopping.status)


def _bytes(balance: ShardBalance) -> int:
    return sum(balance.bytes[move.item] for move in balance.plan.moves)


ACTIONS: tuple[type[Action], ...] = (Balance,)
