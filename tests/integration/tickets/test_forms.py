"""The published ``REPLACE`` form beside the default, on MariaDB."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest

from sharded_orm.ids.tickets.exceptions import (
    InvalidSequence,
    TicketServerMisconfigured,
    TicketServersUnavailable,
    UnknownSequence,
)
from sharded_orm.ids.tickets.generator import TicketGenerator
from sharded_orm.operations.tickets import advance, begin
from tests.integration.tickets.test_generator import administer
from tests.patience import PATIENCE
from tests.queries.conftest import DATABASES

pytestmark = [
    pytest.mark.mysql_settings,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

_numbers = itertools.count(1)


@pytest.fixture(params=["update", "replace"])
def form(request: Any) -> str:
    return str(request.param)


def begun(generator: TicketGenerator, form: str, name: str = "", after: int = 0) -> str:
    name = name or f"form_{next(_numbers)}"
    for server in generator.servers:
        begin(server, [name], form=form, after=after)
    return name


def counter(name: str) -> str:
    return f"`sharded_orm_sequence_{name}`"


def test_single_ids_and_batches_share_the_numbers(generator: TicketGenerator, form: str) -> None:
    name = begun(generator, form)
    drawn = [generator.next(name) for _ in range(4)]
    for _ in range(4):
        drawn += generator.take(name, 50)
        drawn.append(generator.next(name))
    assert len(set(drawn)) == len(drawn) == 4 + 4 * 51
    for residue in (0, 1):
        own = [number for number in drawn if number % 2 == residue]
        assert own == sorted(own)


def test_begins_above_an_automatic_number(generator: TicketGenerator, form: str) -> None:
    name = begun(generator, form, after=1_000_000)
    assert {generator.next(name) for _ in range(2)} == {1_000_001, 1_000_002}


def test_threads_and_batches_at_once(generator: TicketGenerator, form: str) -> None:
    """This makes ``REPLACE`` repeat ids on an engine that locks rows."""
    name = begun(generator, form)
    drawn: list[int] = []
    everybody = threading.Barrier(6)

    def draw(number: int) -> None:
        everybody.wait(PATIENCE)
        for turn in range(40):
            drawn.extend(generator.take(name, 7 if (turn + number) % 3 == 0 else 1))

    threads = [threading.Thread(target=draw, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(drawn) == len(set(drawn)) > 6 * 40


def test_a_row_that_changes_its_place_is_noticed_by_the_statement_itself(
    generator: TicketGenerator, form: str
) -> None:
    name = begun(generator, form)
    generator.next(name), generator.next(name)
    sql = "UPDATE sharded_orm_sequence SET step = 3 WHERE name = %s"
    administer(generator.servers[0], sql, name)
    with pytest.raises(TicketServerMisconfigured, match="server 1 of 3"):
        generator.next(name)
    generator.next(name)
    with pytest.raises(TicketServerMisconfigured, match="server 1 of 3"):
        generator.take(name, 10)


def test_any_name(generator: TicketGenerator, form: str) -> None:
    name = begun(generator, form, "50% %d 'ö' \\ \"x\" %s")
    assert [generator.next(name) % 2 for _ in range(2)] == [1, 0]
    assert len(generator.take(name, 10)) == 10


def test_a_table_that_lost_its_row_is_repaired(generator: TicketGenerator) -> None:
    name = begun(generator, "replace")
    generator.next(name), generator.next(name)
    administer(generator.servers[0], f"DELETE FROM {counter(name)}")
    administer(generator.servers[1], f"DELETE FROM {counter(name)}")
    with pytest.raises(UnknownSequence, match="tickets advance"):
        generator.take(name, 10)
    advance([name], servers=generator.servers)
    assert generator.take(name, 10)[0] > 2


def test_a_table_that_is_gone_is_named(generator: TicketGenerator) -> None:
    name = begun(generator, "replace")
    generator.next(name), generator.next(name)
    for server in generator.servers:
        administer(server, f"DROP TABLE {counter(name)}")
    for count in (1, 10):
        with pytest.raises(TicketServersUnavailable, match=r"\(1146, "):
            generator.take(name, count)


def test_a_counter_that_was_left_behind_is_raised(generator: TicketGenerator) -> None:
    """The row of the catalog is gone, as after an interrupted creation, or by hand."""
    name = begun(generator, "replace")
    generator.next(name), generator.next(name)
    for server in generator.servers:
        administer(server, "DELETE FROM sharded_orm_sequence WHERE name = %s", name)
    begun(generator, "replace", name, after=1_000_000)
    assert min(generator.next(name) for _ in range(2)) > 1_000_000


def test_an_engine_that_locks_rows_is_refused(generator: TicketGenerator) -> None:
    name = begun(generator, "replace")
    for server in generator.servers:
        administer(server, f"ALTER TABLE {counter(name)} ENGINE = InnoDB")
    with pytest.raises(TicketServerMisconfigured, match="'InnoDB'"):
        generator.next(name)


def test_a_name_that_no_table_can_have(generator: TicketGenerator) -> None:
    with pytest.raises(InvalidSequence, match="too long for form 'replace'"):
        begin(generator.servers[0], ["x" * 60], form="replace")


def test_the_session_variables_are_the_server_s_place(generator: TicketGenerator) -> None:
    """Whatever the server's own configuration says."""
    sql = "SELECT @@auto_increment_increment, @@auto_increment_offset"
    deadline = time.monotonic() + PATIENCE
    for server in generator.servers:
        with server.session(deadline) as lent:
            rows = lent.ask(lambda session: session.execute(sql, (), deadline))
        assert [tuple(map(int, row)) for row in rows] == [(2, server.slot.position)]
