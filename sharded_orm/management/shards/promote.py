"""``shards promote``."""

from __future__ import annotations

import json
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser
from django.db import Error

from sharded_orm.exceptions import (
    JournalMissing,
    LeaseLost,
    OperationHeld,
    PromotionFailed,
    PromotionRefused,
    TopologyError,
)
from sharded_orm.management.actions import Action, teller
from sharded_orm.operations import promotion


class Promote(Action):
    name = "promote"
    help = (
        "Replace a primary by its replica, for all its ranges, without losing a write. Run it again"
        " to go on after it was broken off."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "node", metavar="NODE", help="The primary that is to be replaced by its replica."
        )
        parser.add_argument(
            "--to", metavar="NODE", help="What the replica must be; to be on the safe side."
        )
        parser.add_argument(
            "--timeout",
            type=float,
            default=promotion.PromotionOptions().timeout,
            metavar="SECONDS",
            help="What the replica has to catch up; writers may wait as long. Default: %(default)g",
        )
        parser.add_argument(
            "--force",
            action="store_true",
            help="The primary is dead: what the replica has not received is lost.",
        )
        parser.add_argument(
            "--noinput", "--no-input", action="store_false", dest="interactive",
            help="Do not ask before --force.",
        )  # fmt: skip
        mode = parser.add_mutually_exclusive_group()
        mode.add_argument(
            "--check", action="store_true", help="Only tell whether it could be done now."
        )
        mode.add_argument(
            "--abort", action="store_true", help="Undo a promotion that was broken off."
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        how = promotion.PromotionOptions(force=options["force"], timeout=options["timeout"])
        tell = teller(command, options)

        def confirm(plan: promotion.PromotionPlan, loss: promotion.Loss) -> bool:
            command.stderr.write(command.style.WARNING(f"{loss}\n{_WARNING.format(plan=plan)}"))
            return not options["interactive"] or _answers(plan.node)

        try:
            if options["check"]:
                report = promotion.check(options["node"], to=options["to"], options=how)
            elif options["abort"]:
                undone = promotion.abort(options["node"], tell=tell)
                if undone is None:
                    raise CommandError(
                        f"No promotion that replaces {options['node']!r} was broken off."
                    )
                report = undone
            else:
                report = promotion.promote(
                    options["node"], to=options["to"], options=how, confirm=confirm, tell=tell
                )
        except PromotionRefused as exc:
            _write_json(command, options, {"outcome": "refused", "problems": exc.problems})
            raise
        except (CommandError, JournalMissing, OperationHeld, TopologyError) as exc:
            # Before this process has touched anything; later they are PromotionFailed.
            _write_json(command, options, {"outcome": "refused", "problems": [str(exc)]})
            raise
        except (PromotionFailed, LeaseLost, Error) as exc:
            settled = isinstance(exc, PromotionFailed) and exc.settled
            told = {"outcome": "failed", "settled": settled, "problems": [str(exc)]}
            _write_json(command, options, told)
            raise
        _write_json(command, options, report.to_json())
        if not options["json"]:
            _show(command, report)


def _write_json(command: BaseCommand, options: dict[str, Any], told: dict[str, Any]) -> None:
    if options["json"]:
        command.stdout.write(json.dumps(told, indent=2))


_WARNING = (
    "{plan.node} is not fenced: make sure that it stays down. If it came back, processes that do not"
    " know the new map yet would write to it."
)


def _answers(node: str) -> bool:
    try:
        return input(f"Type the name of the node that is given up ({node}) to go on: ") == node
    except EOFError as exc:
        raise CommandError("Nobody can be asked here: use --no-input.") from exc


def _show(command: BaseCommand, report: promotion.PromotionReport) -> None:
    plan = report.plan
    for warning in report.warnings:
        command.stderr.write(command.style.WARNING(f"{warning}."))
    moves = ", ".join(map(str, plan.moves))
    if report.outcome == "checked":
        command.stdout.write(f"{plan.new} can take the place of {plan.node} for {moves}.")
        if report.loss is not None:
            command.stdout.write(str(report.loss))
        return
    waited = f"; writes were refused for {report.pause}" if report.pause else ""
    if report.outcome == "undone":
        command.stdout.write(f"{plan.node} is the primary as before{waited}.")
        return
    command.stdout.write(f"{plan.new} is the primary of {moves}{waited}.")
    if report.loss is not None:
        command.stdout.write(str(report.loss))
    command.stdout.write(
        f"Set read_only in the configuration of both servers: ON for {plan.node}, OFF for {plan.new}."
        " A restart forgets what was set now."
    )


ACTIONS: tuple[type[Action], ...] = (Promote,)
