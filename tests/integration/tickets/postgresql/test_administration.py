"""Sessions on PostgreSQL: sequences are created, checked and advanced."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import OperationalError

from sharded_orm.ids.tickets.exceptions import InvalidSequence, TicketServerMisconfigured
from sharded_orm.ids.tickets.session import LAST_ID, SequenceRow
from sharded_orm.testing.ticket_sessions import TestSessionPool
from tests.integration.tickets.postgresql.conftest import (
    ONE,
    Opener,
    begin,
    counter,
    run,
    soon,
    take,
)
from tests.patience import PATIENCE
from tests.services.postgresql import Address

psycopg = pytest.importorskip("psycopg")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("INCREMENT 1", r"\(1, 1, 'f'\)"),
        ("CACHE 100", r"\(2, 100, 'f'\)"),
        ("CYCLE", r"\(2, 1, 't'\)"),
    ],
)
def test_an_altered_sequence_is_an_error(
    session: Any, row: SequenceRow, change: str, found: str
) -> None:
    run(session, f"ALTER SEQUENCE {counter(row)} {change}")
    with pytest.raises(TicketServerMisconfigured, match=found) as caught:
        session.read(row.name, soon())
    remedy = str(caught.value).partition("Run ")[2].partition(", then")[0]
    run(session, remedy)
    assert session.read(row.name, soon()) == row


def test_create_is_safe_when_many_do_it_at_once(postgresql: Address, connect: Opener) -> None:
    with psycopg.connect(**postgresql.psycopg(), autocommit=True) as admin:
        admin.execute("CREATE SCHEMA at_once")
    try:
        sessions = [connect(options="-c search_path=at_once") for _ in range(6)]
        barrier = threading.Barrier(6)
        rows: list[SequenceRow] = []

        def make(mine: Any) -> None:
            barrier.wait(PATIENCE)
            mine.create_catalog(soon())
            rows.append(mine.create("photos", "sequence", 10, soon()))

        threads = [threading.Thread(target=make, args=(one,)) for one in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert rows == [SequenceRow("photos", "sequence", 2, 1, 9, 0)] * 6
        assert list(take(sessions[0], rows[0])) == [11]
    finally:
        with psycopg.connect(**postgresql.psycopg(), autocommit=True) as admin:
            admin.execute("DROP SCHEMA at_once CASCADE")


def test_create_again_changes_nothing(session: Any, row: SequenceRow) -> None:
    take(session, row, 5)
    assert session.create(row.name, "sequence", 1000, soon()) == row
    assert list(take(session, row)) == [11]


def test_create_that_was_cut_off_is_finished_above_what_exists(session: Any) -> None:
    row = begin(session)
    run(session, "DELETE FROM sharded_orm_sequence WHERE name = %s", row.name)
    row = session.create(row.name, "sequence", 1000, soon())
    assert list(take(session, row)) == [1001]


def test_a_lost_sequence_is_not_begun_again(session: Any, row: SequenceRow) -> None:
    take(session, row, 5)
    run(session, f"DROP SEQUENCE {counter(row)}")
    assert session.read(row.name, soon()) is None
    with pytest.raises(OperationalError) as caught:
        session.position(row, soon())
    assert session.is_missing_table(caught.value)
    with pytest.raises(InvalidSequence, match=f"'{row.name}' on 'tickets'.* is gone"):
        session.create(row.name, "sequence", 0, soon())


def test_nothing_is_there_before_the_catalog(connect: Opener) -> None:
    empty = connect(options="-c search_path=pg_temp")
    assert empty.read("photos", soon()) is None
    assert empty.read_all(soon()) == []


def test_advance_goes_up_only(session: Any, row: SequenceRow) -> None:
    assert session.advance(row, 1000, soon()) == 1001
    assert list(take(session, row)) == [1003]
    assert session.advance(row, 500, soon()) == 1003
    assert list(take(session, row)) == [1005]
    assert session.advance(row, LAST_ID, soon()) == LAST_ID
    assert not take(session, row)


def test_advance_of_a_sequence_that_has_given_nothing(session: Any) -> None:
    row = begin(session, 10)
    # It holds 11 already, as the number that comes next.
    assert session.advance(row, 10, soon()) == 11
    assert list(take(session, row)) == [13]


def test_advance_keeps_out_who_takes_ids(connect: Opener, session: Any, row: SequenceRow) -> None:
    """A number taken between the comparison and the change would be handed out again."""
    taker = connect()
    run(taker, f"BEGIN; SELECT nextval('{counter(row)}')")
    with pytest.raises(OperationalError, match="no answer"):
        session.advance(row, 1000, soon(0.2))
    run(taker, "ROLLBACK")
    again = connect()
    assert again.advance(row, 1000, soon()) == 1001


def test_tests_keep_no_session_that_prevents_the_drop_of_its_database(session: Any) -> None:
    pool = TestSessionPool(session.alias, ONE, 2.0)
    pool.give_back(session)
    assert (pool.pop(), session.connection) == (None, None)


def test_marks_never_go_back(session: Any, row: SequenceRow) -> None:
    for mark, kept in ((70, 70), (50, 70), (90, 90)):
        session.keep_predecessor_mark(row.name, mark, soon())
        assert session.read(row.name, soon()).predecessor_mark == kept


def test_a_pool_of_django_is_not_used(connect: Opener) -> None:
    pooled = connect(pool=True)
    assert run(pooled, "SELECT 1") == [(1,)]
    assert pooled._wrapper.pool is None
