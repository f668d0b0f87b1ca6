"""The status of the servers, whatever state they are in."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.db import connections

from sharded_orm.ids.tickets.generator import TicketGenerator
from sharded_orm.ids.tickets.server import TicketServer
from sharded_orm.ids.tickets.session import LAST_ID
from sharded_orm.operations.tickets import advance, begin, create, missing_sequences, status
from tests.integration.tickets.operations.spare import (
    administer,
    down,
    generator_of,
    lose,
    redirected,
    set_back,
)
from tests.queries.conftest import DATABASES

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


@pytest.mark.update_form
def test_status_of_a_pair(generator: TicketGenerator, servers: list[TicketServer]) -> None:
    create(servers=servers)
    create(["other"], servers=servers)
    generator.take("photos", 100), generator.take("photos", 10), generator.take("photos", 1)
    statuses = status(servers)
    assert statuses.problems == ()
    assert statuses.unused == ("other",)
    assert [(s.alias, s.offset, s.step, s.error) for s in statuses.servers] == [
        ("tickets_1", 1, 2, None),
        ("tickets_2", 2, 2, None),
    ]
    one, two = ({q.name: q for q in s.sequences}["photos"] for s in statuses.servers)
    assert (one.position, one.mark, one.form) == (201, 199, "update")
    assert (two.position, two.mark) == (20, 20)
    assert statuses.drift["photos"] == 181
    assert statuses.drift["other"] == 0
    assert one.used == 201 / LAST_ID


def test_status_names_what_is_missing(servers: list[TicketServer]) -> None:
    create(servers=servers)
    begin(servers[0], ["other"])
    lose(servers[1], "photos")
    (problem,) = status(servers).problems
    assert "'tickets_2' has no sequence 'other', 'photos': run" in problem
    assert problem.endswith("tickets create other photos'.")
    assert missing_sequences(servers[0]) == []
    assert missing_sequences(servers[1]) == ["photos"]


def test_status_of_a_server_that_is_down(
    generator: TicketGenerator, servers: list[TicketServer]
) -> None:
    create(servers=servers)
    with down(generator, 0):
        statuses = status(servers)
    assert [bool(server.error) for server in statuses.servers] == [True, False]
    assert len(statuses.problems) == 1 and statuses.problems[0].startswith(
        "'tickets_1' does not answer: "
    )
    assert statuses.servers[1].sequences[0].mark is None
    assert statuses.drift == {}


@pytest.mark.update_form
def test_status_of_a_server_that_fell_below_its_mark(
    generator: TicketGenerator, servers: list[TicketServer]
) -> None:
    create(servers=servers)
    for _ in range(4):
        generator.take("photos", 100)
    generator.close()
    set_back(servers[0], "photos", 99)
    (problem,) = status(servers).problems
    assert "'photos' on 'tickets_1' is at 99, below 399" in problem
    assert "tickets advance photos'" in problem


def test_status_of_a_row_without_its_counter(generator: TicketGenerator) -> None:
    if connections["tickets_1"].vendor != "mysql":
        pytest.skip("only its form 'replace' has a table of its own")
    create(form="replace", servers=generator.servers)
    for _ in range(4):
        generator.take("photos", 10)
    generator.close()
    one, two = generator.servers
    administer(two, "UPDATE sharded_orm_sequence SET partner_mark = 39 WHERE name = %s", "photos")
    administer(one, "DROP TABLE sharded_orm_sequence_photos")
    (problem,) = status(generator.servers).problems
    assert "'photos' on 'tickets_1'" in problem
    moved, _ = advance(["photos"], servers=generator.servers)
    assert moved.after == moved.before and moved.problem
    administer(two, "ALTER TABLE sharded_orm_sequence_photos ENGINE = InnoDB")
    assert any("ENGINE = Aria" in problem for problem in status(generator.servers).problems)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    """A server with invalid answers is reported like one that is down."""
    if connections["tickets_1"].vendor != "sqlite":
        pytest.skip("about files")
    path = tmp_path / "none.sqlite3"
    path.write_bytes(b"no database" * 100)
    with redirected("tickets_1", NAME=str(path)), generator_of(["tickets_1"]) as alone:
        (problem,) = status(alone.servers).problems
    assert problem == "'tickets_1' does not answer: file is not a database"
