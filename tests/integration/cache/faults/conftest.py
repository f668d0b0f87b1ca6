"""A database for the package, and the cache servers of each test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import MySQLdb
import pytest

from tests.conftest import service_missing
from tests.integration.cache.faults.harness import FaultHarness
from tests.integration.cache.faults.process_setup import GLOBAL_SCHEMA, ProcessSetup, create_tables
from tests.integration.cache.faults.servers import CacheServer, Memcached, Redis
from tests.services import ServiceMissing
from tests.services.mariadb import MariaDBServer

#: The servers that hold objects, and those that hold lists.
STORES: dict[str, dict[str, type[CacheServer]]] = {
    "memcached": {"one": Memcached},
    "redis": {"one": Redis},
    "both": {"objects": Memcached, "lists": Redis},
}
_said = pytest.StashKey[list[str]]()
#: Account and password of writers.
WRITERS = ("writer", "secret")


@pytest.fixture(scope="package")
def database() -> Iterator[MariaDBServer]:
    """A MariaDB server with the tables of these tests, shared by them."""
    try:
        # A transaction soon stops waiting for one that a test has stopped.
        with MariaDBServer(innodb_lock_wait_timeout="2") as server:
            account, password = WRITERS
            with contextlib.closing(MySQLdb.connect(**server.address.mysqldb())) as connection:
                cursor = connection.cursor()
                cursor.execute(f"CREATE USER {account} IDENTIFIED BY '{password}'")
                cursor.execute(f"GRANT ALL PRIVILEGES ON *.* TO {account}")
                cursor.execute(f"CREATE DATABASE {GLOBAL_SCHEMA}")
            create_tables(ProcessSetup(server.address, server.address, {}, {}))
            yield server
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line at the end of the run, whether the test fails or not."""
    return request.config.stash.setdefault(_said, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash.get(_said, [])
    if lines:
        terminalreporter.section("the cache under faults")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def make_harness(database: MariaDBServer) -> Iterator[Callable[..., FaultHarness]]:
    """Return a function that starts a harness on the given stores.

    The servers have little memory if they are ``small``. Everything ends with the test.
    """
    with contextlib.ExitStack() as stack:

        def make(stores: str, *, small: bool = False, **options: Any) -> FaultHarness:
            caches = {}
            for alias, kind in STORES[stores].items():
                try:
                    caches[alias] = kind(**kind.small) if small else kind()
                except ServiceMissing as exc:
                    service_missing(exc)
                stack.callback(caches[alias].close)
            return stack.enter_context(FaultHarness(database, WRITERS, caches, **options))

        yield make
