"""Find and repair ticket servers that would hand out ids for a second time, such as after a
restore.

A server's *position* in a sequence is the last id that it has handed out, by its own count. Its
*high-water mark* is the highest id that it is known to have handed out. The next server, its
*partner*, keeps the mark.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sharded_orm.ids.tickets.exceptions import InvalidSequence, SequenceNotChecked
from sharded_orm.ids.tickets.server import TicketServer
from sharded_orm.ids.tickets.session import LAST_ID, SequenceRow
from sharded_orm.models.fields import TicketField
from sharded_orm.operations.tickets.creation import MARGIN
from sharded_orm.operations.tickets.largest_ids import Largest, declared_sequences, largest
from sharded_orm.operations.tickets.survey import (
    PATIENCE,
    TROUBLE,
    ServerAnswer,
    all_servers,
    ask,
    ask_all,
    high_water_mark_of,
    is_behind,
    select_names,
)

#: A callback that gets the number of finished sequences, the total number, and the name of the sequence
#: that comes next. Called before each sequence, and at the end with "" as the name.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Verified:
    """The result of :func:`verify` for one sequence on one server."""

    #: The sequence's name.
    name: str
    #: The server's alias.
    alias: str
    #: The last id that the server has handed out; None if the server does not answer.
    position: int | None
    #: The high-water mark: the highest id that the server is known to have handed out. The next
    #: server keeps it. None if the next server does not answer or lacks the sequence, or if there
    #: is only one server.
    mark: int | None
    #: The largest existing id in the tables of models, if it is above ``position``, the server's last
    #: id. The server would hand out such an id again. None if no id is above ``position``.
    offending: int | None
    #: Where the id ``offending`` is, in words: the table, and the database or shard group. None if
    #: ``offending`` is None.
    where: str | None
    #: A sentence that describes the problem and its remedy; None if there is no problem.
    problem: str | None
    #: Whether the server's last id could be compared with the ids in the tables. If False,
    #: ``problem`` says why not.
    checked: bool = True


@dataclass(frozen=True)
class Advanced:
    """The result of :func:`advance` for one sequence on one server."""

    #: The sequence's name.
    name: str
    #: The server's alias.
    alias: str
    #: The last id that the server had handed out before the call; None if it is not known.
    before: int | None
    #: After the call, the server's next id is above this number. In a dry run, a real call would
    #: set this number. None if it is not known.
    after: int | None
    #: Why the server could not be moved to a higher id; None if there was no problem.
    problem: str | None


def verify(
    names: Iterable[str] = (),
    *,
    servers: Sequence[TicketServer] | None = None,
    progress: Progress | None = None,
) -> list[Verified]:
    """Compare each ticket server's position with its high-water mark and with the ids in the tables.

    The position is the last id that the server has handed out by its own count. The high-water mark is
    the highest id that it is known to have handed out; the next server keeps the mark. Reads only ids
    above the position, on all shards. Changes nothing.

    :param names: names of sequences; by default all sequences that a model uses or a server has.
    :param servers: the servers to check; by default all in ``TICKETS``.
    :param progress: called before each sequence and at the end; see :data:`Progress`. None for no calls.
    :raises UnknownSequence: one of ``names`` is unknown to all models and servers.
    """
    return [
        _verify_one(answers, index, name, fields)[0]
        for answers, name, fields in _answers_by_sequence(names, servers, progress)
        for index in range(len(answers))
    ]


def advance(
    names: Iterable[str] = (),
    *,
    margin: int = MARGIN,
    to: int | None = None,
    check: bool = True,
    dry_run: bool = False,
    only: str | None = None,
    servers: Sequence[TicketServer] | None = None,
    progress: Progress | None = None,
) -> list[Advanced]:
    """Move ticket servers forward, above every id that they are known to have handed out.

    The target of a server is ``margin`` above the largest of these numbers: its position (the last
    id by its own count), its high-water mark (the highest id that it is known to have handed out;
    the next server keeps it), and the existing ids in the tables.

    A server is not moved in these cases. Its result then has a ``problem``, and the other servers
    are moved:

    - The server does not answer.
    - ``to`` is given, and the server's mark or an existing id is above ``to`` and above its
      position.
    - ``check`` is True, and the mark is not known: the next server does not answer or lacks the
      sequence.

    :param names: names of sequences; by default all sequences that a model uses or a server has.
    :param margin: number of ids to skip, because a server may have handed out ids that are above
        its high-water mark and in no row.
    :param to: the target; replaces the computed target and ``margin``. A server whose position is
        above ``to`` stays there. None to compute the target.
    :param check: whether to look for existing ids in the tables. If False, ``to`` is required.
    :param dry_run: True to report what would be done and change nothing; False to move servers.
    :param only: move only the server with this alias; by default all servers.
    :param servers: the servers to compare; by default all in ``TICKETS``.
    :param progress: called before each sequence and at the end; see :data:`Progress`. None for no
        calls.
    :raises InvalidSequence: ``margin`` is negative, ``to`` is not a possible id, or ``check`` is
        False and ``to`` is missing.
    :raises UnknownSequence: one of ``names`` is unknown to all models and servers.
    """
    _check_arguments(margin, to, check)
    return [
        _advance_one(answers, index, name, fields if check else None, margin, to, dry_run)
        for answers, name, fields in _answers_by_sequence(names, servers, progress)
        for index, answer in enumerate(answers)
        if only in (None, answer.server.alias)
    ]


def _unknown_mark_problem(answers: Sequence[ServerAnswer], index: int, name: str) -> str:
    """Return a sentence that says why the high-water mark of server number ``index`` is not known.

    The mark is the highest id that the server is known to have handed out. The next server (the
    partner) keeps it, but does not answer or lacks the sequence ``name``.
    """
    server, partner = answers[index].server, answers[(index + 1) % len(answers)]
    why = f"does not answer: {partner.error}" if partner.error else f"has no sequence {name!r}"
    return (
        f"{partner.server.alias!r}, which keeps the mark of {server.alias!r}, {why}. Bring it back"
        f" ('manage.py tickets create {name}' if it has been replaced), or say how far to go: --to N"
        " --no-check, above all ids that were ever handed out."
    )


def _answers_by_sequence(
    names: Iterable[str], servers: Sequence[TicketServer] | None, progress: Progress | None
) -> Iterator[tuple[list[ServerAnswer], str, Sequence[TicketField]]]:
    fields = declared_sequences()
    answers = ask_all(all_servers() if servers is None else servers)
    selected = select_names(names, fields, answers)
    for done, name in enumerate(selected):
        if progress is not None:
            progress(done, len(selected), name)
        yield answers, name, fields.get(name, ())
    if progress is not None:
        progress(len(selected), len(selected), "")


def _verify_one(
    answers: Sequence[ServerAnswer], index: int, name: str, fields: Sequence[TicketField]
) -> tuple[Verified, SequenceRow | None]:
    answer = answers[index]
    server, high_water_mark = answer.server, high_water_mark_of(answers, index, name)
    sequence = answer.sequences.get(name)
    unchecked = Verified(name, server.alias, None, high_water_mark, None, None, None, checked=False)
    if answer.error is not None:
        return replace(unchecked, problem=f"{server.alias!r} does not answer: {answer.error}"), None
    if sequence is None:
        problem = (
            f"{server.alias!r} has no sequence {name!r}: run 'manage.py tickets create {name}'."
        )
        return replace(unchecked, problem=problem), None
    position = sequence.position
    unchecked = replace(unchecked, position=position)
    if sequence.problem is not None:
        return replace(unchecked, problem=sequence.problem), None
    try:
        largest_id = largest(fields, above=position, slot=server.slot)
    except SequenceNotChecked as exc:
        return replace(unchecked, problem=str(exc)), None
    if largest_id is not None or is_behind(position, high_water_mark):
        # Read again the last id that the server has handed out. It was read before the tables, and the
        # server may have handed out ids in between.
        later = ask(server)
        if later.error is not None:
            return replace(
                unchecked, problem=f"{server.alias!r} does not answer: {later.error}"
            ), None
        sequence = later.sequences.get(name, sequence)
        position = sequence.position
    return _compare_with_rows(name, server, position, high_water_mark, largest_id), sequence.row


def _compare_with_rows(
    name: str,
    server: TicketServer,
    position: int,
    high_water_mark: int | None,
    largest_id: Largest | None,
) -> Verified:
    prefix = f"Sequence {name!r} on {server.alias!r} is at {max(position, 0)!r}, but"
    remedy = f"it would be handed out again. Run 'manage.py tickets advance {name}'."
    if largest_id is not None and largest_id.id > position:
        problem = f"{prefix} id {largest_id.id!r} exists, in {largest_id.where}: {remedy}"
        return Verified(
            name, server.alias, position, high_water_mark, largest_id.id, largest_id.where, problem
        )
    problem = f"{prefix} its partner knows that {high_water_mark!r} has left it: {remedy}"
    behind = is_behind(position, high_water_mark)
    return Verified(
        name, server.alias, position, high_water_mark, None, None, problem if behind else None
    )


def _check_arguments(margin: int, to: int | None, check: bool) -> None:
    if margin < 0:
        raise InvalidSequence(
            f"A sequence cannot be moved by a margin of {margin!r}: it never goes back. Give 0 or"
            " more."
        )
    if to is not None and not 1 <= to <= LAST_ID:
        raise InvalidSequence(
            f"A sequence cannot be moved to {to!r}; ids are numbers from 1 to {LAST_ID!r}."
        )
    if not check and to is None:
        raise InvalidSequence(
            "Without looking for existing ids it must be said how far to go (--to N), above all of"
            " them."
        )


def _advance_one(
    answers: Sequence[ServerAnswer],
    index: int,
    name: str,
    fields: Sequence[TicketField] | None,
    margin: int,
    to: int | None,
    dry_run: bool,
) -> Advanced:
    verified, row = _verify_one(answers, index, name, fields or ())
    position, server = verified.position, answers[index].server
    if row is None or position is None:
        return Advanced(name, server.alias, position, position, verified.problem)
    if verified.mark is None and len(answers) > 1 and fields is not None:
        return Advanced(
            name, server.alias, position, position, _unknown_mark_problem(answers, index, name)
        )
    minimum = max(position, verified.mark or 0, verified.offending or 0)
    if to is not None and to < minimum and minimum > position:
        problem = (
            f"Sequence {name!r} on {server.alias!r} cannot be moved to {to!r}: {minimum!r} has left it"
            f" before. Leave out --to, or let it be {minimum!r} or more."
        )
        return Advanced(name, server.alias, position, position, problem)
    target = max(position, minimum + margin if to is None else to)
    # Round up to an id of this server, because each server hands out only every step-th number.
    target = server.slot.at_or_below(target + server.slot.step - 1)
    if target == position or (dry_run and target <= LAST_ID):
        return Advanced(name, server.alias, position, target, None)
    deadline = time.monotonic() + PATIENCE
    try:
        with server.session(deadline) as handle:
            after = handle.ask(lambda session: session.advance(row, target, deadline))
    except TROUBLE as exc:
        return Advanced(name, server.alias, position, position, f"{server.alias!r}: {exc}")
    return Advanced(name, server.alias, position, after, None)
