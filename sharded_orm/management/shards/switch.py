"""The action ``switch`` of ``manage.py shards``: change which server of a pair takes shards' writes."""

from __future__ import annotations

import json
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser

from sharded_orm import runtime
from sharded_orm.management.actions import Action, line_writer
from sharded_orm.management.arguments import positive
from sharded_orm.management.confirmation import confirms_loss_of
from sharded_orm.management.selection import shard_numbers
from sharded_orm.management.shards.move import raise_failures, refusals_as_json
from sharded_orm.management.stop_signals import stop_signals
from sharded_orm.operations.exceptions import SwitchRefused
from sharded_orm.operations.pairs import switch_runner, upgrade_end, upgrade_state
from sharded_orm.operations.pairs.report import SwitchOptions, SwitchReport, UnsentWrites


class Switch(Action):
    name = "switch"
    help = (
        "Make the other server of their pair the active side of shards, while the site reads and writes"
        " them. After an interruption, run the command again to go on."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("group", metavar="GROUP", help="A group of shards.")
        parser.add_argument(
            "shards", nargs="?", type=shard_numbers, metavar="SHARDS", help="Such as 0-7,12."
        )
        parser.add_argument(
            "--to-side",
            metavar="NODE",
            help="The side that is to be active. Default: the other side of each shard",
        )
        parser.add_argument(
            "--all-from",
            metavar="NODE",
            help="Instead of SHARDS: all shards of the group that are active on this node.",
        )
        parser.add_argument(
            "--patience",
            type=positive,
            default=SwitchOptions().patience,
            metavar="SECONDS",
            help="The time in which the other side must catch up, and transactions must end; writers may"
            " wait as long. Default: %(default)g",
        )
        parser.add_argument(
            "--force",
            action="store_true",
            help="The side --all-from is dead: give it up. Writes that the other side has not received are"
            " lost, unless the dead side comes back and rejoins ('manage.py pairs rejoin').",
        )
        parser.add_argument(
            "--noinput", "--no-input", action="store_false", dest="interactive",
            help="Do not ask before --force.",
        )  # fmt: skip
        mode = parser.add_mutually_exclusive_group()
        mode.add_argument(
            "--check", action="store_true", help="Only check, and show what would be switched."
        )
        mode.add_argument(
            "--fence",
            action="store_true",
            help="Switch nothing, but make the passive sides of SHARDS refuse writes on all tables: after"
            " RANGES got a pair, and after tables were created.",
        )
        mode.add_argument(
            "--repair",
            action="store_true",
            help="End a switch that was broken off. A shard stays on its side, unless the other side was"
            " published already.",
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        if options["force"] and (options["repair"] or options["fence"]):
            raise CommandError("--force goes with neither --repair nor --fence.")
        tell = line_writer(command, options)
        group, status = options["group"], 1

        def confirm(loss: UnsentWrites) -> bool:
            command.stderr.write(command.style.WARNING(str(loss)))
            return not options["interactive"] or confirms_loss_of(loss.node)

        with refusals_as_json(command, options, group=group):
            if options["repair"]:
                report = switch_runner.repair(group, tell=tell)
            elif options["fence"]:
                _fence(command, options, tell)
                return
            elif options["check"]:
                _check(command, options)
                return
            else:
                with stop_signals() as stopping:
                    report = switch_runner.switch_sides(
                        group,
                        _numbers(options),
                        to_side=options["to_side"],
                        all_from=options["all_from"],
                        options=_switch_options(options),
                        confirm=confirm,
                        stopping=stopping,
                        tell=tell,
                    )
                status = stopping.status
        _show(command, report, as_json=options["json"], is_repair=options["repair"])
        raise_failures([report], status)


def _numbers(options: dict[str, Any]) -> list[int] | None:
    if (options["shards"] is None) == (options["all_from"] is None):
        raise CommandError(
            "Name either SHARDS or --all-from NODE, such as: shards switch photos 0-7 --to-side db1b"
        )
    if options["shards"] is None:
        return None
    return [number for part in options["shards"] for number in part]


def _switch_options(options: dict[str, Any]) -> SwitchOptions:
    return SwitchOptions(options["patience"], force=options["force"])


def _check(command: BaseCommand, options: dict[str, Any]) -> None:
    # During a rolling upgrade, the two servers of a pair differ on purpose. The check would call
    # this a problem, and its advice would spoil the upgrade. So refuse the check meanwhile.
    if not options["force"] and (upgrade := upgrade_state.unfinished_run()):
        raise SwitchRefused([upgrade_state.unfinished(*upgrade.arguments["pair"])])
    plan = switch_runner.check_switch(
        options["group"],
        _numbers(options),
        to_side=options["to_side"],
        all_from=options["all_from"],
        options=_switch_options(options),
    )
    if options["json"]:
        changes = [change.to_json() for change in plan.changes]
        command.stdout.write(json.dumps({"changes": changes, "already": plan.already}, indent=2))
        return
    for change in plan.changes:
        command.stdout.write(f"{change} from {change.source} to {change.target}")
    if plan.already:
        command.stdout.write(f"{len(plan.already)} shards are active there already.")
    if options["force"] and (sides := upgrade_end.upgraded_sides(options["all_from"])):
        command.stdout.write(f"The rolling upgrade of {' and '.join(sorted(sides))} ends.")
    command.stdout.write("Nothing was changed.")


def _fence(command: BaseCommand, options: dict[str, Any], tell: Any) -> None:
    numbers = _numbers(options)
    if numbers is None or options["to_side"] is not None:
        raise CommandError("--fence needs SHARDS, and neither --to-side nor --all-from.")
    runtime.refresh()
    count = switch_runner.fence_passive_sides(options["group"], numbers, tell=tell)
    if options["json"]:
        command.stdout.write(json.dumps({"ok": True, "fenced": count}, indent=2))
        return
    command.stdout.write(f"The passive sides of {count} shards refuse writes.")


def _show(command: BaseCommand, report: SwitchReport, *, as_json: bool, is_repair: bool) -> None:
    if as_json:
        command.stdout.write(json.dumps(report.to_json(), indent=2))
        return
    if report.already:
        command.stdout.write(f"{len(report.already)} shards were active there already.")
    for note in report.notes:
        command.stdout.write(f"Note: {note}.")
    if is_repair and report.ok and not report.switched:
        command.stdout.write(command.style.SUCCESS("No switch is under way any more."))
        return
    text = f"{len(report.switched)} shards switched"
    if report.pauses:
        text += f"; writes waited for {max(report.pauses) * 1000:.0f} ms at most"
    command.stdout.write(command.style.SUCCESS(f"{text}.") if report.ok else f"{text}.")


ACTIONS: tuple[type[Action], ...] = (Switch,)
