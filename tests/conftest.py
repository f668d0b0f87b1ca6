"""Options, markers and services of all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest
from django.conf import settings

from tests.flush import same_rows_after_each_flush
from tests.model_states import rendered_once
from tests.services import ServiceMissing, required
from tests.services import mariadb as mariadb_service
from tests.services import memcached as memcached_service
from tests.services import pgbouncer as pgbouncer_service
from tests.services import postgresql as postgresql_service
from tests.services import redis as redis_service

#: The module with the settings: sqlite, mysql or postgresql.
DATABASE = settings.SETTINGS_MODULE.rpartition(".")[2]
HELPDESK = Path(__file__).parent / "helpdesk"

# A generated case has no time limit, nor is it slow: the machine may be busy.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# A shell without job control starts its background jobs with SIGINT ignored, and the processes that
# tests start would inherit that. Tests that interrupt one of them would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked long as well")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--long"):
        # Generated cases, before the modules of the tests are read.
        os.environ.setdefault("SCATTER_EXAMPLES", "50")
        os.environ.setdefault("SUBQUERY_EXAMPLES", "200")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # The helpdesk is a project of its own, which other settings do not have installed.
    if collection_path == HELPDESK and "helpdesk" not in settings.SETTINGS_MODULE:
        return True
    return None


#: Folders whose tests run on PostgreSQL in the long runs only, because they start many processes, and the
#: files in them that run there each time.
MOSTLY_LONG_ON_POSTGRESQL = (
    "balancing",
    "entities",
    "imports",
    "migrate",
    "mirrors",
    "moves",
    "objects",
    "references",
    "shard_moves",
    "shards",
    "storm",
    "testing_support",
    "two_phase",
)
ALWAYS_ON_POSTGRESQL = {
    "entities/test_pages.py",
    "mirrors/test_writes.py",
    "migrate/test_command.py",
    "moves/test_fences_on_postgresql.py",
    "moves/test_move_keys.py",
    "moves/test_row_copy.py",
    "objects/test_objects.py",
    "references/test_queries.py",
    "shard_moves/test_stopped_movers.py",
    "shards/test_create_sql_and_run.py",
    "testing_support/test_clones_postgresql.py",
    "two_phase/test_block.py",
    "two_phase/test_commit.py",
    "two_phase/test_kills.py",
    "two_phase/test_recovery.py",
}


def backends_of(item: pytest.Item) -> set[str]:
    """The backends that a parameter of the test names, or else the one of the settings."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = {"sqlite", "mariadb", "mysql", "postgresql"}
    return {value for value in parameters if isinstance(value, str) and value in names} or {
        DATABASE
    }


def is_long(item: pytest.Item) -> bool:
    """Whether a test runs with ``--long`` only."""
    if item.get_closest_marker("long"):
        return True
    if not backends_of(item).isdisjoint(
        backend for mark in item.iter_markers("long_on") for backend in mark.args
    ):
        return True
    folder, file = item.path.parent.name, f"{item.path.parent.name}/{item.path.name}"
    return (
        folder in MOSTLY_LONG_ON_POSTGRESQL
        and file not in ALWAYS_ON_POSTGRESQL
        and ("[postgresql" in item.name or "-postgresql" in item.name)
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    elsewhere = [name for name in ("mysql", "postgresql") if name != DATABASE]
    dropped = [
        item
        for item in items
        if (is_long(item) and not config.getoption("--long"))
        or any(item.get_closest_marker(f"{name}_settings") for name in elsewhere)
        or (DATABASE == "postgresql" and item.get_closest_marker("update_form"))
    ]
    if dropped:
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=dropped)


@pytest.fixture(scope="session", autouse=True)
def _quick_flush() -> Iterator[None]:
    with same_rows_after_each_flush():
        yield


@pytest.fixture(scope="session")
def _while_databases_are_migrated() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        stack.enter_context(rendered_once())
        yield stack


@pytest.fixture(scope="session")
def django_db_setup(_while_databases_are_migrated: ExitStack, django_db_setup: None) -> None:
    """The databases of the tests, as pytest-django makes them."""
    _while_databases_are_migrated.close()


