"""What the ticket servers tell of their sequences, all of them at once."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError

from sharded_orm import runtime
from sharded_orm.exceptions import InvalidSequence, TicketError, UnknownSequence
from sharded_orm.ids.tickets.pool import FAILURES
from sharded_orm.ids.tickets.server import TicketServer
from sharded_orm.ids.tickets.session import MAX_NAME, SequenceRow, TicketSession

# Seconds for one server to answer; nobody's page waits for it.
PATIENCE = 30.0

#: What asking one server may raise: it is down, or not what it should be.
TROUBLE = (*FAILURES, TicketError, ImproperlyConfigured)


@dataclass(frozen=True)
class SequencePosition:
    """One sequence on one server."""

    row: SequenceRow
    #: The last id that was handed out.
    position: int
    #: What is wrong with it, as the server tells it.
    problem: str | None = None


@dataclass(frozen=True)
class ServerAnswer:
    """What one server told; nothing but ``error`` when it did not answer."""

    server: TicketServer
    standings: Mapping[str, SequencePosition] = field(default_factory=dict)
    durability: str | None = None
    error: Exception | None = None


def all_servers() -> list[TicketServer]:
    """Those of ``SHARDED_ORM["TICKETS"]``, in order.

    :raises ImproperlyConfigured: there is none.
    """
    servers = runtime.tickets().servers
    if not servers:
        raise ImproperlyConfigured(
            "SHARDED_ORM['TICKETS'] names no ticket server; list the aliases of the pair."
        )
    return servers


def ask_all(servers: Sequence[TicketServer], patience: float = PATIENCE) -> list[ServerAnswer]:
    """Ask each server for all its sequences; a server that is down costs ``patience`` at most."""
    answers = [ask(server, patience) for server in servers]
    return [_with_places_checked(answer, answers) for answer in answers]


def ask(server: TicketServer, patience: float = PATIENCE) -> ServerAnswer:
    """What one server tells. Never raises what the server is to blame for."""
    deadline = time.monotonic() + patience

    def look(session: TicketSession) -> tuple[dict[str, SequencePosition], str | None]:
        rows = session.read_all(deadline)
        return (
            {row.name: _look(session, row, deadline) for row in rows},
            session.durability(deadline),
        )

    try:
        with server.session(deadline) as lent:
            standings, durability = lent.ask(look)
    except TROUBLE as exc:
        return ServerAnswer(server, error=exc)
    return ServerAnswer(server, standings, durability)


def _look(session: TicketSession, row: SequenceRow, deadline: float) -> SequencePosition:
    try:
        session.read(row.name, deadline)  # Also checks what belongs to the form.
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


def _with_places_checked(answer: ServerAnswer, answers: Sequence[ServerAnswer]) -> ServerAnswer:
    checked = {
        name: SequencePosition(
            standing.row,
            standing.position,
            misplaced(answer.server, standing.row, answers) or standing.problem,
        )
        for name, standing in answer.standings.items()
    }
    return ServerAnswer(answer.server, checked, answer.durability, answer.error)


def misplaced(
    server: TicketServer, row: SequenceRow, answers: Sequence[ServerAnswer] = ()
) -> str | None:
    """Why ``row`` cannot be one of ``server``; None when it can."""
    if row.slot == server.slot:
        return None
    slot = server.slot
    text = (
        f"SHARDED_ORM['TICKETS'] has {server.alias!r} as server {slot.position!r} of"
        f" {slot.step!r}, but its sequence {row.name!r} was made as server {row.position!r} of"
        f" {row.step!r}"
    )
    for other in answers:
        same = other.standings.get(row.name)
        if other.server is not server and same is not None and same.row.slot == row.slot:
            return (
                f"{text}, and so was that of {other.server.alias!r}: both aliases are the same"
                " database, or one is a copy of the other. Give each a database of its own."
            )
    return (
        f"{text}: did order or number of TICKETS change? Set it back to what it was; with another"
        " number of servers begin new sequences."
    )


def chosen(
    names: Iterable[str], declared: Iterable[str], answers: Sequence[ServerAnswer]
) -> list[str]:
    """The sequences to work on: those that are named, or all that are known.

    :raises UnknownSequence: of one neither models nor servers know.
    """
    known = {*declared, *(name for answer in answers for name in answer.standings)}
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name not in known and not any(answer.error for answer in answers):
            close = difflib.get_close_matches(name, known, 1)
            raise UnknownSequence(
                f"There is no sequence {name!r}, neither on a ticket server nor of a model."
                + (f" Did you mean {close[0]!r}?" if close else "")
                + f" Create it with 'manage.py tickets create {name}'."
            )
    return wanted or sorted(known)


def check_name(name: str) -> None:
    """:raises InvalidSequence: no sequence can be called so."""
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


def mark_of(answers: Sequence[ServerAnswer], index: int, name: str) -> int | None:
    """What its partner, the next of the ring, knows to have left server ``index``; 0 for nothing.

    None when there is no partner, or it does not tell.
    """
    if len(answers) < 2:
        return None
    keeper = answers[(index + 1) % len(answers)].standings.get(name)
    return keeper.row.predecessor_mark if keeper is not None else None


def is_behind(position: int, mark: int | None) -> bool:
    """Whether ids have left a server that would leave it again."""
    return mark is not None and max(position, 0) < mark
