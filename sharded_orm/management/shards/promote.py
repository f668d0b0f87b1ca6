"""The action ``promote`` of ``manage.py shards``: replace a primary by its replica."""

from __future__ import annotations

import json
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser
from django.db import Error

from sharded_orm.exceptions import LeaseLost, OperationHeld, TopologyError
from sharded_orm.management.actions import Action, line_writer
from sharded_orm.management.arguments import seconds
from sharded_orm.management.confirmation import confirms_loss_of
from sharded_orm.operations import promotion
from sharded_orm.operations.exceptions import JournalMissing, PromotionFailed, PromotionRefused


class Promote(Action):
    name = "promote"
    help = (
        "Replace a primary by its replica, for all its ranges, without losing a write. After an"
        " interruption, run the command again to go on."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "node", metavar="NODE", help="The primary that its replica shall replace."
        )
        parser.add_argument(
            "--to", metavar="NODE", help="Refuse if the replica is another node than this."
        )
        parser.add_argument(
            "--timeout",
            type=seconds,
            default=promotion.PromotionOptions().timeout,
            metavar="SECONDS",
            help="The time in which the replica must catch up; writers may wait as long. Default:"
            " %(default)g",
        )
        parser.add_argument(
            "--force",
            action="store_true",
            help="The primary is dead: writes that the replica has not received are lost.",
        )
        parser.add_argument(
            "--noinput", "--no-input", action="store_false", dest="interactive",
            help="Do not ask before --force.",
        )  # fmt: skip
        mode = parser.add_mutually_exclusive_group()
        mode.add_argument(
            "--check", action="store_true", help="Only check whether it could be done now."
        )
        mode.add_argument(
            "--abort", action="store_true", help="Undo a promotion that was interrupted."
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        promotion_options = promotion.PromotionOptions(
            force=options["force"], timeout=options["timeout"]
        )
        tell = line_writer(command, options)

        def confirm(plan: promotion.PromotionPlan, loss: promotion.Loss) -> bool:
            command.stderr.write(command.style.WARNING(f"{loss}\n{_WARNING.format(plan=plan)}"))
            return not options["interactive"] or confirms_loss_of(plan.node)

        try:
            if options["check"]:
                report = promotion.check(
                    options["node"], to=options["to"], options=promotion_options
                )
            elif options["abort"]:
                aborted = promotion.abort(options["node"], tell=tell)
                if aborted is None:
                    raise CommandError(
                        f"No promotion that replaces {options['node']!r} was broken off."
                    )
                report = aborted
            else:
                report = promotion.promote(
                    options["node"],
                    to=options["to"],
                    options=promotion_options,
                    confirm=confirm,
                    tell=tell,
                )
        except PromotionRefused as exc:
            _write_json(command, options, {"outcome": "refused", "problems": exc.problems})
            raise
        except (CommandError, JournalMissing, OperationHeld, TopologyError) as exc:
            # These errors are raised only before the promotion has changed anything, so the outcome
            # is "refused". The next "except" is about later errors.
            _write_json(command, options, {"outcome": "refused", "problems": [str(exc)]})
            raise
        except (PromotionFailed, LeaseLost, Error) as exc:
            settled = isinstance(exc, PromotionFailed) and exc.settled
            report_json = {"outcome": "failed", "settled": settled, "problems": [str(exc)]}
            _write_json(command, options, report_json)
            raise
        _write_json(command, options, report.to_json())
        if not options["json"]:
            _show(command, report)


def _write_json(command: BaseCommand, options: dict[str, Any], report_json: dict[str, Any]) -> None:
    if options["json"]:
        command.stdout.write(json.dumps(report_json, indent=2))


_WARNING = (
    "{plan.node} is not fenced: make sure that it stays down. If it came back, processes that do not"
    " know the new map yet would write to it."
)


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
    command.stdout.write(report.afterwards)


ACTIONS: tuple[type[Action], ...] = (Promote,)
