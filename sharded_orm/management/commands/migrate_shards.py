"""``manage.py migrate_shards``: apply Django's migrations to all shards or a selection of them."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management import BaseCommand, CommandError
from django.core.management.base import no_translations
from django.db import Error

from sharded_orm import runtime
from sharded_orm.exceptions import OperationHeld, ShardedOrmError
from sharded_orm.management.arguments import seconds
from sharded_orm.management.changed_models import apps_without_migration
from sharded_orm.management.error_text import error_text
from sharded_orm.management.progress import ShardProgress, failure_line
from sharded_orm.management.rolling_options import add_rolling, refuse_without_rolling, run_rolling
from sharded_orm.management.selection import add_selection, selection_of
from sharded_orm.management.stop_signals import stop_signals
from sharded_orm.management.tables import write_table
from sharded_orm.operations.exceptions import SwitchFailed
from sharded_orm.operations.migrate import MigrateOptions, migration_run
from sharded_orm.operations.pairs import switch_runner, upgrade_state
from sharded_orm.operations.runs.rollout import Waves
from sharded_orm.operations.selection import Selected, numbers_text

# Options of Django's migrate command that this command refuses, each with the reason.
_REFUSED = {
    "database": "shards are chosen by --group, --shards and --node; for one of DATABASES, or one"
    " shard as Django does it, there is 'migrate --database'",
    "prune": "it deletes records of migrations whose files are gone, by what one database says;"
    " other shards may still need them. Do it with 'migrate --database SHARD --prune' for each",
    "run_syncdb": "it makes tables that no migration knows, so that nobody could tell which shards"
    " have them. Give the app migrations",
}


class Command(BaseCommand):
    help = (
        "Migrates shards, several at a time, and goes on where it was stopped or killed. The global"
        " database is migrated by plain 'migrate', and a directory with a database of its own by"
        " 'migrate --database ALIAS'. Ticket servers need no migration."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("app_label", nargs="?", help="Migrate only this app.")
        parser.add_argument(
            "migration_name",
            nargs="?",
            help="Migrate the app to this state, also backwards; 'zero' for none.",
        )
        add_selection(parser)
        parser.add_argument(
            "--create",
            action="store_true",
            help="Create schemas and files of shards that do not exist yet.",
        )
        parser.add_argument(
            "--fake", action="store_true", help="Record migrations without running them."
        )
        parser.add_argument(
            "--fake-initial",
            action="store_true",
            help="Only record initial migrations whose tables exist already.",
        )
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")
        parser.add_argument(
            "--noinput", "--no-input", action="store_false", dest="interactive",
            help="As in migrate; this command never asks.",
        )  # fmt: skip

        waves = parser.add_argument_group("waves")
        default = Waves()
        waves.add_argument(
            "--canary",
            type=int,
            metavar="N",
            default=default.canary,
            help="Migrate N shards first, and no others if one of them fails. Default: %(default)s",
        )
        waves.add_argument(
            "--parallel",
            type=int,
            metavar="N",
            default=default.parallel,
            help="Migrate N shards of each node at the same time. Default: %(default)s",
        )
        waves.add_argument(
            "--wave-size", type=int, metavar="N", help="Number of shards in a wave. Default: all."
        )
        waves.add_argument(
            "--pause",
            type=seconds,
            metavar="SECONDS",
            default=default.pause,
            help="The time between two waves. Default: %(default)s",
        )
        waves.add_argument(
            "--max-failures",
            type=int,
            metavar="N",
            help="After more than N failures, begin with no further shard. Default: no limit.",
        )

        add_rolling(parser)
        modes = parser.add_argument_group("instead of migrating").add_mutually_exclusive_group()
        modes.add_argument("--plan", action="store_true", help="Show what would be done.")
        modes.add_argument(
            "--check",
            action="store_true",
            dest="check_unapplied",
            help="Exit with status 1 if a shard is not migrated. Changes nothing.",
        )
        modes.add_argument(
            "--status", action="store_true", help="Show the shards by state, and the failures."
        )
        modes.add_argument(
            "--retry-failed", action="store_true", help="Migrate only shards that have failed."
        )
        modes.add_argument(
            "--settle",
            metavar="ALIAS=done|undone",
            help="Declare whether an interrupted operation on a shard, whose outcome is unknown, took effect.",
        )
        refused = parser.add_argument_group("not here")
        for name, reason in _REFUSED.items():
            refused.add_argument(
                f"--{name.replace('_', '-')}", nargs="?", const=True, help=f"Refused: {reason}."
            )

    @no_translations
    def handle(self, **options: Any) -> None:
        for name, reason in _REFUSED.items():
            if options[name] is not None:
                raise CommandError(f"--{name.replace('_', '-')} makes no sense here: {reason}.")
        if options["migration_name"] and not options["app_label"]:
            raise CommandError("A migration is named after its app.")
        try:
            if options["rolling"]:
                run_rolling(self, options, _options(options))
                return
            refuse_without_rolling(options)
            if options["settle"]:
                self._settle(options["settle"], as_json=options["json"])
            elif options["plan"] or options["check_unapplied"] or options["status"]:
                self._show_state(options)
            else:
                self._migrate(options)
        except (ShardedOrmError, ImproperlyConfigured, Error) as exc:
            raise CommandError(error_text(exc)) from exc

    # ##### Migrating #####

    def _migrate(self, options: dict[str, Any]) -> None:
        request = migration_run.MigrationRequest(
            _options(options),
            Waves(
                options["canary"],
                options["parallel"],
                options["wave_size"],
                options["pause"],
                options["max_failures"],
            ),
            create=options["create"],
            retry_failed=options["retry_failed"],
        )
        progress = ShardProgress(self, options["verbosity"], bar=not options["json"])
        reports: list[migration_run.MigrationReport] = []
        # If another process is migrating a group, this maps the group's name to the error message.
        held: dict[str, str] = {}
        not_begun: list[str] = []
        # A pair is two servers that replicate from each other. For each shard, the passive side
        # has to refuse writes. Each item is a sentence about a passive side that may still accept
        # writes to new tables.
        unfenced: list[str] = []
        with stop_signals() as stopping:
            for selection in selection_of(options):
                if stopping():
                    not_begun.append(selection.group.name)
                    continue
                try:
                    report = migration_run.migrate(selection, request, progress, stopping)
                    reports.append(report)
                    if report.ok and report.migrated:
                        unfenced += self._fence_new_tables(selection)
                except OperationHeld as exc:
                    held[selection.group.name] = str(exc)
                    self.stderr.write(str(exc))
        ok = all(report.ok for report in reports) and not held and not not_begun
        if options["json"]:
            self._json({
                "ok": ok and not unfenced,
                "unfenced": unfenced,
                "stopped": stopping.cause,
                "groups": {report.group: _report_json(report) for report in reports},
                "not_begun": not_begun,
                "held": held,
            })  # fmt: skip
        else:
            self._print_reports(reports, options)
        if not ok:
            unfenced.insert(0, _failure_text(reports, held, not_begun))
        if unfenced:
            raise CommandError(" ".join(unfenced), returncode=stopping.status)

    def _fence_new_tables(self, selection: Selected) -> Iterator[str]:
        """Make the passive sides of pairs refuse writes to the tables that migrations have created.

        A pair is two servers that replicate from each other. The application writes to the active
        side of a shard only, and a write to the passive side would be a mistake.

        Yields a sentence if a passive side may still accept writes. If a passive side only lags
        behind, as after the change of a large table, a warning is printed instead.
        """
        group = selection.group
        shards = [shard for shard in selection.shards if group.range_of(shard.number).is_pair]
        if not shards:
            return
        try:
            switch_runner.fence_passive_sides(group.name, [shard.number for shard in shards])
        except (ShardedOrmError, Error) as exc:
            sentence = (
                f"The shards of {group.name} are migrated, but passive sides of pairs may accept writes to"
                f" new tables ({exc}). When the cause is mended, run 'manage.py shards switch"
                f" {group.name} {numbers_text(shards)} --fence'."
            )
            if isinstance(exc, SwitchFailed):
                self.stderr.write(self.style.WARNING(sentence))
            else:
                yield sentence

    def _print_reports(
        self, reports: Sequence[migration_run.MigrationReport], options: Mapping[str, Any]
    ) -> None:
        for report in reports:
            if report.missing:
                names = numbers_text(report.missing)
                self.stderr.write(
                    f"{report.group}: shards that do not exist: {names} ({len(report.missing)}). Make"
                    " them with 'migrate_shards --create'; or correct DATABASE_NAME or the node."
                )
        selected_all = sum(report.selected for report in reports)
        current = sum(report.current for report in reports)
        if not options["verbosity"]:
            return
        if options["retry_failed"] and not selected_all:
            self.stdout.write("No shard has failed.")
        elif all(report.ok for report in reports) and reports:
            already = f", {current} of them before" if current else ""
            done = "1 shard is" if selected_all == 1 else f"{selected_all} shards are"
            self.stdout.write(self.style.SUCCESS(f"{done} migrated{already}."))
            # As Django's migrate does, look for forgotten migrations if there was nothing to do.
            # Leave apps without tables on these shards to Django's command, which makes their tables.
            aliases = [runtime.group(report.group).shard(0).alias for report in reports]
            if current == selected_all and (labels := apps_without_migration(aliases)):
                self.stdout.write(
                    self.style.NOTICE(
                        f"Models of {', '.join(map(repr, labels))} have changes that no migration has. Run"
                        " 'manage.py makemigrations', and then 'manage.py migrate_shards' again."
                    )
                )

    # ##### Showing the state #####

    def _show_state(self, options: dict[str, Any]) -> None:
        migrate_options = _options(options)
        selections = [
            (selection, migration_run.status(selection, migrate_options))
            for selection in selection_of(options)
        ]
        statuses = [status for _, status in selections]
        if options["json"]:
            self._json({
                "ok": all(status.ok for status in statuses),
                "groups": {status.group: _status_json(status) for status in statuses},
            })  # fmt: skip
        elif options["plan"]:
            for selection, status in selections:
                self._plan(selection, status, migrate_options)
        else:
            self._status(statuses, full=options["status"])
        if options["check_unapplied"] and not all(status.ok for status in statuses):
            selected_all = sum(status.selected for status in statuses)
            current = sum(status.current for status in statuses)
            raise CommandError(
                f"Not migrated: {selected_all - current} of {selected_all} shards."
                if current < selected_all
                else "Operations of an earlier run are not ended; see --status."
            )

    def _plan(
        self,
        selection: Selected,
        status: migration_run.MigrationStatus,
        migrate_options: MigrateOptions,
    ) -> None:
        self.stdout.write(
            self.style.MIGRATE_HEADING(
                f"{status.group}: {status.selected} shards, {status.current} of them current"
            )
        )
        for number, plan in status.plans:
            self.stdout.write(f"Shards: {number}")
            for line in plan:
                self.stdout.write(f"    {line}")
        if status.missing:
            self.stdout.write(
                f"Shards that do not exist, unless --create makes them:"
                f" {numbers_text(status.missing)} ({len(status.missing)})"
            )
        self._unreachable(status)

    def _status(self, statuses: Sequence[migration_run.MigrationStatus], *, full: bool) -> None:
        write_table(
            self,
            ("group", ">shards", ">current", ">behind", ">missing", ">unreachable", ">failed",
             ">unclear", ">interrupted"),
            [
                (status.group, *map(str, (
                    status.selected, status.current, status.behind, len(status.missing),
                    len(status.unreachable), status.left.get("failed", 0),
                    status.left.get("unclear", 0),
                    status.left.get("running", 0) + status.left.get("stopped", 0),
                )))
                for status in statuses
            ],
        )  # fmt: skip
        for status in statuses:
            if full and status.run is not None:
                self.stdout.write(_run_line(status))
            self._unreachable(status)
            for failure in status.failures:
                self.stdout.write(self.style.ERROR(failure_line(failure)))

    def _unreachable(self, status: migration_run.MigrationStatus) -> None:
        for alias, error in status.unreachable.items():
            self.stdout.write(self.style.ERROR(f"{alias}: unreachable: {error}"))

    # ##### Declare the outcome of an interrupted operation #####

    def _settle(self, text: str, *, as_json: bool) -> None:
        alias, _, answer = text.partition("=")
        if answer not in ("done", "undone"):
            raise CommandError(
                f"--settle takes the alias of a shard and what you found, such as"
                f" photos_00042=done or photos_00042=undone; not {text!r}."
            )
        migration_run.settle(alias, done=answer == "done")
        if as_json:
            self._json({"ok": True, "settled": {alias: answer}})
        else:
            self.stdout.write(
                f"{alias}: its operation counts as {answer}. 'migrate_shards' goes on."
            )

    def _json(self, value: dict[str, Any]) -> None:
        self.stdout.write(json.dumps(value, indent=2))


def _options(options: Mapping[str, Any]) -> MigrateOptions:
    return MigrateOptions(
        targets=(options["app_label"], options["migration_name"]),
        fake=options["fake"],
        fake_initial=options["fake_initial"],
    )


def _failure_text(
    reports: Sequence[migration_run.MigrationReport],
    held: Mapping[str, str],
    not_begun: Sequence[str],
) -> str:
    """Return the error message for the case that not all shards were migrated."""
    total = sum(report.selected for report in reports)
    failed = sum(len(report.failures) + len(report.missing) for report in reports)
    parts = []
    if failed:
        parts.append(f"Not migrated: {failed} of {total} shards.")
    for report in reports:
        if report.stopped:
            parts.append(
                f"{report.group}: {report.stopped}; shards not begun or not ended: {report.left}."
            )
    if not_begun:
        parts.append(f"Not begun: {', '.join(not_begun)}.")
    if held and (upgrade := upgrade_state.broken_off()):
        parts.append(f"{', '.join(held)}: not migrated. {upgrade}")
    elif held:
        parts.append(f"Another process migrates {', '.join(held)}.")
    return " ".join([*parts, "The same command goes on from here."])


def _report_json(report: migration_run.MigrationReport) -> dict[str, Any]:
    return {
        "run": report.run,
        "ok": report.ok,
        "selected": report.selected,
        "current": report.current,
        "migrated": report.migrated,
        "left": report.left,
        "stopped": report.stopped,
        "missing": [shard.alias for shard in report.missing],
        "failures": [asdict(failure) for failure in report.failures],
    }


def _status_json(status: migration_run.MigrationStatus) -> dict[str, Any]:
    run = status.run
    return {
        "ok": status.ok,
        "selected": status.selected,
        "current": status.current,
        "behind": status.behind,
        "missing": [shard.alias for shard in status.missing],
        "unreachable": status.unreachable,
        "left": status.left,
        "failures": [asdict(failure) for failure in status.failures],
        "plans": [{"shards": number, "migrations": plan} for number, plan in status.plans],
        "run": None if run is None else {
            "id": run.id,
            "state": run.state,
            "error": run.error,
            "holder": run.holder,
            "started_at": run.started_at.isoformat(),
            "finished_at": run.finished_at and run.finished_at.isoformat(),
            "steps": status.steps,
        },
    }  # fmt: skip


def _run_line(status: migration_run.MigrationStatus) -> str:
    run = status.run
    assert run is not None
    steps = ", ".join(f"{number} {state}" for state, number in status.steps.items())
    when = f"{run.started_at:%Y-%m-%d %H:%M:%S}"
    why = f" ({run.error})" if run.error else ""
    return f"{status.group}: run {run.id} of {when} by {run.holder}: {run.state}{why}; {steps}"