def service_missing(exc: ServiceMissing) -> None:
    """The rule for a service that is not installed: CI fails, a laptop skips."""
    if required():
        pytest.fail(str(exc), pytrace=False)
    pytest.skip(str(exc))


@pytest.fixture(scope="session")
def mariadb_nodes() -> Iterator[list[mariadb_service.Address]]:
    """Two MariaDB servers, shared by the whole run: never kill them, drop what you create."""
    running = mariadb_service.addresses_from_environment()
    if running:
        yield running
        return
    try:
        with mariadb_service.servers(2) as started:
            yield [server.address for server in started]
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture(scope="session")
def mariadb(mariadb_nodes: list[mariadb_service.Address]) -> mariadb_service.Address:
    """One MariaDB server, shared by the whole run; see ``mariadb_nodes``."""
    return mariadb_nodes[0]


@pytest.fixture(scope="module")
def own_mariadb() -> Iterator[mariadb_service.MariaDBServer]:
    """A MariaDB server of the module's own, to be killed, stopped and started at will."""
    try:
        with mariadb_service.MariaDBServer() as server:
            yield server
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture(scope="session")
def postgresql_nodes() -> Iterator[list[postgresql_service.Address]]:
    """Two PostgreSQL servers, shared by the whole run: never kill them, drop what you create."""
    running = postgresql_service.addresses_from_environment()
    if running:
        yield running
        return
    try:
        with postgresql_service.servers(2) as started:
            yield [server.address for server in started]
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture(scope="session")
def postgresql(
    postgresql_nodes: list[postgresql_service.Address],
) -> postgresql_service.Address:
    """One PostgreSQL server, shared by the whole run; see ``postgresql_nodes``."""
    return postgresql_nodes[0]


@pytest.fixture(scope="module")
def own_postgresql() -> Iterator[postgresql_service.PostgreSQLServer]:
    """A PostgreSQL server of the module's own, to be killed, stopped and started at will."""
    try:
        with postgresql_service.PostgreSQLServer() as server:
            yield server
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture(scope="session")
def pgbouncer_nodes(
    postgresql_nodes: list[postgresql_service.Address],
) -> Iterator[list[postgresql_service.Address]]:
    """PgBouncers in transaction mode in front of ``postgresql_nodes``: never kill them."""
    try:
        with pgbouncer_service.poolers(postgresql_nodes) as started:
            yield [pooler.address for pooler in started]
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture(scope="session")
def pgbouncer(pgbouncer_nodes: list[postgresql_service.Address]) -> postgresql_service.Address:
    """One PgBouncer, in front of ``postgresql``; see ``pgbouncer_nodes``."""
    return pgbouncer_nodes[0]


@pytest.fixture(scope="module")
def own_pgbouncer(
    postgresql: postgresql_service.Address,
) -> Iterator[pgbouncer_service.PgBouncer]:
    """A PgBouncer of the module's own in front of ``postgresql``, to be killed at will."""
    try:
        with pgbouncer_service.PgBouncer(postgresql) as pooler:
            yield pooler
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture(scope="session")
def memcached() -> Iterator[memcached_service.MemcachedServer]:
    """A memcached server, shared by the whole run: never kill, stop or flush it."""
    try:
        with memcached_service.servers(1) as (server,):
            yield server
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture(scope="module")
def own_memcached() -> Iterator[memcached_service.MemcachedServer]:
    """A memcached server of the module's own, to be killed, stopped and started at will."""
    try:
        with memcached_service.servers(1) as (server,):
            yield server
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[redis_service.RedisServer]:
    """A Redis server, shared by the whole run: never kill, stop or flush it."""
    try:
        with redis_service.servers(1) as (server,):
            yield server
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture(scope="module")
def own_redis() -> Iterator[redis_service.RedisServer]:
    """A Redis server of the module's own, to be killed, stopped and started at will."""
    try:
        with redis_service.servers(1) as (server,):
            yield server
    except ServiceMissing as exc:
        service_missing(exc)
