"""Read all sequences of all ticket servers.

A ticket server hands out ids. Its *high-water mark* is the highest id that it is known to have handed
out. The mark is stored on its *partner*, the next server in the settings. The *slot* of a server
says which ids it hands out: every ``step``-th id, beginning with ``offset``.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError

from sharded_orm import runtime
from sharded_orm.ids.tickets.exceptions import InvalidSequence, TicketError, UnknownSequence
from sharded_orm.ids.tickets.pool import FAILURES
from sharded_orm.ids.tickets.server import TicketServer
from sharded_orm.ids.tickets.session import MAX_NAME, SequenceRow, TicketSession

# The largest number of seconds to wait for one server. It is large, because only commands use this
# default, and no web page does.
PATIENCE = 30.0

#: Errors that mean that a server is down or does not match the settings.
TROUBLE = (*FAILURES, TicketError, ImproperlyConfigured)


@dataclass(frozen=True)
class SequencePosition:
    """The position (the last id that was handed out) of one sequence on one ticket server."""

    #: The sequence's row in the server's catalog table.
    row: SequenceRow
    #: The last id that the server has handed out; 0 or less if it has handed out no id.
    position: int
    #: What is wrong with the sequence on this server; None if all is well.
    problem: str | None = None


@dataclass(frozen=True)
class ServerAnswer:
    """What one ticket server has answered when its sequences were read."""

    server: TicketServer
    #: The server's sequences, keyed by name; empty if the server did not answer.
    sequences: Mapping[str, SequencePosition] = field(default_factory=dict)
    #: Why the server may forget, in a crash, ids that it has handed out. None if it cannot forget
    #: them, or if the server did not answer.
    durability: str | None = None
    #: Why the server did not answer; None if it answered.
    error: Exception | None = None


def all_servers() -> list[TicketServer]:
    """Return the servers in ``SHARDED_ORM["TICKETS"]``, in the same order.

    :raises ImproperlyConfigured: no server is configured.
    """
    servers = runtime.tickets().servers
    if not servers:
        raise ImproperlyConfigured(
            "SHARDED_ORM['TICKETS'] names no ticket server; list the aliases of the pair."
        )
    return servers


def ask_all(servers: Sequence[TicketServer], patience: float = PATIENCE) -> list[ServerAnswer]:
    """Read all sequences of each ticket server, one server after the other.

    Also check that each sequence has the slot of its server (the server's share of all ids).

    :param patience: seconds to wait for one server.
    """
    answers = [ask(server, patience) for server in servers]
    return [_with_slots_checked(answer, answers) for answer in answers]


def ask(server: TicketServer, patience: float = PATIENCE) -> ServerAnswer:
    """Read all sequences of ``server``. If the server fails, the returned answer contains the
    error.

    :param patience: seconds to wait.
    """
    deadline = time.monotonic() + patience

    def read(session: TicketSession) -> tuple[dict[str, SequencePosition], str | None]:
        rows = session.read_all(deadline)
        return (
            {row.name: _read_sequence(session, row, deadline) for row in rows},
            session.durability(deadline),
        )

    try:
        with server.session(deadline) as handle:
            sequences, durability = handle.ask(read)
    except TROUBLE as exc:
        return ServerAnswer(server, error=exc)
    return ServerAnswer(server, sequences, durability)


def _read_sequence(session: TicketSession, row: SequenceRow, deadline: float) -> SequencePosition:
    try:
        # Read the sequence again by read(), because read_all() does not check the table or SEQUENCE
        # that counts the ids.
        session.read(row.name, deadline)
        return SequencePosition(row, session.position(row, deadline))
    except TicketError as exc:
        return SequencePosition(row, row.value, str(exc))
    except OperationalError as exc:
        if not session.is_missing_table(exc):
            raise
        return SequencePosition(
            row,
            row.value,
            f"Sequence {row.name!r} on {session.alias!r} has lost what it counts with ({exc}): restore"
            " it, or delete its row of the catalog and run 'manage.py tickets create'.",
        )


def _with_slots_checked(answer: ServerAnswer, answers: Sequence[ServerAnswer]) -> ServerAnswer:
    checked = {
        name: SequencePosition(
            sequence.row,
            sequence.position,
            slot_problem(answer.server, sequence.row, answers) or sequence.problem,
        )
        for name, sequence in answer.sequences.items()
    }
    return ServerAnswer(answer.server, checked, answer.durability, answer.error)


def slot_problem(
    server: TicketServer, row: SequenceRow, answers: Sequence[ServerAnswer] = ()
) -> str | None:
    """Return a text about why the sequence ``row`` cannot belong to ``server``; None if it can.

    The sequence must have the slot of its server: the server's share of all ids (offset and step).

    :param answers: the answers of all servers; empty to look only at ``server``. If a second server
        has the same sequence with the same slot, the text says so: both are the same database, or
        one is a copy of the other.
    """
    if row.slot == server.slot:
        return None
    slot = server.slot
    text = (
        f"SHARDED_ORM['TICKETS'] has {server.alias!r} as server {slot.position!r} of"
        f" {slot.step!r}, but its sequence {row.name!r} was made as server {row.position!r} of"
        f" {row.step!r}"
    )
    for other in answers:
        same_sequence = other.sequences.get(row.name)
        if (
            other.server is not server
            and same_sequence is not None
            and same_sequence.row.slot == row.slot
        ):
            return (
                f"{text}, and so was that of {other.server.alias!r}: both aliases are the same"
                " database, or one is a copy of the other. Give each a database of its own."
            )
    return (
        f"{text}: did order or number of TICKETS change? Set it back to what it was; with another"
        " number of servers begin new sequences."
    )


def select_names(
    names: Iterable[str], declared_names: Iterable[str], answers: Sequence[ServerAnswer]
) -> list[str]:
    """Return ``names`` without duplicates; if it is empty, the names of all sequences that a model
    uses or a server has.

    :param declared_names: the names of the sequences that models use.
    :param answers: the answers of all servers.
    :raises UnknownSequence: one of ``names`` is unknown to all models and servers. Not raised if a
        server did not answer, because that server may have the sequence.
    """
    known_names = {*declared_names, *(name for answer in answers for name in answer.sequences)}
    selected = list(dict.fromkeys(names))
    for name in selected:
        if name not in known_names and not any(answer.error for answer in answers):
            similar = difflib.get_close_matches(name, known_names, 1)
            raise UnknownSequence(
                f"There is no sequence {name!r}, neither on a ticket server nor of a model."
                + (f" Did you mean {similar[0]!r}?" if similar else "")
                + f" Create it with 'manage.py tickets create {name}'."
            )
    return selected or sorted(known_names)


def check_name(name: str) -> None:
    """Check the name of a new sequence.

    :raises InvalidSequence: no sequence can have this name.
    """
    if len(name) > MAX_NAME:
        raise InvalidSequence(
            f"A sequence cannot be called {name!r}: {len(name)} characters, and {MAX_NAME} are"
            " possible. Name a shorter one: TicketField(sequence=…)."
        )
    if not name or not name.isprintable() or name != name.strip() or "`" in name:
        raise InvalidSequence(
            f"A sequence cannot be called {name!r}: its name must be printable text without"
            " backquotes, and without blanks at its ends."
        )


def high_water_mark_of(answers: Sequence[ServerAnswer], index: int, name: str) -> int | None:
    """Return the high-water mark of server number ``index``: the highest id of the sequence
    ``name`` that it is known to have handed out; 0 if it has handed out none.

    The server's partner, which is the next server, keeps the mark. Return None if there is only one
    server, or if the partner did not answer or lacks the sequence.
    """
    if len(answers) < 2:
        return None
    partner = answers[(index + 1) % len(answers)].sequences.get(name)
    return partner.row.predecessor_mark if partner is not None else None


def is_behind(position: int, high_water_mark: int | None) -> bool:
    """Return whether a server would hand out ids for a second time.

    The server's position is the last id that it handed out, by its own count. Its high-water mark
    is the highest id that it is known to have handed out. The result is True if the position is
    below the mark, and False if the mark is not known (None).
    """
    return high_water_mark is not None and max(position, 0) < high_water_mark
