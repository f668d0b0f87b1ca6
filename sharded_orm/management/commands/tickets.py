"""``manage.py tickets``: create, show, check and repair the sequences of the ticket servers."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management import BaseCommand, CommandError
from django.core.management.base import CommandParser
from django.db import Error

from sharded_orm import runtime
from sharded_orm.ids.tickets.exceptions import TicketError
from sharded_orm.management.actions import add_action, problems_error
from sharded_orm.management.error_text import error_text
from sharded_orm.management.tables import write_table
from sharded_orm.operations import tickets
from sharded_orm.operations.tickets.creation import MARGIN

_WIDTH = 100
_ERROR_CELLS = {"WRONG", "DOES NOT ANSWER", "NOT CHECKED", "NOT MOVED"}
# Width of the column with the names of sequences, in characters. A row with a longer name takes two
# lines.
_NAME_WIDTH = 24


class Command(BaseCommand):
    help = "Creates, shows, checks and repairs the sequences of the ticket servers."

    def add_arguments(self, parser: CommandParser) -> None:
        commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

        add = partial(add_action, commands)
        create = add(
            "create",
            "Create missing sequences, above every existing id. Existing sequences stay.",
        )
        _names(create, "By default all sequences that models draw from.")
        create.add_argument(
            "--start",
            type=int,
            metavar="N",
            help="The smallest possible first id of a new sequence.",
        )
        create.add_argument(
            "--form",
            choices=["update", "replace", "sequence"],
            help="How the sequence makes its next number. By default as on the other servers or, if none"
            " has the sequence, in the usual way of the database.",
        )
        _check(create, "Do not look for existing ids; needs --start.")

        status = add("status", "Show servers and sequences; exit status 1 if something is wrong.")
        status.add_argument("--json", action="store_true", help="Print one JSON object.")

        next_ids = add("next", "Take ids and print them, one per line.")
        next_ids.add_argument("name", metavar="NAME", help="The sequence.")
        next_ids.add_argument(
            "--count",
            type=int,
            default=1,
            metavar="N",
            help="How many ids to take. Default: %(default)s",
        )

        advance = add(
            "advance",
            "Move servers by a margin above every id that they are known to have handed out. They"
            " never go back.",
        )
        _names(advance, "By default all.")
        advance.add_argument("--server", metavar="ALIAS", help="Move only this server.")
        target = advance.add_mutually_exclusive_group()
        target.add_argument(
            "--margin",
            type=int,
            default=MARGIN,
            metavar="N",
            help="How far to move above the highest known id, because ids that are in no row are unknown."
            " Default: %(default)s",
        )
        target.add_argument("--to", type=int, metavar="N", help="Move to N, without a margin.")
        _check(advance, "Do not look for existing ids; needs --to.")
        advance.add_argument("--dry-run", action="store_true", help="Only show what would be done.")

        verify = add(
            "verify",
            "Compare the servers with the largest ids on all shards; exit status 1 if one is behind.",
        )
        _names(verify, "By default all.")

    def handle(self, **options: Any) -> None:
        try:
            getattr(self, options["action"])(options)
        except (TicketError, ImproperlyConfigured, Error) as exc:
            raise CommandError(error_text(exc)) from exc

    # ##### The actions #####

    def create(self, options: dict[str, Any]) -> None:
        sequences = tickets.create(
            options["names"],
            start=options["start"],
            form=options["form"],
            check=options["check"],
        )
        if not sequences:
            self.stdout.write("No model draws from a sequence; name one to create it.")
            return
        self._table(
            ("sequence", "server", "form", ">next id", ""),
            [
                (sequence.name, sequence.alias, sequence.form, f"{sequence.next_id:,}",
                 "made" if sequence.made else "was there")
                for sequence in sequences
            ],
        )  # fmt: skip

    def status(self, options: dict[str, Any]) -> None:
        status = tickets.status()
        if options["json"]:
            self.stdout.write(json.dumps(asdict(status), indent=2))
        else:
            self._show(status)
        if status.problems:
            raise problems_error(status.problems)

    def next(self, options: dict[str, Any]) -> None:
        ids = runtime.tickets().take(options["name"], options["count"])
        self.stdout.write("\n".join(map(str, ids)))

    def advance(self, options: dict[str, Any]) -> None:
        servers = runtime.config().tickets
        if options["server"] not in (None, *servers):
            raise CommandError(
                f"There is no ticket server {options['server']!r}; choose from {list(servers)!r}."
            )
        results = tickets.advance(
            options["names"],
            margin=options["margin"],
            to=options["to"],
            check=options["check"],
            dry_run=options["dry_run"],
            only=options["server"],
            progress=self._progress(options),
        )
        self._table(
            ("sequence", "server", ">was at", ">would be at" if options["dry_run"] else ">is at", ""),
            [
                (result.name, result.alias, _position(result.before), _position(result.after),
                 _outcome(result))
                for result in results
            ],
        )  # fmt: skip
        if problems := [result.problem for result in results if result.problem]:
            raise problems_error(problems)

    def verify(self, options: dict[str, Any]) -> None:
        results = tickets.verify(options["names"], progress=self._progress(options))
        self._table(
            ("sequence", "server", ">position", ">partner's mark", ">id above", ""),
            [
                (result.name, result.alias, _position(result.position), _number(result.mark),
                 _number(result.offending, ""), _verdict(result))
                for result in results
            ],
        )  # fmt: skip
        if problems := [result.problem for result in results if result.problem]:
            raise problems_error(problems)

    # ##### Printing #####

    def _show(self, status: tickets.TicketStatus) -> None:
        self._table(
            ("server", ">offset", ">step", ""),
            [
                (server.alias, str(server.offset), str(server.step),
                 "answers" if server.error is None else "DOES NOT ANSWER")
                for server in status.servers
            ],
        )  # fmt: skip
        rows = sorted(
            (sequence.name, server.offset, server.alias, sequence)
            for server in status.servers
            for sequence in server.sequences
        )
        if rows:
            self.stdout.write("")
            self._table(
                ("sequence", "server", "form", ">position", ">partner's mark", ">used", ">drift", ""),
                [
                    (name, alias, sequence.form, _position(sequence.position), _number(sequence.mark),
                     f"{sequence.used:.2%}", _number(status.drift.get(name), ""),
                     "WRONG" if sequence.problem else "")
                    for name, _, alias, sequence in rows
                ],
            )  # fmt: skip
        weak: dict[str, list[str]] = {}
        for server in status.servers:
            if server.durability is not None:
                weak.setdefault(server.durability, []).append(server.alias)
        notes = [f"{', '.join(aliases)}: {sentence}." for sentence, aliases in weak.items()]
        if status.unused:
            notes.append(f"No installed model draws from {', '.join(status.unused)}.")
        for note in notes:
            text = textwrap.fill(note, _WIDTH, break_long_words=False, break_on_hyphens=False)
            self.stdout.write("")
            self.stdout.write(self.style.WARNING(text))

    def _table(self, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table with one line for each of ``rows``.

        If rows of the same sequence follow each other, only the first shows its name.
        """
        lines, last = [], ""
        for name, *cells in rows:
            shown = "" if name == last and headings[0] == "sequence" else name
            last = name
            if len(shown) > _NAME_WIDTH:
                lines.append([shown])
                shown = ""
            lines.append([shown, *cells])
        write_table(self, headings, lines, _ERROR_CELLS)

    def _progress(self, options: dict[str, Any]) -> tickets.Progress | None:
        """Return a function that shows on the terminal which sequence is handled now.

        Each call overwrites the line of the previous call. Return None if the output is not a
        terminal, or with verbosity 0.
        """
        if not options["verbosity"] or not getattr(self.stdout, "isatty", lambda: False)():
            return None

        def show(done: int, total: int, name: str) -> None:
            text = f"{done}/{total} {name}" if done < total else ""
            self.stdout.write(f"\r{text:<79.79}" + ("" if text else "\r"), ending="")
            self.stdout.flush()

        return show


def _names(parser: CommandParser, text: str) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"Only these sequences. {text}")


def _check(parser: CommandParser, text: str) -> None:
    parser.add_argument("--no-check", action="store_false", dest="check", help=text)


def _number(number: int | None, otherwise: str = "?") -> str:
    return otherwise if number is None else f"{number:,}"


def _position(number: int | None) -> str:
    # The position of a new sequence is one step below its first id, and may be negative. Show 0
    # instead.
    return _number(None if number is None else max(number, 0))


def _verdict(result: tickets.Verified) -> str:
    if not result.checked:
        return "NOT CHECKED"
    return "WRONG" if result.problem else "ok"


def _outcome(result: tickets.Advanced) -> str:
    if result.problem:
        return "NOT MOVED"
    return "" if result.after != result.before else "stays"
