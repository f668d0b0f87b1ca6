"""The options of ``migrate_shards`` that upgrade master-master pairs, one side after the other."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any

from django.core.management import BaseCommand, CommandError

from sharded_orm import runtime
from sharded_orm.management.actions import line_writer
from sharded_orm.management.progress import ShardProgress
from sharded_orm.management.stop_signals import stop_signals
from sharded_orm.operations.exceptions import (
    OperationStopped,
    PairRefused,
    RollingRefused,
    SwitchRefused,
)
from sharded_orm.operations.migrate import MigrateOptions
from sharded_orm.operations.pairs import column_defaults, rolling_upgrade
from sharded_orm.operations.pairs.pair_servers import all_pairs
from sharded_orm.operations.pairs.rolling_plan import RollingPlan, find_plan
from sharded_orm.operations.pairs.upgrade_state import STEPS
from sharded_orm.operations.runs.rollout import Waves

# Options of migrate_shards that mean nothing if whole pairs are upgraded.
_REFUSED = (
    "group", "shards", "node", "create", "fake", "fake_initial", "check_unapplied", "status",
    "retry_failed", "settle", "wave_size", "max_failures",
)  # fmt: skip


def add_rolling(parser: ArgumentParser) -> None:
    """Add the options of a rolling upgrade."""
    group = parser.add_argument_group("pairs of servers")
    group.add_argument(
        "--rolling",
        action="store_true",
        help="Migrate the passive side of each pair first, switch, and migrate the other side.",
    )
    group.add_argument(
        "--pair",
        nargs=2,
        metavar=("NODE_A", "NODE_B"),
        help="With --rolling: only this pair. Default: all pairs of the topology.",
    )
    group.add_argument(
        "--until",
        choices=STEPS,
        help="With --rolling: stop after this step. The same command without it goes on.",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=rolling_upgrade.TIMEOUT,
        metavar="SECONDS",
        help="With --rolling: the time in which a side must execute what it lacks. Default:"
        " %(default)g",
    )
    group.add_argument(
        "--drop-defaults",
        action="store_true",
        help="With --rolling: when all processes run the new release, drop the defaults in the"
        " database that were kept for the old one.",
    )


def refuse_without_rolling(options: Mapping[str, Any]) -> None:
    """Check that the options of a rolling upgrade are not used without ``--rolling``.

    :raises CommandError: one of them is.
    """
    for name in ("pair", "until", "drop_defaults"):
        if options[name]:
            raise CommandError(f"{_option(name)} needs --rolling.")


def run_rolling(command: BaseCommand, options: Mapping[str, Any], migrate: MigrateOptions) -> None:
    """Execute ``migrate_shards --rolling`` with the parsed options.

    :raises CommandError: an option makes no sense with ``--rolling``, or the upgrade was stopped.
    """
    for name in _REFUSED:
        if options[name] not in (None, False):
            raise CommandError(f"{_option(name)} makes no sense with --rolling.")
    pairs = all_pairs()
    if options["pair"]:
        pairs = [(options["pair"][0], options["pair"][1])]
    if not pairs:
        raise CommandError("The topology has no pairs: a range of a pair has 'pair' and 'active'.")
    for first, second in pairs:
        if options["plan"]:
            plan = find_plan(first, second, migrate)
            _write_plan(command, options, plan)
        elif options["drop_defaults"]:
            dropped = column_defaults.drop_kept_defaults(first, second)
            _write(command, options, {"dropped": dropped}, f"Dropped {len(dropped)} defaults.")
        else:
            _upgrade(command, options, migrate, first, second)


def _upgrade(
    command: BaseCommand,
    options: Mapping[str, Any],
    migrate: MigrateOptions,
    first: str,
    second: str,
) -> None:
    rolling_options = rolling_upgrade.RollingOptions(
        migrate,
        options["until"] or "",
        options["timeout"],
        Waves(options["canary"], options["parallel"], pause=options["pause"]),
    )
    progress = ShardProgress(command, options["verbosity"], bar=not options["json"])
    with stop_signals() as stopping:
        try:
            report = rolling_upgrade.upgrade(
                first,
                second,
                rolling_options,
                progress,
                stopping,
                line_writer(command, dict(options)),
            )
        except OperationStopped as exc:
            raise CommandError(str(exc), returncode=stopping.status) from exc
        except (PairRefused, RollingRefused, SwitchRefused) as exc:
            if options["json"]:
                _write(command, options, {"ok": False, "problems": list(exc.problems)}, "")
            raise
    plan = report.plan
    if report.next_step:
        text = f"Stopped before the step {report.next_step}. The same command goes on."
    elif not plan.rounds:
        text = f"{first} and {second}: nothing to migrate."
    else:
        text = f"{first} and {second}: migrated {', '.join(plan.migrations)}."
    _write(command, options, {"ok": True, "next_step": report.next_step, **plan.to_json()}, text)
    if not report.next_step and plan.rounds and not options["json"]:
        for line in _afterwards(plan):
            command.stdout.write(line)


def _write_plan(command: BaseCommand, options: Mapping[str, Any], plan: RollingPlan) -> None:
    lines = [
        f"{plan.first} and {plan.second}: {', '.join(plan.migrations) or 'nothing to migrate'}"
    ]
    for number, each in enumerate(plan.rounds, 1):
        lines.append(f"Round {number}, while all processes run the old release:")
        lines += [f"    {step}: {rolling_upgrade.describe(step, each)}" for step in STEPS]
    if plan.rounds:
        lines += _afterwards(plan)
    _write(command, options, plan.to_json(), "\n".join(lines))


def _afterwards(plan: RollingPlan) -> list[str]:
    lines = ["Then deploy the new release."]
    ranges = [r for group in runtime.topology().groups.values() for r in group.ranges]
    if not all(r.is_pair for r in ranges):
        lines.insert(0, "Shards that are on no pair: run 'manage.py migrate_shards' for them.")
    if plan.kept_defaults:
        lines.append(
            f"{', '.join(plan.kept_defaults)}: the default stays in the database for the old release."
            " When no process runs it any more: 'manage.py migrate_shards --rolling --drop-defaults'"
        )
    return lines


def _write(
    command: BaseCommand, options: Mapping[str, Any], value: Mapping[str, Any], text: str
) -> None:
    if options["json"]:
        command.stdout.write(json.dumps(value, indent=2))
    elif options["verbosity"]:
        command.stdout.write(text)


def _option(name: str) -> str:
    return f"--{name.removesuffix('_unapplied').replace('_', '-')}"
