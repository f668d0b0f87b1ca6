"""Read all sequences of all ticket servers.

A ticket server hands out ids. Its *high-water mark* is the highest id that it is known to have
handed out. The mark is stored on its *partner*, the next server in the settings. The *slot* of a
server says which ids it hands out: for example, the second of two servers hands out 2, 4, 6, …
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
# default, and they can wait. Monitoring uses the smaller default of the module ``status``.
PATIENCE = 30.0

#: The errors of a server that is down or does not match the settings.
TROUBLE = (*FAILURES, TicketError, ImproperlyConfigured)


@dataclass(frozen=True)
class SequencePosition:
    """One sequence on one ticket server, with the last id that the server has handed out."""

    #: The sequence's row in the server's catalog table.
    row: SequenceRow
    #: The last id that the server has handed out; 0 or less if it has handed out no id.
    position: int
    #: What is wrong with the sequence on this server; None if all is well.
    problem: str | None = None


@dataclass(frozen=True)
class ServerAnswer:
    """The sequences of one ticket server, or the error if it did not answer."""

    server: TicketServer
    #: Maps the name of each sequence to the sequence; empty if the server did not answer.
    sequences: Mapping[str, SequencePosition] = field(default_factory=dict)
    #: Why a crash could make the server forget ids that it has handed out. None if it cannot forget
    #: them, or if it did not answer.
    durability: str | None = None
    #: Why the server did not answer; None if it answered.
    error: Exception | None = None


def all_servers() -> list[TicketServer]:
    """Return the ticket servers in the order of ``SHARDED_ORM["TICKETS"]``.

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

    Also check that each sequence hands out the ids of its server. For example, the first of two
    servers must not hand out even numbers. If a sequence is wrong, its ``problem`` says so.

    :param patience: seconds to wait for one server.
    """
    answers = [ask(server, patience) for server in servers]
    return [_with_slots_checked(answer, answers) for answer in answers]


def ask(server: TicketServer, patience: float = PATIENCE) -> ServerAnswer:
    """Read all sequences of ``server``. If it fails, the error is in the returned answer.

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
        # ``row`` is from read_all(), which reads only the catalog table. read() also checks the
        # table or SEQUENCE that counts the ids.
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
    """Return a text about the problem if a sequence does not hand out the ids of its server.

    Return None if it does hand them out.

    Each server has a slot, which says which ids it hands out. The sequence was created with the
    slot that the server had then. The slot may have changed since, because somebody has changed the
    order or the number of the servers in the settings.

    :param row: the sequence, as the server has it.
    :param answers: the answers of all servers; empty to look only at ``server``. If another server
        has the sequence with the same slot, the text says that both aliases are one database, or
        one database is a copy of the other.
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
    """Return the names of the sequences on which a command has to work.

    These are ``names`` without duplicates. If ``names`` is empty, they are the names of all
    sequences that a model uses or a server has.

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
    """Check that a new sequence can have this name.

    :raises InvalidSequence: the name is too long, empty, or has characters that are not allowed.
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
    """Return the high-water mark of server number ``index`` for the sequence ``name``.

    This is the highest id that the server is known to have handed out; 0 if it has handed out none.
    The next server, the partner, stores this number. Return None if there is only one server, or if
    the partner did not answer or lacks the sequence.
    """
    if len(answers) < 2:
        return None
    partner = answers[(index + 1) % len(answers)].sequences.get(name)
    return partner.row.predecessor_mark if partner is not None else None


def is_behind(position: int, high_water_mark: int | None) -> bool:
    """Return whether a server would hand out ids for a second time.

    This is so if it has handed out more ids than it remembers, for example because it was restored
    from a backup.

    :param position: the last id that the server has handed out, as it has stored it itself.
    :param high_water_mark: the highest id that the server has handed out, as another server, its
        partner, has stored it. None means that it is not known; then the result is False.
    """
    return high_water_mark is not None and max(position, 0) < high_water_mark
