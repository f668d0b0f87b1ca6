"""Servers that have forgotten ids: found by comparing with the rows, and moved on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sharded_orm.exceptions import InvalidSequence, SequenceNotChecked
from sharded_orm.ids.tickets.server import TicketServer
from sharded_orm.ids.tickets.session import LAST_ID, SequenceRow
from sharded_orm.models.fields import TicketField
from sharded_orm.operations.tickets.creation import MARGIN
from sharded_orm.operations.tickets.largest_ids import Largest, declared, largest
from sharded_orm.operations.tickets.survey import (
    PATIENCE,
    TROUBLE,
    ServerAnswer,
    all_servers,
    ask,
    ask_all,
    chosen,
    is_behind,
    mark_of,
)

#: Called before each sequence and in the end: how many are done, of how many, its name.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Verified:
    """A sequence on one server, compared with what exists."""

    name: str
    alias: str
    #: The last id that was handed out; None if the server does not tell.
    position: int | None
    #: What the partner knows to have left it; None if it does not tell.
    mark: int | None
    #: The largest id above the position that exists, and where.
    offending: int | None
    where: str | None
    #: What is wrong, with the remedy; None when nothing is.
    problem: str | None
    #: Whether it could be compared; if not, ``problem`` tells why.
    checked: bool = True


@dataclass(frozen=True)
class Advanced:
    """A sequence on one server, after :func:`advance`."""

    name: str
    alias: str
    before: int | None
    after: int | None
    problem: str | None


def verify(
    names: Iterable[str] = (),
    *,
    servers: Sequence[TicketServer] | None = None,
    progress: Progress | None = None,
) -> list[Verified]:
    """Compare each server's position with its partner's mark and with the ids that exist.

    On all shards only the range of ids above the position is read. Changes nothing.

    :param names: by default all sequences, of models or servers.
    :raises UnknownSequence: nobody knows one of ``names``.
    """
    return [
        one
        for answers, name, fields in _each(names, servers, progress)
        for one in (_verified(answers, index, name, fields)[0] for index in range(len(answers)))
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
    """Move servers above all that is known to have left them; never back.

    That is the larger of position, partner's mark and largest id that exists, plus
    ``margin`` for what was handed out and is neither in a row nor marked. Each server stands
    alone: one that does not answer is told in its ``problem``, the others are done.

    :param to: the position itself, in place of the margin; a server that is above it stays.
    :param check: look for existing ids; without it ``to`` must be given.
    :param dry_run: tell what would be done.
    :param only: the alias of one server.
    :raises InvalidSequence: ``margin`` or ``to`` are not possible.
    :raises UnknownSequence: nobody knows one of ``names``.
    """
    _check_arguments(margin, to, check)
    return [
        _advanced(answers, index, name, fields if check else None, margin, to, dry_run)
        for answers, name, fields in _each(names, servers, progress)
        for index, answer in enumerate(answers)
        if only in (None, answer.server.alias)
    ]


def _unmarked(answers: Sequence[ServerAnswer], index: int, name: str) -> str:
    """How far a server was is known to its partner, which does not tell."""
    server, keeper = answers[index].server, answers[(index + 1) % len(answers)]
    why = f"does not answer: {keeper.error}" if keeper.error else f"has no sequence {name!r}"
    return (
        f"{keeper.server.alias!r}, which keeps the mark of {server.alias!r}, {why}. Bring it back"
        f" ('manage.py tickets create {name}' if it has been replaced), or say how far to go: --to N"
        " --no-check, above all ids that were ever handed out."
    )


def _each(
    names: Iterable[str], servers: Sequence[TicketServer] | None, progress: Progress | None
) -> Iterator[tuple[list[ServerAnswer], str, Sequence[TicketField]]]:
    fields = declared()
    answers = ask_all(all_servers() if servers is None else servers)
    wanted = chosen(names, fields, answers)
    for done, name in enumerate(wanted):
        if progress is not None:
            progress(done, len(wanted), name)
        yield answers, name, fields.get(name, ())
    if progress is not None:
        progress(len(wanted), len(wanted), "")


def _verified(
    answers: Sequence[ServerAnswer], index: int, name: str, fields: Sequence[TicketField]
) -> tuple[Verified, SequenceRow | None]:
    answer = answers[index]
    server, mark = answer.server, mark_of(answers, index, name)
    standing = answer.standings.get(name)
    bad = Verified(name, server.alias, None, mark, None, None, None, checked=False)
    if answer.error is not None:
        return replace(bad, problem=f"{server.alias!r} does not answer: {answer.error}"), None
    if standing is None:
        problem = (
            f"{server.alias!r} has no sequence {name!r}: run 'manage.py tickets create {name}'."
        )
        return replace(bad, problem=problem), None
    position = standing.position
    bad = replace(bad, position=position)
    if standing.problem is not None:
        return replace(bad, problem=standing.problem), None
    try:
        found = largest(fields, above=position, slot=server.slot)
    except SequenceNotChecked as exc:
        return replace(bad, problem=str(exc)), None
    if found is not None or is_behind(position, mark):
        # The position was read first; ids may have left since, and be in rows already.
        later = ask(server)
        if later.error is not None:
            return replace(bad, problem=f"{server.alias!r} does not answer: {later.error}"), None
        standing = later.standings.get(name, standing)
        position = standing.position
    return _compared(name, server, position, mark, found), standing.row


def _compared(
    name: str, server: TicketServer, position: int, mark: int | None, found: Largest | None
) -> Verified:
    said = f"Sequence {name!r} on {server.alias!r} is at {max(position, 0)!r}, but"
    remedy = f"it would be handed out again. Run 'manage.py tickets advance {name}'."
    if found is not None and found.id > position:
        problem = f"{said} id {found.id!r} exists, in {found.where}: {remedy}"
        return Verified(name, server.alias, position, mark, found.id, found.where, problem)
    problem = f"{said} its partner knows that {mark!r} has left it: {remedy}"
    behind = is_behind(position, mark)
    return Verified(name, server.alias, position, mark, None, None, problem if behind else None)


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


def _advanced(
    answers: Sequence[ServerAnswer],
    index: int,
    name: str,
    fields: Sequence[TicketField] | None,
    margin: int,
    to: int | None,
    dry_run: bool,
) -> Advanced:
    seen, row = _verified(answers, index, name, fields or ())
    before, server = seen.position, answers[index].server
    if row is None or before is None:
        return Advanced(name, server.alias, before, before, seen.problem)
    if seen.mark is None and len(answers) > 1 and fields is not None:
        return Advanced(name, server.alias, before, before, _unmarked(answers, index, name))
    least = max(before, seen.mark or 0, seen.offending or 0)
    if to is not None and to < least and least > before:
        problem = (
            f"Sequence {name!r} on {server.alias!r} cannot be moved to {to!r}: {least!r} has left it"
            f" before. Leave out --to, or let it be {least!r} or more."
        )
        return Advanced(name, server.alias, before, before, problem)
    target = max(before, least + margin if to is None else to)
    # The next number of this server: it is what the others count from, too.
    target = server.slot.at_or_below(target + server.slot.step - 1)
    if target == before or (dry_run and target <= LAST_ID):
        return Advanced(name, server.alias, before, target, None)
    deadline = time.monotonic() + PATIENCE
    try:
        with server.session(deadline) as lent:
            after = lent.ask(lambda session: session.advance(row, target, deadline))
    except TROUBLE as exc:
        return Advanced(name, server.alias, before, before, f"{server.alias!r}: {exc}")
    return Advanced(name, server.alias, before, after, None)
