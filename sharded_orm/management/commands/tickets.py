"""``manage.py tickets``: the sequences of the ticket servers."""

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
from sharded_orm.exceptions import TicketError
from sharded_orm.management.actions import add_action, failed
from sharded_orm.management.tables import write_table
from sharded_orm.operations import tickets
from sharded_orm.operations.tickets.creation import MARGIN

_WIDTH = 100
_BAD = {"WRONG", "DOES NOT ANSWER", "NOT CHECKED", "NOT MOVED"}
# Of a sequence's name in a table; a longer one has a line of its own.
_NAME_WIDTH = 24


class Command(BaseCommand):
    help = "Creates, shows, checks and repairs the sequences of the ticket servers."

    def add_arguments(self, parser: CommandParser) -> None:
        commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

        add = partial(add_action, commands)
        create = add(
            "create",
            "Begin the sequences that are missing, above every id that exists. What is there stays.",
        )
        _names(create, "By default all that models draw from.")
        create.add_argument(
            "--start",
            type=int,
            metavar="N",
            help="Of a new sequence, the first id may be this one.",
        )
        create.add_argument(
            "--form",
            choices=["update", "replace", "sequence"],
            help="How it counts. By default as on the other servers, else the database's usual one.",
        )
        _check(create, "Do not look for existing ids; needs --start.")

        status = add("status", "Show servers and sequences; status 1 when something is wrong.")
        status.add_argument("--json", action="store_true", help="Print one JSON object.")

        following = add("next", "Take ids and print them, one a line.")
        following.add_argument("name", metavar="NAME", help="The sequence.")
        following.add_argument(
            "--count", type=int, default=1, metavar="N", help="How many. Default: %(default)s"
        )

        advance = add(
            "advance",
            "Move servers above every id that is known to have left them, and a margin. They never"
            " go back.",
        )
        _names(advance, "By default all.")
        advance.add_argument("--server", metavar="ALIAS", help="Only this one.")
        target = advance.add_mutually_exclusive_group()
        target.add_argument(
            "--margin",
            type=int,
            default=MARGIN,
            metavar="N",
            help="How far above, for ids that are in no row. Default: %(default)s",
        )
        target.add_argument("--to", type=int, metavar="N", help="In place of that: up to N.")
        _check(advance, "Do not look for existing ids; needs --to.")
        advance.add_argument("--dry-run", action="store_true", help="Only tell what would be done.")

        verify = add(
            "verify",
            "Compare the servers with the largest ids of all shards; status 1 when one is behind.",
        )
        _names(verify, "By default all.")

    def handle(self, **options: Any) -> None:
        try:
            getattr(self, options["action"])(options)
        except (TicketError, ImproperlyConfigured, Error) as exc:
            raise CommandError(str(exc)) from exc

    # ##### The actions #####

    def create(self, options: dict[str, Any]) -> None:
        found = tickets.create(
            options["names"],
            start=options["start"],
            form=options["form"],
            check=options["check"],
        )
        if not found:
            self.stdout.write("No model draws from a sequence; name one to create it.")
            return
        self._table(
            ("sequence", "server", "form", ">next id", ""),
            [
                (one.name, one.alias, one.form, f"{one.next_id:,}", "made" if one.made else "was there")
                for one in found
            ],
        )  # fmt: skip

    def status(self, options: dict[str, Any]) -> None:
        told = tickets.status()
        if options["json"]:
            self.stdout.write(json.dumps(asdict(told), indent=2))
        else:
            self._show(told)
        if told.problems:
            raise failed(told.problems)

    def next(self, options: dict[str, Any]) -> None:
        ids = runtime.tickets().take(options["name"], options["count"])
        self.stdout.write("\n".join(map(str, ids)))

    def advance(self, options: dict[str, Any]) -> None:
        known = runtime.config().tickets
        if options["server"] not in (None, *known):
            raise CommandError(
                f"There is no ticket server {options['server']!r}; choose from {list(known)!r}."
            )
        moved = tickets.advance(
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
                (one.name, one.alias, _position(one.before), _position(one.after), _outcome(one))
                for one in moved
            ],
        )  # fmt: skip
        if problems := [one.problem for one in moved if one.problem]:
            raise failed(problems)

    def verify(self, options: dict[str, Any]) -> None:
        found = tickets.verify(options["names"], progress=self._progress(options))
        self._table(
            ("sequence", "server", ">position", ">partner's mark", ">id above", ""),
            [
                (one.name, one.alias, _position(one.position), _number(one.mark),
                 _number(one.offending, ""), _verdict(one))
                for one in found
            ],
        )  # fmt: skip
        if problems := [one.problem for one in found if one.problem]:
            raise failed(problems)

    # ##### Printing #####

    def _show(self, told: tickets.TicketStatus) -> None:
        self._table(
            ("server", ">offset", ">step", ""),
            [
                (one.alias, str(one.offset), str(one.step),
                 "answers" if one.error is None else "DOES NOT ANSWER")
                for one in told.servers
            ],
        )  # fmt: skip
        rows = sorted(
            (one.name, server.offset, server.alias, one)
            for server in told.servers
            for one in server.sequences
        )
        if rows:
            self.stdout.write("")
            self._table(
                ("sequence", "server", "form", ">position", ">partner's mark", ">used", ">drift", ""),
                [
                    (name, alias, one.form, _position(one.position), _number(one.mark),
                     f"{one.used:.2%}", _number(told.drift.get(name), ""),
                     "WRONG" if one.problem else "")
                    for name, _, alias, one in rows
                ],
            )  # fmt: skip
        weak: dict[str, list[str]] = {}
        for server in told.servers:
            if server.durability is not None:
                weak.setdefault(server.durability, []).append(server.alias)
        notes = [f"{', '.join(aliases)}: {sentence}." for sentence, aliases in weak.items()]
        if told.unused:
            notes.append(f"No installed model draws from {', '.join(told.unused)}.")
        for note in notes:
            text = textwrap.fill(note, _WIDTH, break_long_words=False, break_on_hyphens=False)
            self.stdout.write("")
            self.stdout.write(self.style.WARNING(text))

    def _table(self, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """What is said of one sequence stands together, its name once."""
        lines, last = [], ""
        for name, *rest in rows:
            shown = "" if name == last and heads[0] == "sequence" else name
            last = name
            if len(shown) > _NAME_WIDTH:
                lines.append([shown])
                shown = ""
            lines.append([shown, *rest])
        write_table(self, heads, lines, _BAD)

    def _progress(self, options: dict[str, Any]) -> tickets.Progress | None:
        """On a terminal, which sequence is looked at: a line that the table writes over."""
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
    # Of a sequence that has given no id, the row holds what comes before its first.
    return _number(None if number is None else max(number, 0))


def _verdict(one: tickets.Verified) -> str:
    if not one.checked:
        return "NOT CHECKED"
    return "WRONG" if one.problem else "ok"


def _outcome(one: tickets.Advanced) -> str:
    if one.problem:
        return "NOT MOVED"
    return "" if one.after != one.before else "stays"
