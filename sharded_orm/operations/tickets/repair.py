"""Find and repair ticket servers that would hand out ids for a second time.

A server would do so after it was restored from an old backup, because it has forgotten its last
ids. A server's *position* in a sequence is the last id that it has handed out, as the server itself
has stored it. Its *high-water mark* is the highest id that it is known to have handed out. Another
server stores this mark: the *partner*, which is the next server in the settings. A position below
the mark shows that the server has forgotten ids.
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

#: A function that shows the progress. It is called before the work on each sequence, with the
#: number of finished sequences, the number of all sequences, and the name of the next sequence. At
#: the end, it is called once more, with the name "".
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
    #: server in the settings stores it. None if the next server does not answer or lacks the
    #: sequence, or if there is only one server.
    mark: int | None
    #: The largest id in the tables, if it is above ``position``, so that the server would hand it
    #: out again. None if no id is above ``position``.
    offending: int | None
    #: Where the id ``offending`` was found, such as "table 'photo' of group 'photos'"; None if
    #: ``offending`` is None.
    where: str | None
    #: A sentence that describes the problem and says what to do; None if there is no problem.
    problem: str | None
    #: Whether ``position`` could be compared with the ids in the tables. If False, ``problem`` says
    #: why not.
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
    #: The server's position after the call: its next id is above this number. In a dry run, the
    #: position that the call would have set. None if it is not known.
    after: int | None
    #: Why the server could not be moved to a higher id; None if there was no problem.
    problem: str | None


def verify(
    names: Iterable[str] = (),
    *,
    servers: Sequence[TicketServer] | None = None,
    progress: Progress | None = None,
) -> list[Verified]:
    """Check whether a ticket server would hand out an id for a second time. Changes nothing.

    The position of a server is the last id that it has handed out, as it has stored it. Two things
    show that the server has forgotten ids: the position is below the server's high-water mark,
    which the next server stores, or a row has an id of this server above the position. To find such
    a row, the ids above the position are read from the tables on all shards.

    :param names: names of sequences; by default all sequences that a model uses or a server has.
    :param servers: the servers to check; by default all in ``TICKETS``.
    :param progress: called before each sequence and at the end; see :data:`Progress`. None for no
        calls.
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
    """Let ticket servers skip ids, so that they hand out no id for a second time.

    A server that was restored from an old backup has forgotten the last ids that it has handed out.
    Three numbers show which ids it had handed out before: its position, which is the last id that
    it has stored itself; its high-water mark, which is the highest id that the next server has
    stored for it; and the largest of its ids in the tables. The server is *moved*: its position is
    set to ``margin`` above the largest of these numbers.

    A server is not moved in the following cases. Then its result has a ``problem``. The other
    servers are moved nevertheless.

    - The server does not answer or lacks the sequence, or the ids in the tables cannot be read.
    - ``to`` is too low: the server has forgotten an id above ``to``.
    - ``check`` is True, and the mark is not known, because the next server does not answer or lacks
      the sequence.

    :param names: names of sequences; by default all sequences that a model uses or a server has.
    :param margin: number of ids to skip in addition, because the last ids that a server has handed
        out may be known to nobody: no row with them is saved yet, and they are above the mark.
    :param to: the number to move the servers to, instead of the computed one. A server whose
        position is above ``to`` stays there. None computes the number.
    :param check: whether to look for existing ids in the tables. If False, ``to`` is required.
    :param dry_run: True only reports what would be done; False moves the servers.
    :param only: the alias of a server. Then only this server is moved; by default all are.
    :param servers: the servers, in the order of the settings; by default all in ``TICKETS``.
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

    The mark is stored on the next server, the partner of the server. The mark is not known if the
    partner does not answer or lacks the sequence.
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
        # This may be a false alarm: the position was read before the tables, and the server may
        # have handed out ids in between. So read the position again.
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
    # Round up to a number that this server hands out: for example, the first of two servers hands
    # out only odd numbers.
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
