"""State that stays on connections must not harm the next request."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.tickets.faults.project import Project
from tests.integration.tickets.faults.servers import MariaDBTickets, ServerTickets
from tests.integration.tickets.faults.ticket_client import TicketClient


@pytest.mark.parametrize("on", ["pair", "pair_on_postgresql"])
def test_the_answer_to_an_interrupted_request_is_nobodys(
    request: pytest.FixtureRequest, on: str
) -> None:
    pair: list[ServerTickets] = request.getfixturevalue(on)
    sequence = "interrupted"
    for server in pair:
        server.create(sequence)
    options: dict[str, Any] = {"TIMEOUT": 60.0}
    project = Project({server.alias: server.for_clients for server in pair}, options)
    with TicketClient(project) as client, TicketClient(project) as other:
        for place in (0, 1):
            client.take_from(place, sequence)
        for place in (0, 1):
            other.take_from(place, sequence, 1000)
        # It waits for one id. The answer comes after the exception.
        with pair[0].locked():
            client.be_interrupted(sequence)
        for place in (0, 1):
            client.take_from(place, sequence, 100)
        ids = client.ids + other.ids
        assert len(ids) == len(set(ids))


def test_a_connection_that_died_unused_is_no_failure(pair: list[MariaDBTickets]) -> None:
    first, second = pair
    for server in pair:
        server.create("unused")
    # Only the first request on a new connection reveals that a server was restarted.
    project = Project({server.alias: server.for_clients for server in pair}, {"BACKOFF": 60.0})
    with TicketClient(project) as client:
        for place in (0, 1):
            client.take_from(place, "unused")
        with first.killed():
            pass
        with second.cut():
            assert [number % 2 for number in (*client.take("unused"), *client.take("unused"))] == [
                1,
                1,
            ]
