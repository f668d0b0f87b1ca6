"""``manage.py migrate_shards``: create missing shards and migrate each of them."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError
from typing import Any

from django.core.management import BaseCommand, CommandError, call_command
from django.db import DatabaseError, connections

from sharded_orm import runtime
from sharded_orm.topology.model import Shard, ShardGroup


class Command(BaseCommand):
    help = (
        "Creates the databases of shards that do not exist yet and migrates every shard. The global"
        " database, the directory and the ticket servers are migrated by plain 'migrate'."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("app_label", nargs="?", help="Migrate only this app.")
        parser.add_argument("migration_name", nargs="?", help="Migrate the app to this state.")
        parser.add_argument("--group", help="Only the shards of this group.")
        parser.add_argument(
            "--shards", type=_numbers, help="Only these numbers, e.g. 0-511,700; with --group."
        )

    def handle(self, **options: Any) -> None:
        shards = list(self._selected(options["group"], options["shards"]))
        target = [name for name in (options["app_label"], options["migration_name"]) if name]
        failed: dict[str, Exception] = {}
        for done, shard in enumerate(shards, 1):
            try:
                connections[shard.alias].create_shard_database()  # type: ignore[attr-defined]  # all our engines have it
                call_command(
                    "migrate", *target, database=shard.alias, interactive=False, verbosity=0
                )
            except DatabaseError as exc:
                # Each shard stands alone: one that is down must not keep the others back.
                failed[shard.alias] = exc
                self.stderr.write(self.style.ERROR(f"{shard.alias}: {exc}"))
            else:
                self._progress(done, len(shards), shard, options["verbosity"])
        if failed:
            raise CommandError(
                f"{len(failed)} of {len(shards)} shards are not migrated: {', '.join(failed)}."
                " Run the command again when their cause is mended; the others are done."
            )
        self.stdout.write(self.style.SUCCESS(f"{len(shards)} shards are migrated."))

    def _selected(self, name: str | None, numbers: list[range] | None) -> list[Shard]:
        groups = runtime.topology().groups
        if name is not None and name not in groups:
            raise CommandError(f"There is no group {name!r}; choose from {sorted(groups)!r}.")
        if numbers is not None and name is None:
            raise CommandError("--shards needs --group: numbers are counted per group.")
        chosen: list[ShardGroup] = [groups[name]] if name is not None else list(groups.values())
        if numbers is None:
            return [shard for group in chosen for shard in group.shards()]
        try:
            return [chosen[0].shard(number) for part in numbers for number in part]
        except LookupError as exc:
            raise CommandError(str(exc)) from exc

    def _progress(self, done: int, total: int, shard: Shard, verbosity: int) -> None:
        if verbosity > 1:
            self.stdout.write(f"{done}/{total} {shard.alias}")
        elif verbosity == 1 and getattr(self.stdout, "isatty", lambda: False)():
            self.stdout.write(
                f"\r{done}/{total} {shard.alias}", ending="\n" if done == total else ""
            )
            self.stdout.flush()


def _numbers(text: str) -> list[range]:
    ranges = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else -1
        if last < first:
            raise ArgumentTypeError(f"{part!r} is not a number or a range such as 0-511")
        ranges.append(range(first, last + 1))
    return ranges
