"""The action ``balance`` of ``manage.py keys``: print which keys to move to which shard."""

from __future__ import annotations

import json
from typing import Any

from django.core.management import BaseCommand
from django.core.management.base import CommandParser

from sharded_orm.management.actions import Action, problems_error
from sharded_orm.management.balance_output import (
    add_balance_options,
    balance_options,
    plan_json,
    write_bins,
    write_obstacles,
)
from sharded_orm.management.keys.move import add_move_options, move_options
from sharded_orm.management.progress import ShardProgress
from sharded_orm.management.stop_signals import stop_signals
from sharded_orm.operations import moves
from sharded_orm.operations.balancing import measure
from sharded_orm.operations.balancing.key_balance import KeyBalance, plan_keys
from sharded_orm.operations.balancing.step import BalanceStep, apply_steps


class BalanceKeys(Action):
    name = "balance"
    help = (
        "Plan which keys to move to which shard, so that no shard has much more than its share. With"
        " --apply, move them."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("group", metavar="GROUP", help="A group with a directory.")
        what = parser.add_mutually_exclusive_group()
        what.add_argument(
            "--plan", action="store_true", help="Only show the moves. This is the default."
        )
        what.add_argument("--apply", action="store_true", help="Move the keys.")
        add_balance_options(parser, (measure.KEYS, measure.ROWS, measure.LOAD), "42")
        add_move_options(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        balance = plan_keys(options["group"], balance_options(options))
        if not options["json"]:
            _show(command, balance, options["by"])
        if options["apply"]:
            _apply(command, balance, options)
        elif options["json"]:
            command.stdout.write(json.dumps(_plan_json(balance), indent=2))
        elif balance.steps:
            command.stdout.write("Nothing was changed. To move the keys, add --apply.")


ACTIONS: tuple[type[Action], ...] = (BalanceKeys,)


def _show(command: BaseCommand, balance: KeyBalance, by: str) -> None:
    write_bins(command, balance.plan, "shard", by)
    for note in balance.notes:
        command.stdout.write(f"Note: {note}.")
    write_obstacles(command, balance.plan)
    if not balance.steps:
        command.stdout.write("There is nothing to move.")
    for step in balance.steps:
        count = len(step.moves)
        command.stdout.write(f"{count} keys from {step.source} to {step.target}: {step.reason}")


def _plan_json(balance: KeyBalance) -> dict[str, Any]:
    def move_command(step: BalanceStep) -> str:
        return f"keys move {step.group} --to {balance.target(step)} --from-file FILE"

    content = plan_json(balance.plan, balance.steps, move_command)
    for step, entry in zip(balance.steps, content["steps"], strict=True):
        entry["keys"] = [str(value) for value in balance.values(step)]
    return {**content, "notes": balance.notes}


def _apply(command: BaseCommand, balance: KeyBalance, options: dict[str, Any]) -> None:
    reports: list[moves.MoveReport] = []

    with stop_signals() as stopping:

        def apply(step: BalanceStep) -> bool:
            progress = ShardProgress(
                command, options["verbosity"], bar=not options["json"], unit="keys"
            )
            report = moves.move_keys(
                balance.group,
                balance.values(step),
                balance.target(step),
                options=move_options(options),
                progress=progress,
                stopping=stopping,
            )
            reports.append(report)
            return report.ok

        made = apply_steps(balance.steps, apply)
    moved = sum(len(report.moved) for report in reports)
    if options["json"]:
        content = {**_plan_json(balance), "reports": [report.to_json() for report in reports]}
        command.stdout.write(json.dumps(content, indent=2))
    else:
        command.stdout.write(f"{moved} keys moved, {len(made)} of {len(balance.steps)} steps made.")
    failures = [
        *(f"{key}: {why}" for report in reports for key, why in report.failures.items()),
        *(f"{report.stopped}; plan again to go on" for report in reports if report.stopped),
    ]
    if failures:
        error = problems_error(failures)
        error.returncode = stopping.status
        raise error
