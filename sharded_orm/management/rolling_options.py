"""The options of ``migrate_shards`` that upgrade master-master pairs, one side after the other."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from django.core.management import BaseCommand, CommandError

from sharded_orm import runtime
from sharded_orm.management.actions import line_writer
from sharded_orm.management.arguments import seconds
from sharded_orm.management.progress import ShardProgress
from sharded_orm.management.stop_signals import stop_signals
from sharded_orm.operations.exceptions import (
    AbortRefused,
    OperationStopped,
    PairRefused,
    RollingRefused,
    SwitchRefused,
)
from sharded_orm.operations.migrate import MigrateOptions
from sharded_orm.operations.pairs import column_defaults, rolling_abort, rolling_upgrade
from sharded_orm.operations.pairs.pair_servers import all_pairs
from sharded_orm.operations.pairs.rolling_plan import RollingPlan, find_plan
from sharded_orm.operations.pairs.upgrade_state import STEPS, STOPPED_STEPS, unfinished
from sharded_orm.operations.runs.rollout import Stopping, Waves

# Options of migrate_shards that have no meaning with --rolling, which upgrades whole pairs.
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
        "--abort",
        action="store_true",
        help="With --rolling: give the shards whose upgrade is not finished their old schema back. Possible"
        " until the other side begins to get the new schema.",
    )
    group.add_argument(
        "--stop-writes",
        action="store_true",
        help="With --rolling: let the shards of a round refuse writes until both sides have the new schema,"
        " so that more operations can be done. --plan shows for how long.",
    )
    group.add_argument(
        "--timeout",
        type=seconds,
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
    """Refuse options of a rolling upgrade without ``--rolling``.

    :raises CommandError: one of these options is used.
    """
    for name in ("pair", "until", "drop_defaults", "abort", "stop_writes"):
        if options[name]:
            raise CommandError(f"{_option(name)} needs --rolling.")


def run_rolling(command: BaseCommand, options: Mapping[str, Any], migrate: MigrateOptions) -> None:
    """Execute ``migrate_shards --rolling`` with the parsed options.

    :raises CommandError: an option makes no sense with ``--rolling``, or the upgrade was stopped.
    """
    for name in _REFUSED:
        if options[name] not in (None, False):
            raise CommandError(f"{_option(name)} makes no sense with --rolling.")
    if options["stop_writes"] and options["until"]:
        raise CommandError(
            "--until makes no sense with --stop-writes: writes would wait meanwhile."
        )
    for name in ("plan", "until", "drop_defaults"):
        if options["abort"] and options[name]:
            raise CommandError(f"{_option(name)} makes no sense with --abort.")
    pairs = all_pairs()
    if options["abort"]:
        # Abort the upgrade of the only pair whose upgrade is not finished. If there is no such
        # pair, take any pair: to abort its upgrade changes nothing.
        pairs = [pair for pair in pairs if unfinished(*pair)] or pairs[:1]
    if options["pair"]:
        pairs = [(options["pair"][0], options["pair"][1])]
    if not pairs:
        raise CommandError("The topology has no pairs: a range of a pair has 'pair' and 'active'.")
    for first, second in pairs:
        if options["plan"]:
            plan = find_plan(first, second, migrate, stop_writes=options["stop_writes"])
            _write_plan(command, options, plan)
        elif options["drop_defaults"]:
            dropped = column_defaults.drop_kept_defaults(first, second)
            _write(command, options, {"dropped": dropped}, f"Dropped {len(dropped)} defaults.")
        elif options["abort"]:
            _abort(command, options, migrate, first, second)
        else:
            _upgrade(command, options, migrate, first, second)


def _abort(
    command: BaseCommand,
    options: Mapping[str, Any],
    migrate: MigrateOptions,
    first: str,
    second: str,
) -> None:
    with _running(command, options) as (progress, stopping, tell):
        undone = rolling_abort.abort(
            first, second, _rolling_options(options, migrate), progress, stopping, tell
        )
    text = f"{first} and {second}: the upgrade is aborted; {undone or 'no shard'} got the old schema back."
    shards = {} if undone is None else {name: list(n) for name, n in undone.numbers.items()}
    _write(command, options, {"ok": True, "undone": shards}, text)


def _rolling_options(
    options: Mapping[str, Any], migrate: MigrateOptions
) -> rolling_upgrade.RollingOptions:
    return rolling_upgrade.RollingOptions(
        migrate,
        options["until"] or "",
        options["stop_writes"],
        options["timeout"],
        Waves(options["canary"], options["parallel"], pause=options["pause"]),
    )


@contextmanager
def _running(
    command: BaseCommand, options: Mapping[str, Any]
) -> Iterator[tuple[ShardProgress, Stopping, Callable[[str], None]]]:
    """Context manager. SIGINT and SIGTERM stop the operation in its block.

    If the operation is refused and the command has the option ``--json``, the reasons are also
    printed as JSON.
    """
    progress = ShardProgress(command, options["verbosity"], bar=not options["json"])
    with stop_signals() as stopping:
        try:
            yield progress, stopping, line_writer(command, dict(options))
        except OperationStopped as exc:
            raise CommandError(str(exc), returncode=stopping.status) from exc
        except (AbortRefused, PairRefused, RollingRefused, SwitchRefused) as exc:
            if options["json"]:
                _write(command, options, {"ok": False, "problems": list(exc.problems)}, "")
            raise


def _upgrade(
    command: BaseCommand,
    options: Mapping[str, Any],
    migrate: MigrateOptions,
    first: str,
    second: str,
) -> None:
    with _running(command, options) as (progress, stopping, tell):
        report = rolling_upgrade.upgrade(
            first, second, _rolling_options(options, migrate), progress, stopping, tell
        )
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
    steps = STOPPED_STEPS if plan.stop_writes else STEPS
    pauses = rolling_upgrade.estimate_pauses(plan) if plan.stop_writes else []
    for number, each in enumerate(plan.rounds, 1):
        lines.append(f"Round {number}, while all processes run the old release:")
        for step in steps:
            described = rolling_upgrade.describe(step, each, stop_writes=plan.stop_writes)
            lines.append(f"    {step}: {described}")
        if plan.stop_writes:
            lines.append(
                f"    Writes of these shards wait for about {pauses[number - 1]:.0f} s. --abort goes back"
                " until migrate-active begins."
            )
        else:
            lines.append(
                "    --abort goes back until migrate-other begins; after the switch only if no release has"
                " written new columns or tables."
            )
    if plan.rounds:
        lines += _afterwards(plan)
    content = {**plan.to_json(), "pauses": [round(pause, 1) for pause in pauses]}
    _write(command, options, content, "\n".join(lines))


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
