"""``shards where``: where a key lives, and why."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser

from sharded_orm.management.actions import Action
from sharded_orm.operations.shards.where import KeyLocation, where


class Where(Action):
    name = "where"
    help = "Explain where the rows of a shard key are. Asks no shard, and places nothing."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("model", metavar="MODEL", help="Photo, or photos.Photo.")
        parser.add_argument("key", metavar="KEY=VALUE", help="The shard key, such as user_id=1.")
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        name, equals, value = options["key"].partition("=")
        if not equals:
            raise CommandError(f"{name!r} is no KEY=VALUE, such as user_id=1.")
        place = where(options["model"], name, value)
        if options["json"]:
            command.stdout.write(json.dumps(asdict(place), indent=2, default=str))
            return
        heading = f"{place.model} {place.field}={place.key!r}"
        command.stdout.write(command.style.MIGRATE_HEADING(heading))
        for name, text in _told(place):
            command.stdout.write(f"{name:<8} {text}")


ACTIONS: tuple[type[Action], ...] = (Where,)


def _told(place: KeyLocation) -> list[tuple[str, str]]:
    told = [("group", f"{place.group}, by {place.strategy}"), ("why", place.why)]
    if place.range is None:
        told.append(("shard", "none"))
    else:
        first, last = place.range
        opened = "open" if place.open else "closed"
        told += [
            ("shard", f"{place.shard}, {place.alias}"),
            ("node", f"{place.node}"),
            ("replica", place.replica or "none"),
            ("schema", f"{place.schema}"),
            ("range", f"{first} to {last}, {opened} for new keys"),
        ]
    return told
