"""``shards status`` and ``shards check``."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping
from typing import Any

from django.core.management import BaseCommand
from django.core.management.base import CommandParser
from django.template.defaultfilters import filesizeformat

from sharded_orm.management.actions import Action, failed
from sharded_orm.management.selection import add_selection, selected
from sharded_orm.management.tables import write_table
from sharded_orm.operations.shards.health import SAMPLE, HealthReport, check
from sharded_orm.operations.shards.status import PATIENCE, FleetStatus, GroupOnNode, status
from sharded_orm.topology.model import Shard

_DOWN, _WRONG = "DOES NOT ANSWER", "WRONG"


class StatusAction(Action):
    name = "status"
    help = "Show for each node and group what answers, exists and is migrated, and how large it is."

    def add_arguments(self, parser: CommandParser) -> None:
        _add_options(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        found = status(_chosen(options), timeout=options["timeout"], sizes=options["sizes"])
        if options["json"]:
            _write_json(command, _fleet(found, each=options["each"]))
            return
        _show(command, found, each=options["each"])
        for problem in found.problems:
            command.stdout.write("")
            command.stdout.write(command.style.WARNING(problem))


class Check(Action):
    name = "check"
    help = (
        "The same, and look for schemas that differ from their siblings and for rows that are on"
        " another shard than their key says; status 1 when anything is wrong."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        _add_options(parser)
        rows = parser.add_mutually_exclusive_group()
        rows.add_argument(
            "--sample",
            type=_count,
            default=SAMPLE,
            metavar="N",
            help="Rows to look at of each table of each shard, from a random place on; 0 for none."
            " Default: %(default)s",
        )
        rows.add_argument("--all", action="store_true", help="Look at all rows.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        found = check(
            _chosen(options),
            timeout=options["timeout"],
            sample=None if options["all"] else options["sample"],
            sizes=options["sizes"],
        )
        if options["json"]:
            _write_json(command, _checked(found, each=options["each"]))
        else:
            _show(command, found.status, each=options["each"])
            if options["all"] or options["sample"]:
                command.stdout.write("")
                command.stdout.write(f"{found.rows:,} rows looked at.")
        if found.problems:
            raise failed(found.problems)


ACTIONS: tuple[type[Action], ...] = (StatusAction, Check)


def _add_options(parser: CommandParser) -> None:
    add_selection(parser)
    parser.add_argument("--each", action="store_true", help="List each shard.")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=PATIENCE,
        metavar="SECONDS",
        help="For the first answer of a node. Default: %(default)g",
    )
    parser.add_argument(
        "--no-sizes", action="store_false", dest="sizes", help="Do not ask how large shards are."
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")


def _chosen(options: Mapping[str, Any]) -> list[Shard] | None:
    """None for all, which includes what is where no shard should be."""
    if all(options[name] is None for name in ("group", "shards", "node")):
        return None
    return [shard for part in selected(options) for shard in part.shards]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return seconds


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ArgumentTypeError(f"{text!r} is no number of rows")
    return int(text)


# ##### Tables #####


def _show(command: BaseCommand, found: FleetStatus, *, each: bool) -> None:
    heads = (
        "node", "group", ">shards", ">missing", ">behind", ">unexpected", ">size", ">rows", "",
    )  # fmt: skip
    write_table(command, heads, list(_lines(found)), {_DOWN, _WRONG})
    rows = [
        [one.shard.alias, one.shard.node, one.state, str(one.behind or ""),
         _size(one.size.bytes if one.size else None), _number(one.size.rows if one.size else None),
         _WRONG if one.state in ("missing", "error") else ""]
        for one in (found.shards if each else ())
    ]  # fmt: skip
    if rows:
        command.stdout.write("")
        write_table(
            command, ("shard", "node", "state", ">behind", ">size", ">rows", ""), rows, {_WRONG}
        )


def _lines(found: FleetStatus) -> Iterator[list[str]]:
    for node in found.nodes:
        if node.error is not None:
            for group, count in node.expected.items() or [("", 0)]:
                yield [node.name, group, str(count or ""), *[""] * 5, _DOWN]
        elif not node.groups:
            yield [node.name, *[""] * 7, "answers"]
        for told in node.groups:
            missing, behind = len(told.of_state("missing")), len(told.of_state("behind"))
            wrong = missing or told.of_state("error") or told.unexpected
            yield [
                node.name, told.group, str(len(told.shards)), _some(missing), _some(behind),
                _some(len(told.unexpected)), _size(told.bytes), _number(told.rows),
                _WRONG if wrong else "behind" if behind else "ok",
            ]  # fmt: skip


def _some(count: int) -> str:
    return str(count or "")


def _size(count: int | None) -> str:
    return "" if count is None else filesizeformat(count).replace("\xa0", " ")


def _number(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


# ##### JSON #####


def _write_json(command: BaseCommand, value: Any) -> None:
    # A key may be a UUID.
    command.stdout.write(json.dumps(value, indent=2, default=str))


def _fleet(found: FleetStatus, *, each: bool) -> dict[str, Any]:
    return {
        "nodes": [
            {
                "name": node.name,
                "error": node.error,
                "expected": dict(node.expected),
                "groups": [_group(group, each=each) for group in node.groups],
            }
            for node in found.nodes
        ],
        "problems": found.problems,
    }


def _group(found: GroupOnNode, *, each: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "group": found.group,
        "shards": len(found.shards),
        "missing": _aliases(found, "missing"),
        "behind": _aliases(found, "behind"),
        "errors": {one.shard.alias: one.error for one in found.shards if one.error is not None},
        "unexpected": list(found.unexpected),
        "bytes": found.bytes,
        "rows": found.rows,
    }
    if each:
        told["each"] = [
            {
                "alias": one.shard.alias,
                "state": one.state,
                "behind": one.behind,
                "bytes": one.size.bytes if one.size else None,
                "rows": one.size.rows if one.size else None,
            }
            for one in found.shards
        ]
    return told


def _aliases(found: GroupOnNode, state: str) -> list[str]:
    return [shard.alias for shard in found.of_state(state)]


def _checked(found: HealthReport, *, each: bool) -> dict[str, Any]:
    return {
        **_fleet(found.status, each=each),
        "inexact_keys": [
            {
                "model": one.key.model._meta.label,
                "field": one.key.field.name,
                "problem": one.what,
                "shards": [shard.alias for shard in one.shards],
            }
            for one in found.inexact
        ],
        "drift": [
            {
                "shard": one.shard.alias,
                "sibling": one.sibling.alias,
                "siblings": one.siblings,
                "differences": list(one.differences),
            }
            for one in found.drifts
        ],
        "misplaced": [
            {
                "shard": one.shard.alias,
                "model": one.model,
                "field": one.key_name,
                "keys": one.keys,
                "rows": one.rows,
                "examples": [
                    {"key": example.key, "home": example.home, "why": example.why}
                    for example in one.examples
                ],
            }
            for one in found.misplaced
        ],
        "rows_looked_at": found.rows,
        "problems": found.problems,
    }
