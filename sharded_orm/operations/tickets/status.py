"""The state of the ticket servers, for operators and monitoring."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sharded_orm.ids.tickets.server import TicketServer
from sharded_orm.ids.tickets.session import LAST_ID
from sharded_orm.operations.tickets.largest_ids import declared_sequences
from sharded_orm.operations.tickets.survey import (
    SequencePosition,
    ServerAnswer,
    all_servers,
    ask,
    ask_all,
    high_water_mark_of,
    is_behind,
)

# Seconds for one server; a monitoring system waits for all of them.
PATIENCE = 5.0


@dataclass(frozen=True)
class SequenceStatus:
    """A sequence on one server."""

    name: str
    form: str
    #: The last id that was handed out; 0 or less for none.
    position: int
    #: The high-water mark: the highest id that the server has handed out, as its partner knows;
    #: None if the partner does not say.
    mark: int | None
    #: The used part of the positive 64-bit numbers, from 0 to 1.
    used: float
    problem: str | None


@dataclass(frozen=True)
class ServerStatus:
    """A ticket server. It hands out ``offset``, ``offset + step``, … (F2)."""

    alias: str
    offset: int
    step: int
    #: Why it does not answer; None if it does.
    error: str | None
    #: Why a crash may let it forget ids that it has handed out; None if it cannot.
    durability: str | None
    sequences: tuple[SequenceStatus, ...]


@dataclass(frozen=True)
class TicketStatus:
    """All servers. ``problems`` are for an operator to mend; empty if all is well."""

    servers: tuple[ServerStatus, ...]
    #: Sequence -> distance between the servers, if several servers have it.
    drift: Mapping[str, int]
    #: Sequences that no installed model draws from. Code may use them by name.
    unused: tuple[str, ...]
    problems: tuple[str, ...]


def status(
    servers: Sequence[TicketServer] | None = None, *, patience: float = PATIENCE
) -> TicketStatus:
    """Return the state of all servers, including those that are down. Changes nothing.

    :param patience: seconds for one server; servers are asked one after the other.
    :raises ImproperlyConfigured: no server is configured.
    """
    answers = ask_all(all_servers() if servers is None else servers, patience)
    statuses = tuple(_server(answers, index) for index in range(len(answers)))
    declared = declared_sequences()
    names = {name for answer in answers for name in answer.sequences}
    problems = [
        *(_not_answering(server) for server in statuses if server.error is not None),
        *(
            sequence.problem
            for server in statuses
            for sequence in server.sequences
            if sequence.problem is not None
        ),
        *(
            problem
            for answer in answers
            for problem in _missing_problems(answer, {*names, *declared}, declared)
        ),
    ]
    return TicketStatus(
        statuses, _drift(answers), tuple(sorted(names - set(declared))), tuple(problems)
    )


def _not_answering(server: ServerStatus) -> str:
    return f"{server.alias!r} does not answer: {server.error}"


def _missing_problems(
    answer: ServerAnswer, names: Iterable[str], declared: Container[str]
) -> Iterator[str]:
    """Problems of an empty or replaced server that lacks sequences.

    :param names: the sequences that it should have.
    """
    missing = sorted(set(names) - set(answer.sequences))
    if answer.error is None and missing:
        # Without names, the command creates the sequences of the models.
        arguments = "" if all(name in declared for name in missing) else " " + " ".join(missing)
        yield (
            f"{answer.server.alias!r} has no sequence {', '.join(map(repr, missing))}: run"
            f" 'manage.py tickets create{arguments}'."
        )


def missing_sequences(server: TicketServer) -> list[str]:
    """The sequences that models draw from and this server lacks.

    :raises OperationalError: the server does not answer. Other errors of the server are raised,
        too.
    """
    answer = ask(server, PATIENCE)
    if answer.error is not None:
        raise answer.error
    return [name for name in declared_sequences() if name not in answer.sequences]


def _server(answers: Sequence[ServerAnswer], index: int) -> ServerStatus:
    answer = answers[index]
    return ServerStatus(
        answer.server.alias,
        answer.server.slot.position,
        answer.server.slot.step,
        None if answer.error is None else str(answer.error),
        answer.durability,
        tuple(
            _sequence(answers, index, name, sequence)
            for name, sequence in sorted(answer.sequences.items())
        ),
    )


def _sequence(
    answers: Sequence[ServerAnswer], index: int, name: str, sequence: SequencePosition
) -> SequenceStatus:
    high_water_mark, problem = high_water_mark_of(answers, index, name), sequence.problem
    if problem is None and is_behind(sequence.position, high_water_mark):
        # The mark was read after the position. Ids may have been handed out in between.
        server = answers[index].server
        later = ask(server, PATIENCE)
        sequence = later.sequences.get(name, sequence)
        if later.error is not None:
            problem = f"{server.alias!r} does not answer any more: {later.error}"
        elif is_behind(sequence.position, high_water_mark):
            problem = (
                f"Sequence {name!r} on {server.alias!r} is at {max(sequence.position, 0)!r}, below"
                f" {high_water_mark!r}, which has left it before: it may have come back from a backup. Run"
                f" 'manage.py tickets advance {name}'."
            )
    return SequenceStatus(
        name,
        sequence.row.form,
        sequence.position,
        high_water_mark,
        max(sequence.position, 0) / LAST_ID,
        problem,
    )


def _drift(answers: Sequence[ServerAnswer]) -> dict[str, int]:
    positions: dict[str, list[int]] = {}
    for answer in answers:
        for name, sequence in answer.sequences.items():
            positions.setdefault(name, []).append(max(sequence.position, 0))
    return {
        name: max(values) - min(values)
        for name, values in sorted(positions.items())
        if len(values) > 1
    }
