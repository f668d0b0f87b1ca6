"""The generator on a pair of PostgreSQL servers, and on one of each kind (F1-F3)."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from django.db import connections
from django.db.utils import ConnectionHandler

from sharded_orm.conf import TicketOptions
from sharded_orm.ids.tickets.exceptions import (
    SequenceExhausted,
    TicketServerBehind,
    TicketServerMisconfigured,
    TicketServersUnavailable,
    UnknownSequence,
)
from sharded_orm.ids.tickets.generator import TicketGenerator
from sharded_orm.ids.tickets.server import TicketServer
from sharded_orm.ids.tickets.session import LAST_ID, TicketSession
from sharded_orm.operations.tickets.creation import begin, create
from sharded_orm.operations.tickets.repair import advance
from sharded_orm.operations.tickets.survey import ask
from tests.integration.tickets.conftest import in_order
from tests.integration.tickets.faults.workload import Project, Workload
from tests.patience import PATIENCE
from tests.services.mariadb import Address as MariaDBAddress
from tests.services.postgresql import Address, PostgreSQLServer

pytest.importorskip("psycopg")

PAIR = ("elephant_1", "elephant_2")
OPTIONS = TicketOptions(timeout=20.0, backoff=0.001)
_numbers = itertools.count(1)

Maker = Callable[..., TicketGenerator]


def on_postgresql(address: Address) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        **address.django(),
    }


@pytest.fixture
def databases(django_db_blocker: Any) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Adds entries to ``DATABASES`` during a test."""
    added: list[str] = []

    def add(entries: Mapping[str, Any]) -> None:
        complete = ConnectionHandler({"default": {}, **entries}).settings
        for alias in entries:
            connections.settings[alias] = complete[alias]
            added.append(alias)

    with django_db_blocker.unblock():
        yield add
    for alias in added:
        connections[alias].close()  # there is a connection in any case now
        del connections[alias], connections.settings[alias]


@pytest.fixture
def pair(
    databases: Callable[[Mapping[str, Any]], None], postgresql_nodes: list[Address]
) -> dict[str, Any]:
    entries = dict(zip(PAIR, map(on_postgresql, postgresql_nodes), strict=True))
    databases(entries)
    return entries


@pytest.fixture
def make(pair: Any) -> Iterator[Maker]:
    made: list[TicketGenerator] = []

    def generator(*aliases: str, options: TicketOptions = OPTIONS) -> TicketGenerator:
        made.append(TicketGenerator(aliases or PAIR, options, turns=in_order))
        return made[-1]

    yield generator
    for one in made:
        one.close()


@pytest.fixture
def generator(make: Maker) -> TicketGenerator:
    return make()


@pytest.fixture
def sequence(generator: TicketGenerator) -> str:
    """A new sequence on both servers."""
    return begun(generator)


def begun(generator: TicketGenerator, after: int = 0) -> str:
    name = f"pair {next(_numbers)}"
    for server in generator.servers:
        begin(server, [name], after=after)
    return name


def administer(server: TicketServer, sql: str) -> None:
    deadline = time.monotonic() + PATIENCE
    with server.session(deadline) as lent:
        lent.ask(lambda session: session.execute(sql, (), deadline))


def counter(sequence: str) -> str:
    return f'"sharded_orm_sequence_{sequence}"'


