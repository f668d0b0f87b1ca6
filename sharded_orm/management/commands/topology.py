"""``manage.py topology``: show and change the nodes, the groups and the ranges of shards."""

from __future__ import annotations

import json
import os
import stat
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
from django.db.utils import load_backend

from sharded_orm import runtime
from sharded_orm.backends.features import features_of
from sharded_orm.exceptions import TopologyError, TopologyUnavailable
from sharded_orm.management.actions import Action, CommandOfActions, problems_error
from sharded_orm.management.arguments import seconds
from sharded_orm.management.tables import write_table
from sharded_orm.operations import topology
from sharded_orm.topology.document import Document
from sharded_orm.topology.model import Topology
from sharded_orm.topology.sources.base import Process

# The action "watch" waits this number of seconds, and then looks again whether this process uses a
# new topology.
_POLL_INTERVAL = 0.1


class Show(Action):
    name = "show"
    help = "Show the topology in use here, and that of the source; exit status 1 if they differ."

    def add_arguments(self, parser: CommandParser) -> None:
        _add_json(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        source = runtime.source()
        status, document = runtime.topology_status(), runtime.document()
        held, error = _load_held()
        processes = None
        if error is None:
            processes = source.processes()
        problems = list(status.refused) or ([error] if error else [])
        if options["json"]:
            content = {
                "source": source.describe(),
                "version": status.version,
                "origin": status.origin,
                "since": status.since.isoformat(),
                "source_version": None if held is None else held.version,
                "problems": problems,
                "document": document.without_credentials().content(),
                "processes": None
                if processes is None
                else [_as_json(process) for process in processes],
            }
            command.stdout.write(json.dumps(content, indent=2))
        else:
            self._write(command, source.describe(), held, processes)
        if problems:
            raise problems_error(problems)

    def _write(
        self,
        command: BaseCommand,
        source_name: str,
        held: Document | None,
        processes: list[Process] | None,
    ) -> None:
        status, current = runtime.topology_status(), runtime.config().topology
        command.stdout.write(f"source    {source_name}")
        if runtime.source().live:
            command.stdout.write(
                f"in use    version {status.version}, from the {status.origin}, since"
                f" {_local_time(status.since)}"
            )
            if held is not None and held.version != status.version:
                command.stdout.write(f"there     version {held.version}")
        command.stdout.write("")
        _write_groups(command, current)
        if processes is not None:
            command.stdout.write("")
            if not processes:
                command.stdout.write("No process is connected to the source.")
                return
            write_table(
                command,
                ("host", ">process", ">version", "since", ""),
                [
                    (
                        p.host,
                        str(p.pid),
                        str(p.version),
                        _local_time(p.since),
                        "this command" if p.own else "",
                    )
                    for p in processes
                ],
            )


class Validate(Action):
    name = "validate"
    help = (
        "Check a topology, also as a successor of the one in use; exit status 1 if it would be"
        " refused."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        _add_file(parser, "By default, the topology of the source.", optional=True)

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
    help = "Show what a topology would change; exit status 1 if it would change something."

    def add_arguments(self, parser: CommandParser) -> None:
        _add_file(parser)
        _add_json(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        before, _ = _load_held()
        differences = (before or Document(0, {}, {})).differences(_read(options["file"]))
        if options["json"]:
            command.stdout.write(json.dumps(differences, indent=2))
        else:
            command.stdout.write("\n".join(differences) or "No difference.")
        if differences:
            sys.exit(1)


class Push(Action):
    name = "push"
    help = (
        "Publish a topology to every process. The version in it is that from which it was made (see"
        " pull); it is published as the next version."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        _add_file(parser)
        _add_publication_options(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        pushed = topology.push(_read(options["file"]), options["comment"])
        if pushed.published:
            _report_published(command, pushed.document, options)
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
    help = "Write the topology of the source as JSON, to a file or to standard output."

    def add_arguments(self, parser: CommandParser) -> None:
        _add_file(parser, "By default, standard output.", optional=True)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        document = topology.current()
        text = document.to_json()
        if options["file"] is None:
            command.stdout.write(text, ending="")
            return
        try:
            # Let only the owner read the file, because the topology may contain passwords.
            descriptor = os.open(options["file"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w") as file:
                # The mode above applies to new files only. If the file existed before, change its
                # permissions now; but leave those of a device or a pipe as they are.
                if document.credentials() and stat.S_ISREG(os.fstat(descriptor).st_mode):
                    os.fchmod(descriptor, 0o600)
                file.write(text)
        except OSError as exc:
            raise CommandError(f"{str(options['file'])!r} cannot be written: {exc}") from exc


class History(Action):
    name = "history"
    help = "Show who published which version, the newest first."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--limit", type=_limit, default=20, metavar="N", help="Default: 20.")
        _add_json(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        revisions = runtime.source().history(options["limit"])
        if options["json"]:
            command.stdout.write(
                json.dumps([_as_json(revision) for revision in revisions], indent=2)
            )
        elif not revisions:
            command.stdout.write(f"{runtime.source().describe()} keeps no history.")
        else:
            write_table(
                command,
                (">version", "published", "by", "comment"),
                [(str(r.version), _local_time(r.published_at), r.by, r.comment) for r in revisions],
            )


class Watch(Action):
    name = "watch"
    help = "Print every change when this process begins to use it, until interrupted."

    def add_arguments(self, parser: CommandParser) -> None:
        _add_json(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        if not runtime.source().live:
            raise CommandError(f"{runtime.source().describe()} does not change while it runs.")
        last, before = None, runtime.document()
        try:
            while True:
                status, document = runtime.topology_status(), runtime.document()
                if status != last:
                    content = {
                        "version": status.version,
                        "origin": status.origin,
                        "since": status.since.isoformat(),
                        "refused": list(status.refused),
                        "changes": before.differences(document),
                    }
                    command.stdout.write(
                        json.dumps(content) if options["json"] else _change_text(content)
                    )
                    command.stdout.flush()
                    last, before = status, document
                time.sleep(_POLL_INTERVAL)
        except KeyboardInterrupt:
            return


class Rollback(Action):
    name = "rollback"
    help = "Publish an earlier version again, as the next version."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("version", type=int, metavar="VERSION", help="See history.")
        _add_publication_options(parser)

    def run(self, command: BaseCommand, options: dict[str, Any]) -> None:
        try:
            published = topology.rollback(options["version"], options["comment"])
        except LookupError as exc:
            raise CommandError(str(exc)) from exc
        _report_published(command, published, options)


class Command(CommandOfActions):
    help = "Shows and changes the topology: nodes, groups, and which shards are on which node."
    # Skip the system checks: they fail without a valid topology, and this command is meant to
    # repair the topology.
    requires_system_checks = []
    actions = (Show, Validate, Diff, Push, Pull, History, Watch, Rollback)


# ##### Options #####


def _add_json(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def _add_file(parser: CommandParser, text: str = "", *, optional: bool = False) -> None:
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        nargs="?" if optional else None,
        help=f"JSON, or TOML if it ends in .toml. {text}",
    )


def _add_publication_options(parser: CommandParser) -> None:
    parser.add_argument("--comment", default="", metavar="TEXT", help="A text for the history.")
    parser.add_argument(
        "--wait",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help="How long to wait for all connected processes; 0 for no wait. Default: 10.",
    )


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text)):
        raise ArgumentTypeError(f"{text!r} is no number of versions")
    return int(text)


def _read(path: Path) -> Document:
    try:
        return Document.from_file(path)
    except OSError as exc:
        raise CommandError(f"{str(path)!r} cannot be read: {exc}") from exc


# ##### Output #####


def _report_published(command: BaseCommand, document: Document, options: dict[str, Any]) -> None:
    command.stdout.write(
        command.style.SUCCESS(f"Version {document.version} is published and in use here.")
    )
    _wait(command, document, options)


def _wait(command: BaseCommand, document: Document, options: dict[str, Any]) -> None:
    """Wait until all other processes use ``document`` or a later version, and print how many do.

    ``--wait`` is the longest wait in seconds. With 0, nothing is done.

    :raises CommandError: at the end of the wait, some processes still use an earlier version.
    """
    if not options["wait"]:
        return
    reach = topology.wait_until_used(document.version, options["wait"])
    if reach is None:
        return
    command.stdout.write(_usage_text(len(reach.using), behind=len(reach.behind)))
    if reach.behind:
        raise problems_error(
            f"{process.host}, process {process.pid}, still uses version {process.version}."
            for process in reach.behind
        )


def _usage_text(count: int, *, behind: int) -> str:
    if behind:
        return f"{count} of {count + behind} other processes that are connected use it."
    if not count:
        return "No other process is connected."
    if count == 1:
        return "1 other process is connected, and uses it."
    return f"{count} other processes are connected, and use it."


def _load_held() -> tuple[Document | None, str | None]:
    """Return the topology that the source has now, as ``(document, None)``.

    If it cannot be loaded, return ``(None, error message)``.
    """
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
    document = _in_use()
    return 0 if document is None else document.version


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
                f"{r.first}-{r.last}" if r.first < r.last else str(r.first),
                f"{r.primary} (active side)" if r.is_pair else r.primary,
                f"{r.replica} (passive side)" if r.is_pair else r.replica or "",
                "open" if r.open and r.weight > 0 else "closed",
                f"{r.weight:g}",
            )
            for group in current.groups.values()
            for number, r in enumerate(group.ranges)
        ],
    )


def _address(node: Mapping[str, Any]) -> str:
    """Return the address of a node, without user and password.

    This is a folder for SQLite. Otherwise, it is ``HOST:PORT``, and ``/NAME`` if all shards of the
    node are in one database of this name.
    """
    name = node.get("NAME")
    if features_of(load_backend(node["ENGINE"]).DatabaseWrapper).shards_are_files:
        return str(name)
    service, port = node.get("OPTIONS", {}).get("service"), node.get("PORT")
    host = node.get("HOST") or (f"service {service}" if service else "localhost")
    return f"{host}{f':{port}' if port else ''}{f'/{name}' if name else ''}"


def _change_text(change: dict[str, Any]) -> str:
    lines = [f"{change['since']}  version {change['version']}, from the {change['origin']}"]
    lines += [f"  {line}" for line in change["changes"]]
    lines += [f"  REFUSED: {problem}" for problem in change["refused"]]
    return "\n".join(lines)


def _local_time(time: datetime | None) -> str:
    return "?" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _as_json(record: Any) -> dict[str, Any]:
    return {
        key: value.isoformat() if isinstance(value, datetime) else value
        for key, value in asdict(record).items()
    }
