"""A database for the package, and the cache servers of each test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import service_missing
from tests.integration.cache.faults.databases import KINDS, database_at
from tests.integration.cache.faults.harness import FaultHarness
from tests.integration.cache.faults.process_setup import GLOBAL_SCHEMA, ProcessSetup, create_tables
from tests.integration.cache.faults.servers import CacheServer, Memcached, Redis
from tests.services import ServiceMissing
from tests.services.addresses import ServerAddress

#: The servers that hold objects, and those that hold lists.
STORES: dict[str, dict[str, type[CacheServer]]] = {
    "memcached": {"one": Memcached},
    "redis": {"one": Redis},
    "both": {"objects": Memcached, "lists": Redis},
}
_said = pytest.StashKey[list[str]]()


@pytest.fixture(
    scope="package",
    params=["mariadb", pytest.param("postgresql", marks=pytest.mark.long)],
)
def database(request: pytest.FixtureRequest) -> Iterator[ServerAddress]:
    """A server with the tables of these tests, shared by them."""
    try:
        with KINDS[request.param].server() as server:
            address: ServerAddress = server.address
            database_at(address).prepare(GLOBAL_SCHEMA)
            create_tables(ProcessSetup(address, address, {}, {}))
            yield address
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
def make_harness(database: ServerAddress) -> Iterator[Callable[..., FaultHarness]]:
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
            return stack.enter_context(FaultHarness(database, caches, **options))

        yield make