def test_odd_and_even_in_turn(generator: TicketGenerator, sequence: str) -> None:
    assert [generator.next(sequence) for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    assert [list(generator.take(sequence, 3)) for _ in range(2)] == [[7, 9, 11], [8, 10, 12]]
    assert generator.next(sequence) == 13


def test_a_million_ids_are_one_request(
    generator: TicketGenerator, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        generator.next(sequence), generator.take(sequence, 2)
        generator.next(sequence)
    with generator.servers[0].session(time.monotonic() + PATIENCE) as lent:
        kind = lent.ask(type)
    statements: list[str] = []
    ask = kind._result_of  # type: ignore[attr-defined]

    def noted(self: TicketSession, *args: Any) -> Any:
        statements.append(self.alias)
        return ask(self, *args)

    monkeypatch.setattr(kind, "_result_of", noted)
    # The second statement on each server stores the mark of the other, once a second.
    for state in (server._current() for server in generator.servers):
        state.predecessor_mark_written[sequence] = time.monotonic() + 60
    ids = generator.take(sequence, 1_000_000)
    assert len(statements) == 1
    assert len(ids) == 1_000_000
    assert ids[-1] - ids[0] == 1_999_998


def test_threads_share_a_generator(generator: TicketGenerator, sequence: str) -> None:
    barrier = threading.Barrier(8)
    drawn: list[int] = []

    def draw() -> None:
        barrier.wait(PATIENCE)
        mine = [generator.next(sequence) for _ in range(100)]
        for _ in range(20):
            mine.extend(generator.take(sequence, 500))
        drawn.extend(mine)

    threads = [threading.Thread(target=draw) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(drawn) == len(set(drawn)) == 8 * 10_100


FORKING = """
import os, sys
from tests.integration.tickets.faults.workload import Project
project = Project({databases!r})
project.configure()
generator = project.generator()
(first,) = generator.take({sequence!r}, 1)
session = generator.servers[0]._state.pool._idle[0]
if (child := os.fork()) == 0:
    session.close() if {closes} else None
    sys.exit()  # as usual: what is open is closed
assert os.waitpid(child, 0)[1] == 0
generator.take({sequence!r}, 1), generator.take({sequence!r}, 1)
assert generator.servers[0]._state.pool._idle == [session]
"""


@pytest.mark.parametrize("closes", [False, True])
def test_a_child_leaves_its_parent_s_connection_alone(
    pair: dict[str, Any], generator: TicketGenerator, sequence: str, closes: bool
) -> None:
    script = FORKING.format(databases=pair, sequence=sequence, closes=closes)
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


@pytest.mark.parametrize("block_size", [1, 100])
def test_processes_never_get_the_same_id(
    pair: dict[str, Any], generator: TicketGenerator, sequence: str, block_size: int, tmp_path: Path
) -> None:
    project = Project(pair, {"TIMEOUT": 20.0, "BLOCK_SIZE": block_size})
    with Workload(project, sequence, tmp_path, processes=4, minimum=1000) as workload:
        workload.wait_for(
            "that all have drawn", lambda: all(m.last.count >= 1000 for m in workload.members)
        )
        drawn = workload.finish()
    assert drawn.count >= 4000
    assert drawn.duplicates() == []


def test_a_sequence_goes_on_above_what_exists(generator: TicketGenerator) -> None:
    sequence = begun(generator, after=1000)
    assert sorted(generator.next(sequence) for _ in range(4)) == [1001, 1002, 1003, 1004]


def test_exhaustion_is_an_error(generator: TicketGenerator) -> None:
    sequence = begun(generator, after=LAST_ID - 4)
    assert sorted(generator.next(sequence) for _ in range(4)) == [*range(LAST_ID - 3, LAST_ID + 1)]
    with pytest.raises(SequenceExhausted, match=r"fewer than 1 numbers left"):
        generator.next(sequence)
    with pytest.raises(SequenceExhausted, match=r"fewer than 1000 numbers left"):
        generator.take(sequence, 1000)


@pytest.mark.parametrize(
    "aliases",
    [
        pytest.param(PAIR[::-1], id="wrong order"),
        pytest.param(PAIR[:1], id="one left out"),
        pytest.param((PAIR[0], PAIR[0]), id="one server twice"),
    ],
)
def test_a_server_in_the_wrong_place_hands_out_nothing(
    make: Maker, sequence: str, aliases: tuple[str, ...]
) -> None:
    wrong = make(*aliases)
    for _ in range(3):
        with pytest.raises(TicketServerMisconfigured, match="TICKETS"):
            wrong.next(sequence)


def test_another_step_is_refused_before_an_id_leaves(
    generator: TicketGenerator, sequence: str
) -> None:
    assert [generator.next(sequence) for _ in range(2)] == [1, 2]
    administer(generator.servers[0], f"ALTER SEQUENCE {counter(sequence)} INCREMENT 1")
    with pytest.raises(TicketServerMisconfigured, match=r"'elephant_1' was altered"):
        generator.next(sequence)


def test_another_offset_is_refused_before_an_id_leaves(
    generator: TicketGenerator, sequence: str
) -> None:
    generator.next(sequence), generator.next(sequence)
    administer(generator.servers[0], f"SELECT setval('{counter(sequence)}', 1000)")
    with pytest.raises(TicketServerMisconfigured, match=r"its last id was 1002"):
        generator.next(sequence)


def test_a_server_that_falls_back_hands_out_nothing(
    generator: TicketGenerator, sequence: str
) -> None:
    for _ in range(100):
        generator.next(sequence)
    administer(generator.servers[0], f"SELECT setval('{counter(sequence)}', 1)")
    assert {generator.next(sequence) % 2 for _ in range(4)} == {0}
    assert isinstance(generator.servers[0].cause(sequence), TicketServerBehind)


def test_a_lost_sequence_is_told(
    generator: TicketGenerator, sequence: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert [generator.next(sequence) for _ in range(2)] == [1, 2]
    administer(generator.servers[0], f"DROP SEQUENCE {counter(sequence)}")
    assert [generator.next(sequence) for _ in range(3)] == [4, 6, 8]
    assert f"'elephant_1' has no sequence {sequence!r}" in caplog.text
    problem = ask(generator.servers[0]).sequences[sequence].problem
    assert problem is not None
    assert "has lost what it counts with" in problem
    with pytest.raises(UnknownSequence):
        generator.next("nothing")


def test_what_operators_do(generator: TicketGenerator) -> None:
    name, servers = f"pair {next(_numbers)}", generator.servers
    for made in (True, False):
        begun = create([name], start=101, check=False, servers=servers)
        assert [(one.form, one.next_id, one.made) for one in begun] == [
            ("sequence", 101, made), ("sequence", 102, made),
        ]  # fmt: skip
    drawn = [generator.next(name) for _ in range(6)]
    moved = advance([name], to=1000, check=False, servers=servers)
    assert [one.problem for one in moved] == [None, None]
    assert [one.after for one in moved] == [1001, 1000]
    assert sorted(drawn) == [101, 102, 103, 104, 105, 106]
    assert sorted(generator.next(name) for _ in range(2)) == [1002, 1003]
    positions = [ask(server).sequences[name].position for server in servers]
    assert positions == [1003, 1002]


def test_a_server_that_stops_and_comes_back(
    databases: Callable[[Mapping[str, Any]], None],
    own_postgresql: PostgreSQLServer,
    make: Maker,
) -> None:
    databases({"own": on_postgresql(own_postgresql.address)})
    generator = make("own", PAIR[1])
    sequence = begun(generator)
    drawn = [generator.next(sequence) for _ in range(10)]
    for end in (own_postgresql.stop, own_postgresql.kill):
        end()
        while_down = [generator.next(sequence) for _ in range(10)]
        assert {number % 2 for number in while_down} == {0}
        own_postgresql.start()
        after = [generator.next(sequence) for _ in range(10)]
        assert {number % 2 for number in after} == {0, 1}
        drawn += while_down + after
    assert len(drawn) == len(set(drawn)) == 50


def test_both_are_down(
    databases: Callable[[Mapping[str, Any]], None], own_postgresql: PostgreSQLServer, make: Maker
) -> None:
    databases({"own": on_postgresql(own_postgresql.address)})
    generator = make("own")
    sequence = begun(generator)
    assert generator.next(sequence) == 1
    own_postgresql.stop()
    with pytest.raises(TicketServersUnavailable, match=r"'own': .*refused"):
        generator.next(sequence)
    own_postgresql.start()
    assert generator.next(sequence) > 1


def test_one_of_each_kind(
    databases: Callable[[Mapping[str, Any]], None],
    mariadb: MariaDBAddress,
    make: Maker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = pytest.importorskip("MySQLdb")
    name = f"tickets_{next(_numbers)}_of_elephants"
    connection = driver.connect(**mariadb.mysqldb())
    cursor = connection.cursor()
    cursor.execute(f"CREATE DATABASE {name}")
    try:
        databases(
            {"seal": {"ENGINE": "django.db.backends.mysql", "NAME": name, **mariadb.django()}}
        )
        generator = make("seal", PAIR[1])
        sequence = begun(generator)
        assert [generator.next(sequence) for _ in range(6)] == [1, 2, 3, 4, 5, 6]
        assert [list(generator.take(sequence, 2)) for _ in range(2)] == [[7, 9], [8, 10]]
        forms = [ask(server).sequences[sequence].row.form for server in generator.servers]
        assert forms == ["update", "sequence"]
        # Each stores the other's mark.
        for state in (server._current() for server in generator.servers):
            state.predecessor_mark_written.clear()
        last = [generator.next(sequence) for _ in range(2)]
        marks = [
            ask(server).sequences[sequence].row.predecessor_mark for server in generator.servers
        ]
        assert marks[1] == last[0]
        assert marks[0] == last[1] - 2
    finally:
        cursor.execute(f"DROP DATABASE {name}")
        connection.close()
