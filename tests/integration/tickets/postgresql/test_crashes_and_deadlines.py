"""Sessions on PostgreSQL: what is on disk, and how long callers wait (F3)."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import OperationalError

from sharded_orm.ids.tickets.session import SequenceRow
from tests.integration.tickets.postgresql.conftest import (
    ONE,
    TWO,
    Opener,
    begin,
    counter,
    run,
    soon,
    take,
)
from tests.services.postgresql import PostgreSQLServer

pytest.importorskip("psycopg")

# Waits on the server until another session has ended.
WAIT_FOR_END = """
DO $$ BEGIN
  WHILE EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid}) LOOP
    PERFORM pg_sleep(0.01), pg_stat_clear_snapshot();
  END LOOP;
END $$
"""


# ##### Durability #####


@pytest.mark.parametrize("count", [1, 10])
def test_no_id_comes_again_after_a_crash(
    own_postgresql: PostgreSQLServer, connect: Opener, count: int
) -> None:
    """While one session has logged numbers in advance and not committed, others draw them."""
    place, address = ONE, own_postgresql.address
    session = connect(place, address)
    session.create_catalog(soon())
    row = begin(session)
    take(session, row)  # prepared now, so that no other write is due later
    # Only a commit may bring the log to the disk.
    run(session, "ALTER SYSTEM SET wal_writer_delay = '10s'")
    run(session, "SELECT pg_reload_conf()")
    # No number that is logged in advance is left.
    run(session, f"SELECT setval('{counter(row)}', 1001)")
    run(connect(place, address), f"BEGIN; SELECT nextval('{counter(row)}')")
    ids = list(take(session, row, count))
    assert ids[0] == 1005
    own_postgresql.kill()
    own_postgresql.start()
    again = connect(place, address)
    assert take(again, row)[0] > ids[-1]


def test_ids_go_on_after_crash_and_stop(own_postgresql: PostgreSQLServer, connect: Opener) -> None:
    session = connect(TWO, own_postgresql.address)
    session.create_catalog(soon())
    row = begin(session)
    for end in (own_postgresql.kill, own_postgresql.stop):
        last = take(session, row, 50)[-1]
        end()
        with pytest.raises(OperationalError):
            take(session, row)
        session.close()
        own_postgresql.start()
        session = connect(TWO, own_postgresql.address)
        assert session.position(row, soon()) >= last
        (following,) = take(session, row)
        assert following > last
        assert following % 2 == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "fsync and full_page_writes are off"),
        ({"options": "-c synchronous_commit=off"}, "synchronous_commit are off"),
    ],
)
def test_durability_tells_what_is_missing(
    connect: Opener, settings: dict[str, str], said: str
) -> None:
    # The servers of the tests run without it, as nobody cuts their power.
    assert said in connect(**settings).durability(soon())


def test_durability_of_a_server_as_it_is_installed(connect: Opener) -> None:
    with PostgreSQLServer(fsync="on", full_page_writes="on") as server:
        assert connect(address=server.address).durability(soon()) is None


# ##### Deadlines #####


def test_no_call_waits_beyond_its_deadline(connect: Opener, session: Any, row: SequenceRow) -> None:
    holder = connect()
    run(holder, f"BEGIN; ALTER SEQUENCE {counter(row)} OWNED BY NONE")
    # Without a limit it would wait for the holder for ever.
    with pytest.raises(OperationalError, match="no answer within the time limit"):
        session.take(row, 1, 0, soon(0.2))
    run(holder, "ROLLBACK")


def test_a_caller_that_was_late_itself_is_served(session: Any, row: SequenceRow) -> None:
    """The process was stopped, not the server, which answers within a moment."""
    assert session.read(row.name, soon(-1)) is not None


def test_a_paused_server_is_given_up(own_postgresql: PostgreSQLServer, connect: Opener) -> None:
    session = connect(address=own_postgresql.address)
    own_postgresql.pause()
    try:
        with pytest.raises(OperationalError, match="no answer"):
            session.read_all(soon(0.2))
        session.close()
    finally:
        own_postgresql.resume()


def test_the_server_forgets_who_has_given_up(
    connect: Opener, session: Any, row: SequenceRow
) -> None:
    holder, waiting = connect(), connect()
    ((pid,),) = run(waiting, "SELECT pg_backend_pid()")
    run(holder, f"BEGIN; ALTER SEQUENCE {counter(row)} OWNED BY NONE")
    with pytest.raises(OperationalError, match="no answer"):
        waiting.take(row, 1, 0, soon(0.2))
    waiting.close()
    run(session, WAIT_FOR_END.format(pid=pid))
    run(holder, "ROLLBACK")
