"""Read the state of the ticket servers, for operators and monitoring."""

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

# The largest number of seconds to wait for one server. It is small, because the servers are queried
# one after the other while a monitoring system waits.
PATIENCE = 5.0


@dataclass(frozen=True)
class SequenceStatus:
    """The state of one sequence on one server."""

    name: str
    #: The kind of SQL statement with which the sequence makes its next id, such as ``update``.
    form: str
    #: The last id that the server has handed out; 0 or less if it has handed out no id.
    position: int
    #: The high-water mark: the highest id that the server is known to have handed out. The next
    #: server in the settings stores it. None if the next server does not answer or lacks the
    #: sequence, or if there is only one server.
    mark: int | None
    #: How much of all possible ids (1 to 2**63 - 1) is used up, from 0.0 to 1.0.
    used: float
    #: A sentence that describes the problem and says what to do; None if there is no problem.
    problem: str | None


@dataclass(frozen=True)
class ServerStatus:
    """The state of one ticket server.

    It hands out the ids ``offset``, ``offset + step``, and so on (as at Flickr, F2): for example 2,
    4, 6, … if it is the second of two servers.
    """

    alias: str
    offset: int
    step: int
    #: Why the server does not answer; None if it answers.
    error: str | None
    #: Why a crash could make the server forget ids that it has handed out. The text names the
    #: server's setting that is the reason. None if the server cannot forget ids, or if it does not
    #: answer.
    durability: str | None
    sequences: tuple[SequenceStatus, ...]


@dataclass(frozen=True)
class TicketStatus:
    """The state of all ticket servers."""

    servers: tuple[ServerStatus, ...]
    #: Maps the name of each sequence to the difference between its highest and its lowest position
    #: on the servers. The position is the last id that a server has handed out. Sequences that only
    #: one server has are left out.
    drift: Mapping[str, int]
    #: Names of sequences on a server that no installed model uses. Other code may get ids from
    #: them.
    unused: tuple[str, ...]
    #: Sentences about problems that an operator must solve; empty if all is well.
    problems: tuple[str, ...]


def status(
    servers: Sequence[TicketServer] | None = None, *, patience: float = PATIENCE
) -> TicketStatus:
    """Return the state of all ticket servers, including those that are down. Changes nothing.

    :param servers: the servers to query; by default all in ``TICKETS``.
    :param patience: seconds to wait for one server. The servers are queried one after the other.
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
    """Yield a sentence if a server lacks sequences, for example because it is new or was replaced.

    :param names: the names of all sequences that a server or a model has.
    :param declared: the names of the sequences that models use.
    """
    missing = sorted(set(names) - set(answer.sequences))
    if answer.error is None and missing:
        # Without names, the suggested command "tickets create" creates only the sequences of
        # models. So add the names if a missing sequence is used by no model.
        arguments = "" if all(name in declared for name in missing) else " " + " ".join(missing)
        yield (
            f"{answer.server.alias!r} has no sequence {', '.join(map(repr, missing))}: run"
            f" 'manage.py tickets create{arguments}'."
        )


def missing_sequences(server: TicketServer) -> list[str]:
    """Return the names of the sequences that models need and ``server`` does not have.

    :raises django.db.Error: the server does not answer. Some failures raise :exc:`OSError` instead.
    :raises TicketError: the server does not match the settings.
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
        # This may be a false alarm: the position was read before the high-water mark, and the
        # server may have handed out ids in between. So read the position again.
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
