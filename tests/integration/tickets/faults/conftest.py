"""Two private servers for a module, used as ticket servers behind proxies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sharded_orm.ids.tickets.session import SequenceSlot
from tests.conftest import service_missing
from tests.integration.tickets.faults.servers import (
    MariaDBTickets,
    PostgreSQLTickets,
    ServerTickets,
)
from tests.services import ServiceMissing, mariadb, postgresql


def _pair(servers: Any, kind: type[ServerTickets], django_db_blocker: Any) -> Iterator[Any]:
    try:
        with (
            servers as (one, two),
            kind(one, SequenceSlot(1, 2)) as first,
            kind(two, SequenceSlot(2, 2)) as second,
            django_db_blocker.unblock(),
        ):
            yield [first, second]
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture(scope="module")
def pair(django_db_blocker: Any) -> Iterator[list[MariaDBTickets]]:
    """Servers 1 and 2. After a test both run, on whatever data."""
    # A killed server must keep the ids that it has acknowledged. With the usual option of these
    # servers, the log leaves the process only once a second.
    servers = mariadb.servers(2, innodb_flush_log_at_trx_commit="1")
    yield from _pair(servers, MariaDBTickets, django_db_blocker)


@pytest.fixture(scope="module")
def pair_on_postgresql(django_db_blocker: Any) -> Iterator[list[PostgreSQLTickets]]:
    """Servers 1 and 2 on PostgreSQL."""
    yield from _pair(postgresql.servers(2), PostgreSQLTickets, django_db_blocker)
