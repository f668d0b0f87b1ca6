"""The action ``where`` of ``manage.py shards``: show the shard of a key, and why it is that shard."""

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
    help = "Explain on which shard the rows of a key are. Asks no shard, and places nothing."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("model", metavar="MODEL", help="Photo, or photos.Photo.")
        parser.add_argument("key", metavar="KEY=VALUE", help="The shard key, such as user_id=1.")
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        name, equals, value = options["key"].partition("=")
        if not equals:
            raise CommandError(f"{name!r} is no KEY=VALUE, such as user_id=1.")
        location = where(options["model"], name, value)
        if options["json"]:
            command.stdout.write(json.dumps(asdict(location), indent=2, default=str))
            return
        heading = f"{location.model} {location.field}={location.key!r}"
        command.stdout.write(command.style.MIGRATE_HEADING(heading))
        for name, text in _facts(location):
            command.stdout.write(f"{name:<8} {text}")


ACTIONS: tuple[type[Action], ...] = (Where,)


def _facts(location: KeyLocation) -> list[tuple[str, str]]:
    facts = [("group", f"{location.group}, by {location.strategy}"), ("why", location.why)]
    if location.range is None:
        facts.append(("shard", "none"))
    else:
        first, last = location.range
        opened = "open" if location.open else "closed"
        facts += [
            ("shard", f"{location.shard}, {location.alias}"),
            ("node", f"{location.node}"),
            ("replica", location.replica or "none"),
            ("schema", f"{location.schema}"),
            ("range", f"{first} to {last}, {opened} for new keys"),
        ]
    return facts
