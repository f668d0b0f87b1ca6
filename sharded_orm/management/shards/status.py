"""The actions ``status`` and ``check`` of ``manage.py shards``: show the state of shards."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from django.core.management import BaseCommand
from django.core.management.base import CommandParser
from django.db import Error
from django.template.defaultfilters import filesizeformat

from sharded_orm.management.actions import Action, problems_error
from sharded_orm.management.arguments import positive_seconds
from sharded_orm.management.selection import add_selection, selection_of
from sharded_orm.management.tables import write_table
from sharded_orm.operations.pairs.status import PairStatus, pair_states
from sharded_orm.operations.runs.conflicts import broken_off
from sharded_orm.operations.shards.fleet_status import FleetStatus, GroupOnNode
from sharded_orm.operations.shards.health import SAMPLE, HealthReport, check
from sharded_orm.operations.shards.status import PATIENCE, error_line, status
from sharded_orm.topology.model import Shard

_DOWN, _WRONG, _MISCONFIGURED = "DOES NOT ANSWER", "WRONG", "WRONG SETTINGS"


class StatusAction(Action):
    name = "status"
    help = (
        "Show for each node and group which shards answer, exist and are migrated, and their size."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        _add_options(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        shards = _selected_shards(options)
        fleet = status(shards, timeout=options["timeout"], sizes=options["sizes"])
        pairs = pair_states(shards)
        interrupted = _interrupted(shards)
        if options["json"]:
            _write_json(command, _fleet_json(fleet, pairs, interrupted, each=options["each"]))
            return
        _show(command, fleet, each=options["each"])
        _show_pairs(command, pairs)
        for problem in _all_problems(fleet.problems, pairs, interrupted):
            command.stdout.write("")
            command.stdout.write(command.style.WARNING(problem))


class Check(Action):
    name = "check"
    help = (
        "As status, and also look for schemas that differ from those of other shards, for tables that"
        " make ids of another shard, for rows on a shard other than that of their key, and for rows that"
        " are related to a row of another key or to a global row that does not exist. Exit status 1 if"
        " anything is wrong."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        _add_options(parser)
        rows = parser.add_mutually_exclusive_group()
        rows.add_argument(
            "--sample",
            type=_count,
            default=SAMPLE,
            metavar="N",
            help="Rows to check in each table of each shard, from a random row on; 0 for none."
            " Default: %(default)s",
        )
        rows.add_argument("--all", action="store_true", help="Check all rows.")

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        shards = _selected_shards(options)
        pairs = pair_states(shards)
        interrupted = _interrupted(shards)
        health = check(
            shards,
            timeout=options["timeout"],
            sample=None if options["all"] else options["sample"],
            sizes=options["sizes"],
        )
        if options["json"]:
            _write_json(command, _health_json(health, pairs, interrupted, each=options["each"]))
        else:
            _show(command, health.status, each=options["each"])
            _show_pairs(command, pairs)
            if options["all"] or options["sample"]:
                command.stdout.write("")
                command.stdout.write(f"{health.rows:,} rows looked at.")
        if problems := _all_problems(health.problems, pairs, interrupted):
            raise problems_error(problems)


ACTIONS: tuple[type[Action], ...] = (StatusAction, Check)


def _add_options(parser: CommandParser) -> None:
    add_selection(parser)
    parser.add_argument("--each", action="store_true", help="List each shard.")
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        default=PATIENCE,
        metavar="SECONDS",
        help="The time for the first answer of a node. Default: %(default)g",
    )
    parser.add_argument(
        "--no-sizes", action="store_false", dest="sizes", help="Do not read the sizes of shards."
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")


def _selected_shards(options: Mapping[str, Any]) -> list[Shard] | None:
    """Return the shards that the options select; None if no option selects shards.

    With None, all shards are checked, and the nodes are also searched for schemas with the name of
    a shard that belongs on another node.
    """
    if all(options[name] is None for name in ("group", "shards", "node")):
        return None
    return [shard for part in selection_of(options) for shard in part.shards]


def _interrupted(shards: list[Shard] | None) -> list[str]:
    """Return a sentence for each interrupted operation on the groups of ``shards``.

    If the journal in the global database cannot be read, return a sentence that says so instead of
    raising an error. So the command can still show the state of the nodes.

    :param shards: None means the shards of all groups.
    """
    try:
        return broken_off(None if shards is None else {shard.group for shard in shards})
    except Error as exc:
        return [
            f"The journal of operations in the global database cannot be read: {error_line(exc)}."
        ]


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ArgumentTypeError(f"{text!r} is no number of rows")
    return int(text)


# ##### Output as tables #####


def _show(command: BaseCommand, fleet: FleetStatus, *, each: bool) -> None:
    heads = (
        "node", "group", ">shards", ">missing", ">behind", ">unexpected", ">size", ">rows", "",
    )  # fmt: skip
    write_table(command, heads, list(_lines(fleet)), {_DOWN, _WRONG, _MISCONFIGURED})
    rows = [
        [entry.shard.alias, entry.shard.node, entry.state, str(entry.behind or ""),
         _size(entry.size.bytes if entry.size else None),
         _number(entry.size.rows if entry.size else None),
         _WRONG if entry.state in ("missing", "error") else ""]
        for entry in (fleet.shards if each else ())
    ]  # fmt: skip
    if rows:
        command.stdout.write("")
        write_table(
            command, ("shard", "node", "state", ">behind", ">size", ">rows", ""), rows, {_WRONG}
        )


def _show_pairs(command: BaseCommand, pairs: Sequence[PairStatus]) -> None:
    if not pairs:
        return
    command.stdout.write("")
    rows = []
    for pair in pairs:
        for side in pair.sides:
            seconds = None if side.direction is None else side.direction.seconds_behind
            rows.append(
                [" and ".join(pair.nodes), side.node, str(side.active), _number(seconds),
                 _WRONG if pair.problems else "ok"]
            )  # fmt: skip
    write_table(command, ("pair", "side", ">active", ">seconds behind", ""), rows, {_WRONG})


def _all_problems(
    problems: Sequence[str], pairs: Sequence[PairStatus], interrupted: Sequence[str]
) -> list[str]:
    """Return all problems without repetition. Interrupted operations come first, because they may
    have caused the other problems.
    """
    upgrades = [pair.upgrade_problem for pair in pairs if pair.upgrade]
    of_pairs = [problem for pair in pairs for problem in pair.problems]
    return list(dict.fromkeys([*upgrades, *interrupted, *problems, *of_pairs]))


def _lines(fleet: FleetStatus) -> Iterator[list[str]]:
    for node in fleet.nodes:
        if node.error is not None:
            for group, count in node.expected.items() or [("", 0)]:
                state = _MISCONFIGURED if node.is_misconfigured else _DOWN
                yield [node.name, group, str(count or ""), *[""] * 5, state]
        elif not node.groups:
            yield [node.name, *[""] * 7, "answers"]
        for on_node in node.groups:
            missing, behind = len(on_node.of_state("missing")), len(on_node.of_state("behind"))
            wrong = missing or on_node.of_state("error") or on_node.unexpected
            yield [
                node.name, on_node.group, str(len(on_node.shards)),
                _nonzero(missing), _nonzero(behind),
                _nonzero(len(on_node.unexpected)), _size(on_node.bytes), _number(on_node.rows),
                _WRONG if wrong else "behind" if behind else "ok",
            ]  # fmt: skip


def _nonzero(count: int) -> str:
    return str(count or "")


def _size(count: int | None) -> str:
    return "" if count is None else filesizeformat(count).replace("\xa0", " ")


def _number(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


# ##### Output as JSON #####


def _write_json(command: BaseCommand, value: Any) -> None:
    # default=str writes values of other types as text, such as a shard key that is a UUID.
    command.stdout.write(json.dumps(value, indent=2, default=str))


def _fleet_json(
    fleet: FleetStatus, pairs: Sequence[PairStatus], interrupted: Sequence[str], *, each: bool
) -> dict[str, Any]:
    return {
        "nodes": [
            {
                "name": node.name,
                "error": node.error,
                "expected": dict(node.expected),
                "groups": [_group_json(group, each=each) for group in node.groups],
            }
            for node in fleet.nodes
        ],
        "pairs": [_pair_json(pair) for pair in pairs],
        "problems": _all_problems(fleet.problems, pairs, interrupted),
    }


def _pair_json(pair: PairStatus) -> dict[str, Any]:
    return {
        "nodes": list(pair.nodes),
        "active": dict(zip(pair.nodes, pair.active, strict=True)),
        "replication": [asdict(direction) for direction in pair.directions],
        "writable": [shard.alias for shard in pair.writable],
        "closed": [shard.alias for shard in pair.closed],
        "error": pair.error or None,
    }


def _group_json(on_node: GroupOnNode, *, each: bool) -> dict[str, Any]:
    content: dict[str, Any] = {
        "group": on_node.group,
        "shards": len(on_node.shards),
        "missing": _aliases(on_node, "missing"),
        "behind": _aliases(on_node, "behind"),
        "errors": {
            entry.shard.alias: entry.error for entry in on_node.shards if entry.error is not None
        },
        "unexpected": list(on_node.unexpected),
        "bytes": on_node.bytes,
        "rows": on_node.rows,
    }
    if each:
        content["each"] = [
            {
                "alias": entry.shard.alias,
                "state": entry.state,
                "behind": entry.behind,
                "bytes": entry.size.bytes if entry.size else None,
                "rows": entry.size.rows if entry.size else None,
            }
            for entry in on_node.shards
        ]
    return content


def _aliases(on_node: GroupOnNode, state: str) -> list[str]:
    return [shard.alias for shard in on_node.of_state(state)]


def _health_json(
    health: HealthReport,
    pairs: Sequence[PairStatus],
    interrupted: Sequence[str],
    *,
    each: bool,
) -> dict[str, Any]:
    return {
        **_fleet_json(health.status, pairs, interrupted, each=each),
        "inexact_keys": [
            {
                "model": entry.key.model._meta.label,
                "field": entry.key.field.name,
                "problem": entry.what,
                "shards": [shard.alias for shard in entry.shards],
            }
            for entry in health.inexact
        ],
        "drift": [
            {
                "shard": entry.shard.alias,
                "sibling": entry.sibling.alias,
                "siblings": entry.siblings,
                "differences": list(entry.differences),
            }
            for entry in health.drifts
        ],
        "foreign_ids": [
            {
                "shard": entry.shard.alias,
                "source": entry.source,
                "problem": entry.problem,
                "remedy": entry.remedy,
            }
            for entry in health.foreign_ids
        ],
        "misplaced": [
            {
                "shard": entry.shard.alias,
                "model": entry.model,
                "field": entry.key_name,
                "keys": entry.keys,
                "rows": entry.rows,
                "examples": [
                    {"key": example.key, "home": example.home, "why": example.why}
                    for example in entry.examples
                ],
            }
            for entry in health.misplaced
        ],
        "cross_key": [
            {
                "shard": entry.shard.alias,
                "model": entry.model,
                "field": entry.field,
                "related": entry.related,
                "rows": entry.rows,
                "examples": [asdict(pair) for pair in entry.examples],
            }
            for entry in health.cross_key
        ],
        "dangling": [
            {
                "shard": entry.shard.alias,
                "model": entry.model,
                "field": entry.field,
                "related": entry.related,
                "values": entry.values,
                "rows": entry.rows,
                "examples": entry.examples,
            }
            for entry in health.dangling
        ],
        "rows_looked_at": health.rows,
        "problems": _all_problems(health.problems, pairs, interrupted),
    }
