"""Sessions on PostgreSQL hand out ids: alone and in batches (F1, F2)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from django.db import OperationalError

from sharded_orm.ids.tickets.exceptions import InvalidSequence
from sharded_orm.ids.tickets.session import LAST_ID, SequenceRow
from tests.integration.tickets.postgresql.conftest import (
    TWO,
    Opener,
    begin,
    counter,
    numbers,
    run,
    soon,
    take,
)
from tests.patience import PATIENCE

pytest.importorskip("psycopg")


def test_ids_are_of_the_server_s_place(connect: Opener, session: Any, row: SequenceRow) -> None:
    assert [*take(session, row), *take(session, row), *take(session, row, 3)] == [1, 3, 5, 7, 9]
    second = connect(TWO)
    name = f"sequence {next(numbers)}"
    other = second.create(name, "sequence", 0, soon())
    assert [*take(second, other), *take(second, other, 2)] == [2, 4, 6]


@pytest.mark.parametrize(
    ("value", "first"), [(-5, 1), (0, 1), (1, 3), (2, 3), (1000, 1001), (LAST_ID - 2, LAST_ID)]
)
def test_a_sequence_begins_above_what_exists(session: Any, value: int, first: int) -> None:
    row = begin(session, value)
    assert session.position(row, soon()) == first - 2
    assert list(take(session, row)) == [first]
    assert session.position(row, soon()) == first


def test_a_million_ids_are_one_request(
    session: Any, row: SequenceRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(session, row, 2)  # prepares the statement
    statements = []
    ask = session._result_of
    monkeypatch.setattr(session, "_result_of", lambda *args: (statements.append(1), ask(*args))[1])
    ids = take(session, row, 1_000_000)
    assert len(statements) == 1
    assert (len(ids), ids[0], ids[-1]) == (1_000_000, 5, 2_000_003)
    assert list(ids) == list(range(5, 2_000_004, 2))


def test_batches_of_several_sessions_interleave_without_a_duplicate(
    connect: Opener, session: Any, row: SequenceRow
) -> None:
    sessions = [connect() for _ in range(4)]
    barrier = threading.Barrier(4)
    batches: list[Sequence[int]] = []

    def draw(mine: Any) -> None:
        barrier.wait(PATIENCE)
        for _ in range(5):
            batches.append(take(mine, row, 20_000))
            batches.append(take(mine, row))

    threads = [threading.Thread(target=draw, args=(one,)) for one in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    drawn = [number for batch in batches for number in batch]
    assert len(drawn) == 4 * 5 * 20_001
    assert sorted(drawn) == list(range(1, 2 * len(drawn), 2))
    assert all(list(batch) == sorted(batch) for batch in batches)
    # Otherwise this test would show nothing.
    assert any(batch[-1] - batch[0] > 2 * (len(batch) - 1) for batch in batches)


@pytest.mark.parametrize("count", [1, 2])
def test_the_last_number_is_handed_out_and_then_nothing(session: Any, count: int) -> None:
    row = begin(session, LAST_ID - 2 * count)
    assert not take(session, row, count + 1)
    # The refused call has taken nothing.
    assert take(session, row, count)[-1] == LAST_ID
    assert not take(session, row, count)
    assert not take(session, row)


def test_of_two_batches_at_the_end_one_is_refused_at_least(
    connect: Opener, session: Any, row: SequenceRow
) -> None:
    run(session, f"SELECT setval('{counter(row)}', {LAST_ID - 2 * 150_000})")
    sessions = [connect(), connect()]
    barrier = threading.Barrier(2)
    answers: list[int] = []

    def draw(mine: Any) -> None:
        take(mine, row, 2)
        barrier.wait(PATIENCE)
        answers.append(len(take(mine, row, 100_000)))

    threads = [threading.Thread(target=draw, args=(one,)) for one in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    # Both, when they have taken the last numbers from each other.
    assert sorted(answers) in ([0, 0], [0, 100_000])


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE sharded_orm_sequence SET step = 3 WHERE name = '{name}'",
        "UPDATE sharded_orm_sequence SET position = 2 WHERE name = '{name}'",
        "UPDATE sharded_orm_sequence SET form = 'update' WHERE name = '{name}'",
        "DELETE FROM sharded_orm_sequence WHERE name = '{name}'",
        "ALTER SEQUENCE {counter} INCREMENT 1",
        "ALTER SEQUENCE {counter} CACHE 100",
        "ALTER SEQUENCE {counter} CYCLE",
        "DROP SEQUENCE {counter}",
    ],
)
@pytest.mark.parametrize("count", [1, 10])
def test_what_has_changed_is_noticed_by_the_statement_itself(
    session: Any, row: SequenceRow, change: str, count: int
) -> None:
    assert take(session, row, count)
    run(session, change.format(name=row.name, counter=counter(row)))
    assert len(take(session, row, count)) == 0


def test_a_sequence_that_was_made_again_is_used_by_the_same_session(
    session: Any, row: SequenceRow
) -> None:
    take(session, row)
    run(session, f"DROP SEQUENCE {counter(row)}")
    assert not take(session, row)
    run(session, f"CREATE SEQUENCE {counter(row)} INCREMENT 2 START 101")
    assert list(take(session, row)) == [101]


@pytest.mark.parametrize("name", ["it's", 'the "photos"', "50%s", "$1", "fotos_ÄÖ", "a\\b"])
def test_any_name_will_do(session: Any, name: str) -> None:
    row = session.create(name, "sequence", 0, soon())
    assert row.name == name
    assert [*take(session, row), *take(session, row, 2)] == [1, 3, 5]
    assert session.advance(row, 100, soon()) == 101
    assert session.position(session.read(name, soon()), soon()) == 101


def test_names_have_room_for_the_identifier_only(session: Any) -> None:
    assert take(session, session.create("n" * 42, "sequence", 0, soon()))
    for name in ("n" * 43, "ä" * 22):
        with pytest.raises(InvalidSequence, match=f"{name}.*42 bytes"):
            session.create(name, "sequence", 0, soon())
        assert session.read(name, soon()) is None


def test_an_ordinary_role_draws_ids(connect: Opener, session: Any, row: SequenceRow) -> None:
    role = f"drawer_{next(numbers)}"
    run(session, f"CREATE ROLE {role}")
    run(session, f"GRANT SELECT, UPDATE ON sharded_orm_sequence TO {role}")
    run(session, f"GRANT SELECT, USAGE ON SEQUENCE {counter(row)} TO {role}")
    try:
        drawer = connect(assume_role=role)
        holder = connect()
        # Another session has logged numbers, so this one has to bring the log to the disk.
        run(holder, f"BEGIN; SELECT nextval('{counter(row)}')")
        assert drawer.read(row.name, soon()) == row
        assert [*take(drawer, row), *take(drawer, row, 2)] == [3, 5, 7]
        drawer.keep_predecessor_mark(row.name, 4, soon())
        assert drawer.position(row, soon()) == 7
        assert drawer.durability(soon()) is not None
        with pytest.raises(OperationalError, match="must be owner"):
            drawer.advance(row, 1000, soon())
        run(holder, "ROLLBACK")
    finally:
        run(session, f"DROP OWNED BY {role}; DROP ROLE {role}")
