"""The action ``balance`` of ``manage.py shards``: which shards to move to which node."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from django.core.management import BaseCommand
from django.core.management.base import CommandParser

from sharded_orm.management.actions import Action
from sharded_orm.management.balance_output import (
    add_balance_options,
    balance_options,
    plan_json,
    size_text,
    write_bins,
    write_obstacles,
)
from sharded_orm.operations.balancing import measure
from sharded_orm.operations.balancing.shard_balance import ShardBalance, plan_shards
from sharded_orm.operations.balancing.step import BalanceStep
from sharded_orm.operations.selection import numbers_text


class Balance(Action):
    name = "balance"
    help = (
        "Plan which shards to move to which node, so that no node has much more than its share. Changes"
        " nothing."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--group", metavar="GROUP", help="Move only shards of this group.")
        add_balance_options(
            parser, (measure.BYTES, measure.ROWS, measure.KEYS, measure.LOAD), "photos_00042"
        )

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        balance = plan_shards(options["group"], balance_options(options))
        if options["json"]:
            content = plan_json(balance.plan, balance.steps, step_command(balance))
            content["bytes"] = _bytes(balance)
            content["recent"] = sorted(balance.recent)
            command.stdout.write(json.dumps(content, indent=2))
            return
        write_bins(command, balance.plan, "node", options["by"])
        if balance.recent:
            command.stdout.write(
                f"{len(balance.recent)} shards stay, because they have moved a short time ago."
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
        command.stdout.write("Nothing was changed. Each command by itself improves the balance.")


def step_command(balance: ShardBalance) -> Callable[[BalanceStep], str]:
    """Return a function that writes the command for a step, without ``manage.py``."""

    def text(step: BalanceStep) -> str:
        shards = sorted(
            (balance.shards[move.item] for move in step.moves), key=lambda shard: shard.number
        )
        return f"shards move {step.group} {numbers_text(shards)} --to {step.target}"

    return text


def _bytes(balance: ShardBalance) -> int:
    return sum(balance.bytes[move.item] for move in balance.plan.moves)


ACTIONS: tuple[type[Action], ...] = (Balance,)
