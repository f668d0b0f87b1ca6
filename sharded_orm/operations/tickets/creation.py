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

#: If a new server replaces a lost server, nobody may know the last ids that the lost server has
#: handed out. So the new server skips this number of ids, in order not to hand out these ids again.
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
    #: The last id that the server has handed out; 0 or less if it has handed out none.
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
    """Create sequences on all ticket servers that lack them.

    Existing sequences stay as they are. All checks are made before the first sequence is created.
    If the call was interrupted, it can be repeated. If only some servers have a sequence, for
    example because a server was replaced, the sequence is created on the other servers, and begins
    there above all ids that are known.

    :param names: names of sequences; by default those of all installed models.
    :param start: a new sequence hands out no id below this number. By default, it begins above the
        largest id in the tables (as at Flickr, F4).
    :param form: the kind of SQL statement with which a new sequence makes its next id: ``update``,
        ``replace`` or ``sequence``. By default, it is the form of the same sequence on the other
        servers, if this database supports it; otherwise the first form that it supports.
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
    # Read and check the sequences again. Each server has a slot, which says which ids it hands out.
    # If two aliases in the settings lead to the same database, the check fails now, because the new
    # sequence has the slot of only one of the two servers.
    sequences = _sequences_by_server(servers, selected) if created else sequences
    return [
        _result(sequences[server.alias][name], server, (name, server.alias) in created)
        for name in selected
        for server in servers
        if name in sequences[server.alias]
    ]


def _require_same(sequence: SequencePosition, start: int | None, form: str | None) -> None:
    """Check that an existing sequence is as the caller of :func:`create` wants it.

    :param start: the sequence must not hand out ids below this number; None accepts any.
    :param form: the form that the sequence must have; None accepts any.
    :raises InvalidSequence: the sequence has a different form, or its next id is below ``start``.
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
    """Return the number above which the new sequence ``name`` must begin.

    :param fields: the model fields that get their ids from the sequence.
    :param present: the sequence as it is on the servers that have it already.
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
        # Some servers have the sequence, but have handed out no id of it yet. So an earlier call
        # was interrupted before it had created the sequence on all servers. On the other servers,
        # let the sequence begin at the same number.
        return after
    # Other servers have handed out ids of the sequence. So the server that lacks the sequence was
    # replaced, or has lost it. Perhaps nobody knows the last ids that it has handed out: they may
    # be above the mark that the next server has stored for it, and no row with them is saved yet.
    # So skip some ids, in order not to hand out these ids again.
    positions = (number for s in present for number in (s.position, s.row.predecessor_mark))
    return max(after, *positions) + MARGIN


def _is_unused(sequence: SequencePosition, after: int) -> bool:
    """Return whether ``sequence`` begins above ``after`` and has handed out no id yet."""
    slot = sequence.row.slot
    first = slot.at_or_below(after)
    # The position is the last id that was handed out. But a new sequence with an auto-increment
    # column may have the server's first id as its position, although nobody has got this id yet.
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
    """Create the sequences ``names`` on one server, if they do not exist there.

    The catalog table, which lists the sequences of the server, is created, too. Does not look for
    existing ids: the caller must know that all ids above ``after`` are free.

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


#: Sequences in test databases begin above this number. Ids in fixtures are usually smaller, so a
#: new row does not get the id of a row in a fixture.
ABOVE_FIXTURES = 1_000_000_000

# Maps the alias of each ticket server to the name of its database outside of test runs.
_original_names: dict[str, str] = {}


def is_test_database(alias: str) -> bool:
    """Return whether ticket server ``alias`` uses a test database, as it does during a test run."""
    return alias in _original_names and _database(alias) != _original_names[alias]


def _database(alias: str) -> str:
    return str(connections.settings[alias]["NAME"])


class TestSequences:
    """A receiver of ``post_migrate`` that creates the models' sequences in test databases.

    So tests need not create them. The sequences begin above :data:`ABOVE_FIXTURES`. In other
    databases, the receiver does nothing, because there an operator must decide where a sequence
    begins.
    """

    __test__ = False

    def __init__(self) -> None:
        _original_names.update({alias: _database(alias) for alias in runtime.config().tickets})

    def __call__(self, *, using: str, **kwargs: Any) -> None:
        if is_test_database(using):
            for server in runtime.tickets().servers:
                if server.alias == using:
                    begin(server, declared_sequences(), after=ABOVE_FIXTURES)
