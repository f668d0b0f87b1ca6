"""Sequences are begun: above every id that exists, and above what other servers gave."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connections

from sharded_orm import runtime
from sharded_orm.exceptions import (
    InvalidSequence,
    SequenceNotChecked,
    TicketServerMisconfigured,
)
from sharded_orm.ids.tickets.pool import FAILURES
from sharded_orm.ids.tickets.server import TicketServer
from sharded_orm.ids.tickets.session import LAST_ID, SequenceRow, TicketSession, session_class
from sharded_orm.models.fields import TicketField
from sharded_orm.operations.tickets.largest_ids import declared, largest
from sharded_orm.operations.tickets.survey import (
    PATIENCE,
    SequencePosition,
    all_servers,
    ask_all,
    check_name,
)

#: Ids that are left out where more may have been handed out than anybody can tell now.
MARGIN = 10_000


@dataclass(frozen=True)
class Begun:
    """A sequence on one server, after :func:`create`."""

    name: str
    alias: str
    form: str
    #: The last id that was handed out, and the one that is next.
    position: int
    next_id: int
    #: It was not there before.
    made: bool


def create(
    names: Iterable[str] = (),
    *,
    start: int | None = None,
    form: str | None = None,
    check: bool = True,
    only: str | None = None,
    servers: Sequence[TicketServer] | None = None,
) -> list[Begun]:
    """Begin the sequences on all servers where they are missing; leave those that are there.

    May be repeated, and finishes what was cut off: a server that has lost a sequence begins
    above everything that the others know. Nothing is begun when anything is wrong.

    :param names: by default all that the installed models draw from.
    :param start: the first id of a new sequence may be this one; by default it is above the
        largest that exists (F4).
    :param form: ``update``, ``replace`` or ``sequence``; by default what the other servers
        have, else the first that the database has.
    :param check: look for existing ids; without it ``start`` must be given.
    :param only: the alias of one server, if the others are to be made later.
    :raises InvalidSequence: name, start or form are not possible; an id exists at or above
        ``start``.
    :raises SequenceNotChecked: a server, or a shard with rows, does not answer.
    :raises TicketServerMisconfigured: a server is not the one that ``TICKETS`` says.
    """
    fields = declared()
    wanted = list(dict.fromkeys(names)) or list(fields)
    _check_arguments(wanted, start, check)
    servers = all_servers() if servers is None else servers
    standings = _standings(servers, wanted)
    plan: list[tuple[str, TicketServer, int, str]] = []
    for name in wanted:
        for known in standings.values():
            if name in known:
                _refuse_other(known[name], start, form)
        missing = [
            server
            for server in servers
            if name not in standings[server.alias] and only in (None, server.alias)
        ]
        if missing:
            there = [known[name] for known in standings.values() if name in known]
            after = _after(name, fields.get(name, ()), start, check, there)
            if after >= LAST_ID:
                raise InvalidSequence(
                    f"Sequence {name!r} cannot begin above {after!r}: ids end at {LAST_ID!r}."
                )
            plan += [(name, server, after, _form(server, form, there)) for server in missing]
    for name, server, after, its_form in plan:
        begin(server, [name], after=after, form=its_form)
    made = {(name, server.alias) for name, server, _, _ in plan}
    # Two aliases of one database only show now: what was made by one is seen by the other.
    standings = _standings(servers, wanted) if made else standings
    return [
        _begun(standings[server.alias][name], server, (name, server.alias) in made)
        for name in wanted
        for server in servers
        if name in standings[server.alias]
    ]


def _refuse_other(standing: SequencePosition, start: int | None, form: str | None) -> None:
    """Raise if what is there is not what is asked for."""
    row = standing.row
    if form is not None and form != row.form:
        raise InvalidSequence(
            f"Sequence {row.name!r} is there, of form {row.form!r} and not {form!r}. Leave out the"
            " form, or begin one of another name."
        )
    if start is not None and standing.position < row.slot.at_or_below(start - 1):
        raise InvalidSequence(
            f"Sequence {row.name!r} is there, at {max(standing.position, 0)!r} and below {start!r}. To"
            f" move it, run 'manage.py tickets advance {row.name} --to {start!r}'."
        )


def _begun(standing: SequencePosition, server: TicketServer, made: bool) -> Begun:
    row, position = standing.row, standing.position
    return Begun(row.name, server.alias, row.form, position, position + row.step, made)


def _check_arguments(names: Sequence[str], start: int | None, check: bool) -> None:
    for name in names:
        check_name(name)
    if start is not None and not 1 <= start <= LAST_ID:
        raise InvalidSequence(
            f"A sequence cannot start at {start!r}; ids are numbers from 1 to {LAST_ID!r}."
        )
    if not check and start is None:
        raise InvalidSequence(
            "Without looking for existing ids a start must be given (--start N), which is above"
            " all of them."
        )


def _standings(
    servers: Sequence[TicketServer], names: Sequence[str]
) -> dict[str, Mapping[str, SequencePosition]]:
    answers = ask_all(servers)
    for answer in answers:
        if isinstance(answer.error, FAILURES):
            raise SequenceNotChecked(
                f"Ticket server {answer.server.alias!r} does not answer ({answer.error}). It may"
                " know of ids that have been handed out: begin sequences when all servers are up."
            ) from answer.error
        if answer.error is not None:
            raise answer.error
    for answer in answers:
        for name in names:
            standing = answer.standings.get(name)
            if standing is not None and standing.problem is not None:
                raise TicketServerMisconfigured(standing.problem)
    return {answer.server.alias: answer.standings for answer in answers}


def _after(
    name: str,
    fields: Sequence[TicketField],
    start: int | None,
    check: bool,
    there: Sequence[SequencePosition],
) -> int:
    """What the first id must be above."""
    found = largest(fields) if check else None
    existing = found.id if found is not None else 0
    if not there:
        if start is not None and found is not None and start <= existing:
            raise InvalidSequence(
                f"Sequence {name!r} cannot start at {start!r}: id {existing!r} exists, in"
                f" {found.where}. Leave out the start, or let it be {existing + 1!r} or more."
            )
        return existing if start is None else start - 1
    after = max(existing, 0 if start is None else start - 1)
    if all(_untouched(standing, after) for standing in there):
        return after  # The rest of a set of servers that is being made.
    # One is replaced. What it gave last may be in no row yet, and nobody was told.
    known = (number for s in there for number in (s.position, s.row.predecessor_mark))
    return max(after, *known) + MARGIN


def _untouched(standing: SequencePosition, after: int) -> bool:
    """Whether the sequence was begun after the same id and has given none."""
    slot = standing.row.slot
    begun = slot.at_or_below(after)
    # A table that counts by itself has its first number from the beginning.
    return begun <= standing.position <= max(begun, slot.position) and (
        standing.row.predecessor_mark == 0
    )


def _form(server: TicketServer, form: str | None, there: Sequence[SequencePosition]) -> str:
    forms = session_class(connections[server.alias].vendor).forms
    if form is None:
        return next((s.row.form for s in there if s.row.form in forms), forms[0])
    if form not in forms:
        raise InvalidSequence(
            f"{server.alias!r} cannot have a sequence of form {form!r}; it has {list(forms)!r}."
        )
    return form


def begin(
    server: TicketServer, names: Iterable[str], *, after: int = 0, form: str | None = None
) -> list[SequenceRow]:
    """Make the catalog and the sequences on one server, where they are missing. Checks nothing.

    :param after: the ids of new ones are larger.
    :param form: by default the first that the database has.
    """
    deadline = time.monotonic() + PATIENCE

    def make(session: TicketSession) -> list[SequenceRow]:
        session.create_catalog(deadline)
        chosen = session.forms[0] if form is None else form
        return [session.create(name, chosen, after, deadline) for name in names]

    with server.session(deadline) as lent:
        return lent.ask(make)


# The databases of the ticket servers, as they were before a test run changed them.
_real: dict[str, str] = {}


def is_test_database(alias: str) -> bool:
    """Whether a test run has put a database of its own in the place of a ticket server's."""
    return alias in _real and _database(alias) != _real[alias]


def _database(alias: str) -> str:
    return str(connections.settings[alias]["NAME"])


class TestSequences:
    """Begins all declared sequences in test databases, where there are no rows yet.

    Called after each ``migrate``. What it sees in a real database it leaves alone: where a
    sequence begins there is for the operator to say.
    """

    __test__ = False

    def __init__(self) -> None:
        _real.update({alias: _database(alias) for alias in runtime.config().tickets})

    def __call__(self, *, using: str, **kwargs: Any) -> None:
        if is_test_database(using):
            for server in runtime.tickets().servers:
                if server.alias == using:
                    begin(server, declared())
