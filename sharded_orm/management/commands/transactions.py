"""``manage.py transactions``: end prepared branches, which are the parts on single shards of
transactions in two phases.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterator
from typing import Any

from django.core.management import BaseCommand
from django.core.management.base import CommandParser
from django.db import Error

from sharded_orm import runtime
from sharded_orm.exceptions import TwoPhaseUnavailable
from sharded_orm.management.actions import Action, CommandOfActions, problems_error
from sharded_orm.topology.model import ShardGroup
from sharded_orm.two_phase import recovery
from sharded_orm.two_phase.app import APP, is_enabled, refusal_of


class Recover(Action):
    name = "recover"
    help = (
        "Commit or roll back the prepared branches whose process has died, and delete old decisions."
        " Can run at any time, also several times at once; exit status 1 if a branch is left."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--group",
            metavar="GROUP",
            help="Only this group. By default all whose servers can prepare transactions.",
        )
        parser.add_argument(
            "--grace",
            type=_seconds,
            default=recovery.GRACE,
            metavar="SECONDS",
            help="End only branches that were prepared longer ago than this. Default: %(default)s",
        )
        parser.add_argument(
            "--keep-decisions",
            action="store_true",
            help="Do not delete old decisions: deleting takes a statement for each shard.",
        )

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        problems: list[str] = []
        for group in _groups(options["group"]):
            failures: dict[str, Error] = {}
            results = recovery.recover(group, grace=options["grace"], failures=failures, logs=False)
            for result in results:
                # Print only the branches (parts of transactions on single shards) that have ended
                # now. The error at the end lists the branches that could not be ended.
                if result.is_over:
                    command.stdout.write(str(result))
            left = [result for result in results if not result.is_over]
            problems += map(str, left)
            problems += (
                f"Node {node!r} does not answer: {exc}. Its branches keep their locks. Start it, or correct its"
                " HOST, PORT, USER and PASSWORD in NODES; then run the command again."
                for node, exc in failures.items()
            )
            count = 0
            if not failures and not options["keep_decisions"]:
                count = recovery.forget_decisions(group)
            if options["verbosity"]:
                command.stdout.write(
                    f"{group.name}: {len(results)} branches, {len(left)} left;"
                    f" {count} old decisions deleted"
                )
        if problems:
            raise problems_error(problems)


class Command(CommandOfActions):
    help = "Ends transactions in two phases whose process has died."
    # Skip the system checks: they concern the models, and their warnings would hide this command's
    # output.
    requires_system_checks = []
    actions = (Recover,)


def _groups(name: str | None) -> Iterator[ShardGroup]:
    """Yield the shard groups whose prepared branches are to be ended.

    A prepared branch is the part on one shard of a transaction that is committed in two phases.

    :param name: the name of the only group; None for every group that can commit in two phases.
    :raises TwoPhaseUnavailable: the site does not use commits in two phases, or group ``name``
        cannot commit in this way.
    """
    if not is_enabled():
        raise TwoPhaseUnavailable(
            f"The app {APP!r} is not installed, so no transaction of this site is in two phases."
        )
    groups = [runtime.group(name)] if name else list(runtime.topology().groups.values())
    for group in groups:
        refusal = refusal_of(group.name)
        if not refusal:
            yield group
        elif name:
            raise TwoPhaseUnavailable(f"Group {name!r} has no branches: {refusal}.")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 3600:
        raise ArgumentTypeError(f"a number of seconds from 0 to 3600, not {text!r}")
    return seconds
