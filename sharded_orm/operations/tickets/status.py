"""How the ticket servers are, for operators and monitoring."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sharded_orm.ids.tickets.server import TicketServer
from sharded_orm.ids.tickets.session import LAST_ID
from sharded_orm.operations.tickets.largest_ids import declared
from sharded_orm.operations.tickets.survey import (
    SequencePosition,
    ServerAnswer,
    all_servers,
    ask,
    ask_all,
    is_behind,
    mark_of,
)

# Seconds for one server; what monitors waits for all of them.
PATIENCE = 5.0


@dataclass(frozen=True)
class SequenceStatus:
    """A sequence on one server."""

    name: str
    form: str
    #: The last id that was handed out; 0 or less for none.
    position: int
    #: The highest id that the partner knows to have left this server; None if it cannot tell.
    mark: int | None
    #: Of the positive 64-bit numbers, how much is used up: 0 to 1.
    used: float
    problem: str | None


@dataclass(frozen=True)
class ServerStatus:
    """A ticket server. It gives ``offset``, ``offset + step``, … (F2)."""

    alias: str
    offset: int
    step: int
    #: Why it does not serve; None when it answers.
    error: str | None
    #: What can let it forget ids that it has handed out; None when nothing does.
    durability: str | None
    sequences: tuple[SequenceStatus, ...]


@dataclass(frozen=True)
class TicketStatus:
    """All servers. ``problems`` are what an operator should mend; empty when all is well."""

    servers: tuple[ServerStatus, ...]
    #: Sequence -> distance between the servers; of those that several servers told.
    drift: Mapping[str, int]
    #: Sequences that no installed model draws from. They may be used by name.
    unused: tuple[str, ...]
    problems: tuple[str, ...]


def status(
    servers: Sequence[TicketServer] | None = None, *, patience: float = PATIENCE
) -> TicketStatus:
    """Ask all servers how they are. Changes nothing; a server that is down is part of the answer.

    :param patience: seconds for one server; they are asked one after the other.
    :raises ImproperlyConfigured: no server is configured.
    """
    answers = ask_all(all_servers() if servers is None else servers, patience)
    told = tuple(_server(answers, index) for index in range(len(answers)))
    wanted = declared()
    names = {name for answer in answers for name in answer.standings}
    problems = [
        *(_not_answering(server) for server in told if server.error is not None),
        *(one.problem for server in told for one in server.sequences if one.problem is not None),
        *(problem for answer in answers for problem in _lacking(answer, {*names, *wanted}, wanted)),
    ]
    return TicketStatus(told, _drift(answers), tuple(sorted(names - set(wanted))), tuple(problems))


def _not_answering(server: ServerStatus) -> str:
    return f"{server.alias!r} does not answer: {server.error}"


def _lacking(answer: ServerAnswer, names: Iterable[str], wanted: Container[str]) -> Iterator[str]:
    """What an empty or replaced server should have."""
    lacking = sorted(set(names) - set(answer.standings))
    if answer.error is None and lacking:
        # Without names it makes those of the models.
        named = "" if all(name in wanted for name in lacking) else " " + " ".join(lacking)
        yield (
            f"{answer.server.alias!r} has no sequence {', '.join(map(repr, lacking))}: run"
            f" 'manage.py tickets create{named}'."
        )


def missing(server: TicketServer) -> list[str]:
    """The sequences that models draw from and this server does not have.

    :raises OperationalError: or what else the server is to blame for.
    """
    answer = ask(server, PATIENCE)
    if answer.error is not None:
        raise answer.error
    return [name for name in declared() if name not in answer.standings]


def _server(answers: Sequence[ServerAnswer], index: int) -> ServerStatus:
    answer = answers[index]
    return ServerStatus(
        answer.server.alias,
        answer.server.slot.position,
        answer.server.slot.step,
        None if answer.error is None else str(answer.error),
        answer.durability,
        tuple(
            _sequence(answers, index, name, standing)
            for name, standing in sorted(answer.standings.items())
        ),
    )


def _sequence(
    answers: Sequence[ServerAnswer], index: int, name: str, standing: SequencePosition
) -> SequenceStatus:
    mark, problem = mark_of(answers, index, name), standing.problem
    if problem is None and is_behind(standing.position, mark):
        # The mark was read after the position; ids may have left in between.
        server = answers[index].server
        later = ask(server, PATIENCE)
        standing = later.standings.get(name, standing)
        if later.error is not None:
            problem = f"{server.alias!r} does not answer any more: {later.error}"
        elif is_behind(standing.position, mark):
            problem = (
                f"Sequence {name!r} on {server.alias!r} is at {max(standing.position, 0)!r}, below"
                f" {mark!r}, which has left it before: it may have come back from a backup. Run"
                f" 'manage.py tickets advance {name}'."
            )
    return SequenceStatus(
        name,
        standing.row.form,
        standing.position,
        mark,
        max(standing.position, 0) / LAST_ID,
        problem,
    )


def _drift(answers: Sequence[ServerAnswer]) -> dict[str, int]:
    positions: dict[str, list[int]] = {}
    for answer in answers:
        for name, standing in answer.standings.items():
            positions.setdefault(name, []).append(max(standing.position, 0))
    return {
        name: max(several) - min(several)
        for name, several in sorted(positions.items())
        if len(several) > 1
    }
