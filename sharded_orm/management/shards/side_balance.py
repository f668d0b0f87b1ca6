"""The option ``--pairs`` of ``manage.py shards balance``: divide the shards of each pair evenly.

A pair is two servers that replicate from each other. For each shard, one of them is the active
side, which takes its writes. The command finds shards that should change their active side, so that
each server is active for half of the shards. It prints these shards, or switches them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from django.core.management import BaseCommand

from sharded_orm import runtime
from sharded_orm.management.actions import line_writer
from sharded_orm.management.shards.move import raise_failures, refusals_as_json
from sharded_orm.management.stop_signals import stop_signals
from sharded_orm.management.tables import write_table
from sharded_orm.operations.pairs.side_balance import (
    SideBalance,
    SideStep,
    balance_sides,
    plan_sides,
)
from sharded_orm.operations.selection import numbers_text


def balance_pairs(command: BaseCommand, options: dict[str, Any]) -> None:
    """Print which shards of pairs should change their active side. With ``--apply``, switch them.

    Afterwards, each of the two servers of a pair is active for half of the shards of the pair.
    """
    with refusals_as_json(command, options):
        runtime.refresh()
        balances = plan_sides(options["group"])
    if not options["json"]:
        _show(command, balances)
    if options["apply"]:
        _apply(command, balances, options)
    elif options["json"]:
        command.stdout.write(json.dumps(_plan_json(balances), indent=2))
    elif any(balance.steps for balance in balances):
        command.stdout.write("Nothing was changed. To switch the shards, add --apply.")


def _show(command: BaseCommand, balances: Sequence[SideBalance]) -> None:
    rows = [
        [" and ".join(balance.nodes), node, str(before), str(after)]
        for balance in balances
        for node, before, after in zip(balance.nodes, balance.before, balance.after, strict=True)
    ]
    write_table(command, ("pair", "side", ">active", ">after"), rows)
    for balance in balances:
        if balance.pinned:
            nodes = " and ".join(balance.nodes)
            command.stdout.write(
                f"1 shard of {nodes} stays, because it is pinned."
                if balance.pinned == 1
                else f"{balance.pinned} shards of {nodes} stay, because they are pinned."
            )
        for step in balance.steps:
            command.stdout.write(f"manage.py {_command(step)}")
    if not any(balance.steps for balance in balances):
        command.stdout.write("There is nothing to switch.")


def _command(step: SideStep) -> str:
    group = runtime.group(step.group)
    numbers = numbers_text([group.shard(number) for number in step.numbers])
    return f"shards switch {step.group} {numbers} --to-side {step.target}"


def _plan_json(balances: Sequence[SideBalance]) -> dict[str, Any]:
    return {
        "pairs": [
            {
                "nodes": list(balance.nodes),
                "before": list(balance.before),
                "after": list(balance.after),
                "pinned": balance.pinned,
                "steps": [{"command": _command(step), **asdict(step)} for step in balance.steps],
            }
            for balance in balances
        ]
    }


def _apply(command: BaseCommand, balances: Sequence[SideBalance], options: dict[str, Any]) -> None:
    with refusals_as_json(command, options), stop_signals() as stopping:
        reports = balance_sides(
            options["group"], stopping=stopping, tell=line_writer(command, options)
        )
    switched = sum(len(report.switched) for report in reports)
    pauses = [pause for report in reports for pause in report.pauses]
    if options["json"]:
        content = {**_plan_json(balances), "reports": [report.to_json() for report in reports]}
        command.stdout.write(json.dumps(content, indent=2))
    else:
        for note in dict.fromkeys(note for report in reports for note in report.notes):
            command.stdout.write(f"Note: {note}.")
        waited = f"; writes waited for {max(pauses) * 1000:.0f} ms at most" if pauses else ""
        command.stdout.write(f"{switched} shards switched{waited}.")
    raise_failures(reports, stopping.status)
