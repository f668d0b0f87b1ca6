"""``manage.py topology``: what nodes, groups and ranges there are, and changing that."""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser

from sharded_orm import runtime
from sharded_orm.exceptions import TopologyError, TopologyUnavailable
from sharded_orm.management.actions import Action, CommandOfActions, failed
from sharded_orm.management.tables import write_table
from sharded_orm.operations import topology
from sharded_orm.topology.document import Document
from sharded_orm.topology.model import Topology
from sharded_orm.topology.sources.base import Process

# Seconds between two looks at what this process uses.
_LOOK_EVERY = 0.1


class Show(Action):
    name = "show"
    help = "Show what is in use here, and what the source holds; status 1 when they differ."

    def add_arguments(self, parser: CommandParser) -> None:
        _json(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        source = runtime.source()
        standing, document = runtime.topology_status(), runtime.document()
        held, trouble = _held()
        processes = None
        if trouble is None:
            processes = source.processes()
        problems = list(standing.refused) or ([trouble] if trouble else [])
        if options["json"]:
            told = {
                "source": source.describe(),
                "version": standing.version,
                "origin": standing.origin,
                "since": standing.since.isoformat(),
                "source_version": None if held is None else held.version,
                "problems": problems,
                "document": document.without_credentials().content(),
                "processes": None if processes is None else [_told(one) for one in processes],
            }
            command.stdout.write(json.dumps(told, indent=2))
        else:
            self._write(command, source.describe(), held, processes)
        if problems:
            raise failed(problems)

    def _write(
        self,
        command: BaseCommand,
        where: str,
        held: Document | None,
        processes: list[Process] | None,
    ) -> None:
        standing, current = runtime.topology_status(), runtime.config().topology
        command.stdout.write(f"source    {where}")
        if runtime.source().live:
            command.stdout.write(
                f"in use    version {standing.version}, from the {standing.origin}, since"
                f" {_when(standing.since)}"
            )
            if held is not None and held.version != standing.version:
                command.stdout.write(f"there     version {held.version}")
        command.stdout.write("")
        _write_groups(command, current)
        if processes is not None:
            command.stdout.write("")
            write_table(
                command,
                ("host", ">process", ">version", "since", ""),
                [
                    (
                        p.host,
                        str(p.pid),
                        str(p.version),
                        _when(p.since),
                        "this command" if p.own else "",
                    )
                    for p in processes
                ],
            )


class Validate(Action):
    name = "validate"
    help = "Check a topology, also against what is in use; status 1 when it would be refused."

    def add_arguments(self, parser: CommandParser) -> None:
        _file(parser, "By default what the source holds.", optional=True)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        if options["file"] is None:
            document = topology.current()
            if runtime.source().live and document == _in_use():
                command.stdout.write(f"Version {document.version} is in use.")
                return
        else:
            document = _read(options["file"])
            document = document.at_version(max(document.version, _in_use_version() + 1))
        runtime.check_document(document)
        command.stdout.write("It is in order, and may follow what is in use.")


class Diff(Action):
    name = "diff"
    help = "Show what a topology would change; status 1 when it would change something."

    def add_arguments(self, parser: CommandParser) -> None:
        _file(parser)
        _json(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        before, _ = _held()
        found = (before or Document(0, {}, {})).differences(_read(options["file"]))
        if options["json"]:
            command.stdout.write(json.dumps(found, indent=2))
        else:
            command.stdout.write("\n".join(found) or "No difference.")
        if found:
            sys.exit(1)


class Push(Action):
    name = "push"
    help = (
        "Publish a topology to every process. Its version is the one that it was made from (see"
        " pull); it becomes the next one."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        _file(parser)
        _publishing(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        pushed = topology.push(_read(options["file"]), options["comment"])
        if pushed.published:
            _published(command, pushed.document, options)
            return
        command.stdout.write(
            f"Nothing to publish: version {pushed.document.version}, in use here, is the same."
        )
        if options["comment"]:
            command.stderr.write(
                command.style.WARNING("The comment is not kept: it would belong to a new version.")
            )
        _wait(command, pushed.document, options)


class Pull(Action):
    name = "pull"
    help = "Write what the source holds as JSON: to a file, or to standard output."

    def add_arguments(self, parser: CommandParser) -> None:
        _file(parser, "By default standard output.", optional=True)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        text = topology.current().to_json()
        if options["file"] is None:
            command.stdout.write(text, ending="")
            return
        try:
            # It may have credentials in it, where those are allowed.
            with open(os.open(options["file"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:  # fmt: skip
                file.write(text)
        except OSError as exc:
            raise CommandError(f"{str(options['file'])!r} cannot be written: {exc}") from exc


class History(Action):
    name = "history"
    help = "Show who published which version, newest first."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--limit", type=_limit, default=20, metavar="N", help="Default: 20.")
        _json(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        found = runtime.source().history(options["limit"])
        if options["json"]:
            command.stdout.write(json.dumps([_told(one) for one in found], indent=2))
        elif not found:
            command.stdout.write(f"{runtime.source().describe()} keeps no history.")
        else:
            write_table(
                command,
                (">version", "published", "by", "comment"),
                [(str(r.version), _when(r.published_at), r.by, r.comment) for r in found],
            )


class Watch(Action):
    name = "watch"
    help = "Print every change as this process begins to use it, until it is interrupted."

    def add_arguments(self, parser: CommandParser) -> None:
        _json(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        if not runtime.source().live:
            raise CommandError(f"{runtime.source().describe()} does not change while it runs.")
        seen, before = None, runtime.document()
        try:
            while True:
                standing, document = runtime.topology_status(), runtime.document()
                if standing != seen:
                    told = {
                        "version": standing.version,
                        "origin": standing.origin,
                        "since": standing.since.isoformat(),
                        "refused": list(standing.refused),
                        "changes": before.differences(document),
                    }
                    command.stdout.write(json.dumps(told) if options["json"] else _line(told))
                    command.stdout.flush()
                    seen, before = standing, document
                time.sleep(_LOOK_EVERY)
        except KeyboardInterrupt:
            return


class Rollback(Action):
    name = "rollback"
    help = "Publish an earlier version once more, as the next version."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("version", type=int, metavar="VERSION", help="See history.")
        _publishing(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        try:
            published = topology.rollback(options["version"], options["comment"])
        except LookupError as exc:
            raise CommandError(str(exc)) from exc
        _published(command, published, options)


class Command(CommandOfActions):
    help = "Shows and changes the topology: nodes, groups, and which shards are on which node."
    # The checks of the project ask for a topology, which may be what is to be mended.
    requires_system_checks = []
    actions = (Show, Validate, Diff, Push, Pull, History, Watch, Rollback)


# ##### Options #####


def _json(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def _file(parser: CommandParser, text: str = "", *, optional: bool = False) -> None:
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        nargs="?" if optional else None,
        help=f"JSON, or TOML if it ends in .toml. {text}",
    )


def _publishing(parser: CommandParser) -> None:
    parser.add_argument("--comment", default="", metavar="TEXT", help="For the history.")
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="Wait so long for all processes that are connected; 0 not at all. Default: 10.",
    )


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text)):
        raise ArgumentTypeError(f"{text!r} is no number of versions")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    # Of "nan" no end ever comes.
    if not 0 <= seconds < float("inf"):
        raise ArgumentTypeError(f"{text!r} is no number of seconds, 0 or more")
    return seconds


def _read(path: Path) -> Document:
    try:
        return Document.from_file(path)
    except OSError as exc:
        raise CommandError(f"{str(path)!r} cannot be read: {exc}") from exc


# ##### Answers #####


def _published(command: BaseCommand, document: Document, options: dict[str, Any]) -> None:
    command.stdout.write(
        command.style.SUCCESS(f"Version {document.version} is published and in use here.")
    )
    _wait(command, document, options)


def _wait(command: BaseCommand, document: Document, options: dict[str, Any]) -> None:
    """For the other processes, as long as the option says."""
    if not options["wait"]:
        return
    reach = topology.wait_until_used(document.version, options["wait"])
    if reach is None:
        return
    command.stdout.write(_using(len(reach.using), behind=len(reach.behind)))
    if reach.behind:
        raise failed(
            f"{one.host}, process {one.pid}, still uses version {one.version}."
            for one in reach.behind
        )


def _using(count: int, *, behind: int) -> str:
    if behind:
        return f"{count} of {count + behind} other processes that are connected use it."
    if not count:
        return "No other process is connected."
    if count == 1:
        return "1 other process is connected, and uses it."
    return f"{count} other processes are connected, and use it."


def _held() -> tuple[Document | None, str | None]:
    """What the source holds, or why that cannot be told."""
    try:
        return topology.current(), None
    except TopologyError as exc:
        return None, str(exc)


def _in_use() -> Document | None:
    try:
        return runtime.document()
    except TopologyUnavailable:
        return None


def _in_use_version() -> int:
    found = _in_use()
    return 0 if found is None else found.version


def _write_groups(command: BaseCommand, current: Topology) -> None:
    write_table(
        command,
        ("node", "engine", "address"),
        [
            (name, str(node.get("ENGINE", "")).rpartition(".")[2], _address(node))
            for name, node in current.nodes.items()
        ],
    )
    command.stdout.write("")
    write_table(
        command,
        ("group", "strategy", ">shards", "primary", "replica", "new keys", ">weight"),
        [
            (
                group.name if number == 0 else "",
                group.strategy if number == 0 else "",
                f"{r.first}-{r.last}",
                r.primary,
                r.replica or "",
                "open" if r.open and r.weight > 0 else "closed",
                f"{r.weight:g}",
            )
            for group in current.groups.values()
            for number, r in enumerate(group.ranges)
        ],
    )


def _address(node: Mapping[str, Any]) -> str:
    if node.get("NAME"):
        return str(node["NAME"])
    port = node.get("PORT")
    return f"{node.get('HOST') or 'localhost'}{f':{port}' if port else ''}"


def _line(told: dict[str, Any]) -> str:
    lines = [f"{told['since']}  version {told['version']}, from the {told['origin']}"]
    lines += [f"  {change}" for change in told["changes"]]
    lines += [f"  REFUSED: {problem}" for problem in told["refused"]]
    return "\n".join(lines)


def _when(time: datetime | None) -> str:
    return "?" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _told(one: Any) -> dict[str, Any]:
    return {
        key: value.isoformat() if isinstance(value, datetime) else value
        for key, value in asdict(one).items()
    }
