"""A pair of empty ticket servers for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sharded_orm.ids.tickets.generator import TicketGenerator
from sharded_orm.ids.tickets.server import TicketServer
from tests.integration.tickets.conftest import PAIR
from tests.integration.tickets.operations.spare import generator_of, spare_servers


@pytest.fixture
def generator(transactional_db: None, tmp_path: Path) -> Iterator[TicketGenerator]:
    """A pair of empty servers."""
    with spare_servers(tmp_path, *PAIR), generator_of(PAIR) as generator:
        yield generator


@pytest.fixture
def servers(generator: TicketGenerator) -> list[TicketServer]:
    return generator.servers
