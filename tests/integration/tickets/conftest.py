"""A pair of ticket servers with a new sequence for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from sharded_orm.conf import TicketOptions
from sharded_orm.ids.tickets.generator import TicketGenerator
from sharded_orm.ids.tickets.round_robin import Turns
from sharded_orm.operations.tickets import begin

PAIR = ("tickets_1", "tickets_2")
_numbers = itertools.count(1)


def in_order(count: int) -> Turns:
    """Start every sequence with the first server, so that a test knows which server is asked."""
    return Turns(count, first=lambda count: 0)


@pytest.fixture
def generator() -> Iterator[TicketGenerator]:
    generator = TicketGenerator(PAIR, TicketOptions(backoff=0.001), turns=in_order)
    yield generator
    generator.close()


@pytest.fixture
def sequence(generator: TicketGenerator) -> str:
    """A sequence that no other test draws from: ids never start again."""
    name = f"sequence_{next(_numbers)}"
    for server in generator.servers:
        begin(server, [name])
    return name
