"""Create sequences on ticket servers.

A new sequence begins above every id that exists in a table or was handed out by a server.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connections

from sharded_orm import runtime
from sharded_orm.ids.tickets.exceptions import (
    InvalidSequence,
    SequenceNotChecked,
    TicketServerMisconfigured,
)
from sharded_orm.ids.tickets.pool import FAILURES
from sharded_orm.ids.tickets.server import TicketServer
from sharded_orm.ids.tickets.session import LAST_ID, SequenceRow, TicketSession, session_class
from sharded_orm.models.fields import TicketField
from sharded_orm.operations.tickets.largest_ids import declared_sequences, largest
from sharded_orm.operations.tickets.survey import (
    PATIENCE,
    SequencePosition,
    all_servers,
    ask_all,
    check_name,
)

#: Number of ids to skip if a server may have handed out ids that are recorded nowhere.
MARGIN = 10_000


@dataclass(frozen=True)
class Begun:
    """The result of :func:`create` for one sequence on one server."""

    #: The sequence's name.
    name: str
    #: The server's alias.
    alias: str
    #: The kind of SQL statement with which the sequence makes its next id, such as ``update``.
    form: str
    #: The last id that the server has handed out; 0 or less if it has handed out no id.
    position: int
    #: The id that the server hands out next.
    next_id: int
    #: True if this call has created the sequence; False if the sequence existed.
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
    """Create sequences on all ticket servers that lack them; leave existing sequences as they are.

    May be repeated after an interruption. If a server has lost a sequence that other servers have,
    the new sequence begins above all ids that the other servers know of. All checks are made before
    the first sequence is created.

    :param names: names of sequences; by default those of all installed models.
    :param start: the smallest possible first id of a new sequence; by default the first id is above
        the largest existing one (as at Flickr, F4).
    :param form: the kind of SQL statement with which a new sequence makes its next id: ``update``,
        ``replace`` or ``sequence``. By default the form of the same sequence on the other servers,
        if this database supports it; otherwise the first form that this database supports.
    :param check: whether to look for existing ids in the tables. If False, ``start`` is required.
    :param only: create sequences only on the server with this alias; by default on all servers.
    :param servers: the servers; by default all in ``TICKETS``. All must answer.
    :raises InvalidSequence: a name, ``start`` or ``form`` is not possible, an existing sequence
        does not match ``start`` or ``form``, or an id at or above ``start`` exists.
    :raises SequenceNotChecked: a server, or a database with rows, does not answer.
    :raises TicketServerMisconfigured: a server does not match ``TICKETS``.
    """
    fields = declared_sequences()
    selected = list(dict.fromkeys(names)) or list(fields)
    _check_arguments(selected, start, check)
    servers = all_servers() if servers is None else servers
    sequences = _sequences_by_server(servers, selected)
    plan: list[tuple[str, TicketServer, int, str]] = []
    for name in selected:
        for by_name in sequences.values():
            if name in by_name:
                _require_same(by_name[name], start, form)
        missing = [
            server
            for server in servers
            if name not in sequences[server.alias] and only in (None, server.alias)
        ]
        if missing:
            present = [by_name[name] for by_name in sequences.values() if name in by_name]
            last_used = _last_used(name, fields.get(name, ()), start, check, present)
            if last_used >= LAST_ID:
                raise InvalidSequence(
                    f"Sequence {name!r} cannot begin above {last_used!r}: ids end at {LAST_ID!r}."
                )
            plan += [(name, server, last_used, _form(server, form, present)) for server in missing]
    for name, server, last_used, server_form in plan:
        begin(server, [name], after=last_used, form=server_form)
    created = {(name, server.alias) for name, server, _, _ in plan}
    # Read and check the sequences again. If two aliases lead to one database, both now show the
    # same new sequence, and the check fails.
    sequences = _sequences_by_server(servers, selected) if created else sequences
    return [
        _result(sequences[server.alias][name], server, (name, server.alias) in created)
        for name in selected
        for server in servers
        if name in sequences[server.alias]
    ]


def _require_same(sequence: SequencePosition, start: int | None, form: str | None) -> None:
    """Check that an existing sequence matches the form and the start that the caller wants.

    :param start: the smallest id that the caller wants, or None for any.
    :param form: the kind of SQL statement that the caller wants, or None for any.
    :raises InvalidSequence: the form of ``sequence`` is not ``form``, or the next id of
        ``sequence`` is below ``start``.
    """
    row = sequence.row
    if form is not None and form != row.form:
        raise InvalidSequence(
            f"Sequence {row.name!r} is there, of form {row.form!r} and not {form!r}. Leave out the"
            " form, or begin one of another name."
        )
    if start is not None and sequence.position < row.slot.at_or_below(start - 1):
        raise InvalidSequence(
            f"Sequence {row.name!r} is there, at {max(sequence.position, 0)!r} and below {start!r}. To"
            f" move it, run 'manage.py tickets advance {row.name} --to {start!r}'."
        )


def _result(sequence: SequencePosition, server: TicketServer, is_new: bool) -> Begun:
    row, position = sequence.row, sequence.position
    return Begun(row.name, server.alias, row.form, position, position + row.step, is_new)


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


def _sequences_by_server(
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
            sequence = answer.sequences.get(name)
            if sequence is not None and sequence.problem is not None:
                raise TicketServerMisconfigured(sequence.problem)
    return {answer.server.alias: answer.sequences for answer in answers}


def _last_used(
    name: str,
    fields: Sequence[TicketField],
    start: int | None,
    check: bool,
    present: Sequence[SequencePosition],
) -> int:
    """Return the number above which the ids of the new sequence ``name`` must begin.

    :param fields: the model fields that draw ids from the sequence.
    :param present: the positions of the sequence on the servers that have it already.
    """
    largest_id = largest(fields) if check else None
    existing = largest_id.id if largest_id is not None else 0
    if not present:
        if start is not None and largest_id is not None and start <= existing:
            raise InvalidSequence(
                f"Sequence {name!r} cannot start at {start!r}: id {existing!r} exists, in"
                f" {largest_id.where}. Leave out the start, or let it be {existing + 1!r} or more."
            )
        return existing if start is None else start - 1
    after = max(existing, 0 if start is None else start - 1)
    if all(_is_unused(sequence, after) for sequence in present):
        # No server has handed out an id of the sequence yet: an earlier call was interrupted before
        # it created the sequence on this server. So the sequence begins after the same number here.
        return after
    # Other servers have used the sequence, so this server was replaced or has lost it. The last ids
    # that it handed out may be in no row, and above its high-water mark, which the next server
    # keeps. So add a margin.
    positions = (number for s in present for number in (s.position, s.row.predecessor_mark))
    return max(after, *positions) + MARGIN


def _is_unused(sequence: SequencePosition, after: int) -> bool:
    """Return whether ``sequence`` begins above ``after`` and has handed out no id yet."""
    slot = sequence.row.slot
    first = slot.at_or_below(after)
    # If a new sequence makes its ids by an auto-increment column, its position may be the server's
    # first id, although that id was not handed out yet.
    return first <= sequence.position <= max(first, slot.position) and (
        sequence.row.predecessor_mark == 0
    )


def _form(server: TicketServer, form: str | None, present: Sequence[SequencePosition]) -> str:
    forms = session_class(connections[server.alias].vendor).forms
    if form is None:
        return next((s.row.form for s in present if s.row.form in forms), forms[0])
    if form not in forms:
        raise InvalidSequence(
            f"{server.alias!r} cannot have a sequence of form {form!r}; it has {list(forms)!r}."
        )
    return form


def begin(
    server: TicketServer, names: Iterable[str], *, after: int = 0, form: str | None = None
) -> list[SequenceRow]:
    """Create missing sequences on one server, and the catalog table that lists the sequences.

    Makes no checks: the caller says where the sequences begin.

    :param names: names of the sequences.
    :param after: new sequences begin above this number.
    :param form: the kind of SQL statement with which new sequences make the next id; by default the
        first kind that the database supports.
    """
    deadline = time.monotonic() + PATIENCE

    def make(session: TicketSession) -> list[SequenceRow]:
        session.create_catalog(deadline)
        chosen = session.forms[0] if form is None else form
        return [session.create(name, chosen, after, deadline) for name in names]

    with server.session(deadline) as handle:
        return handle.ask(make)


#: Sequences in test databases begin above this number, because ids in fixtures are usually smaller.
ABOVE_FIXTURES = 1_000_000_000

# The name of each ticket server's database before a test run replaced it, keyed by alias.
_original_names: dict[str, str] = {}


def is_test_database(alias: str) -> bool:
    """Whether a test run has replaced the database of ticket server ``alias`` by a test database."""
    return alias in _original_names and _database(alias) != _original_names[alias]


def _database(alias: str) -> str:
    return str(connections.settings[alias]["NAME"])


class TestSequences:
    """A receiver of ``post_migrate`` that creates the models' sequences in test databases.

    The sequences begin above :data:`ABOVE_FIXTURES`, so that new rows do not get the ids of rows in
    fixtures. In other databases the receiver does nothing, because the operator decides where a
    sequence begins.
    """

    __test__ = False

    def __init__(self) -> None:
        _original_names.update({alias: _database(alias) for alias in runtime.config().tickets})

    def __call__(self, *, using: str, **kwargs: Any) -> None:
        if is_test_database(using):
            for server in runtime.tickets().servers:
                if server.alias == using:
                    begin(server, declared_sequences(), after=ABOVE_FIXTURES)
