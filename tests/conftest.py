"""Options, markers and services of all tests."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from django.conf import settings
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import SimpleTestCase

from tests.flush import same_rows_after_each_flush
from tests.garbage import keep_all
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
    keep_all()
    leave_connections_as_they_are()
    if config.getoption("--long"):
        # Generated cases, before the modules of the tests are read.
        os.environ.setdefault("SCATTER_EXAMPLES", "50")
        os.environ.setdefault("SUBQUERY_EXAMPLES", "200")


def leave_connections_as_they_are() -> None:
    """Let Django's test cases replace no method of connections while their tests run.

    They replace ensure_connection(), to refuse databases that a test does not name to its threads. Shards
    then open their cursors by Django's methods, and no test would run over the shorter way of production.
    """

    def ensure_connection(cls: Any) -> Any:
        return BaseDatabaseWrapper.ensure_connection

    SimpleTestCase.ensure_connection_patch_method = classmethod(ensure_connection)  # type: ignore[attr-defined]  # missing in Django's type stubs


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # The helpdesk is a project of its own, which other settings do not have installed.
    if collection_path == HELPDESK and "helpdesk" not in settings.SETTINGS_MODULE:
        return True
    # Most files have no test with a mark of a server, and the collection of them takes longer than some lanes.
    if collection_path.name.startswith("test_") and (marks := chosen_marks(config)):
        return not re.search(rf"mark\.({'|'.join(marks)})\b", collection_path.read_text()) or None
    return None


def chosen_marks(config: pytest.Config) -> list[str]:
    """The marks of which a test must have one, if the command line says just that: ``-m "a or b"``."""
    marks: list[str] = config.option.markexpr.split(" or ")
    return marks if all(map(str.isidentifier, marks)) else []


@dataclass(frozen=True)
class Selection:
    """What runs on a backend with ``--long`` only, while another backend has all of it each time.

    :param long: names of folders, and files with their folders.
    :param always: files in these folders that run on the backend each time.
    """

    long: Set[str]
    always: Set[str] = frozenset()

    def leaves_out(self, path: Path) -> bool:
        file = f"{path.parent.name}/{path.name}"
        return (path.parent.name in self.long or file in self.long) and file not in self.always


SELECTIONS = {
    # These folders start many processes.
    "postgresql": Selection(
        long={
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
        },
        always={
            "entities/test_pages.py",
            "mirrors/test_writes.py",
            "migrate/test_command.py",
            "moves/test_fences_on_postgresql.py",
            "moves/test_move_keys.py",
            "moves/test_row_copy.py",
            "moves/test_sessions_on_postgresql.py",
            "objects/test_objects.py",
            "references/test_queries.py",
            "shard_moves/test_hiding_on_postgresql.py",
            "shard_moves/test_stopped_movers.py",
            "shards/test_create_sql_and_run.py",
            "testing_support/test_clones_postgresql.py",
            "two_phase/test_block.py",
            "two_phase/test_commit.py",
            "two_phase/test_kills.py",
            "two_phase/test_recovery.py",
        },
    ),
    # Copies, kills, pauses and interleavings: MariaDB has all of them, with the same steps of our code, and more
    # moments, because statements that change a schema commit there, and sessions outlive their processes.
    "sqlite": Selection(
        long={
            "imports/test_copy.py",
            "imports/test_follow.py",
            "imports/test_interleavings.py",
            "imports/test_kills.py",
            "migrate/test_kills.py",
            "migrate/test_two_operators.py",
            "moves/test_ablations.py",
            "moves/test_announcements.py",
            "moves/test_bank.py",
            "moves/test_catching_up.py",
            "moves/test_clean_up.py",
            "moves/test_faults.py",
            "moves/test_kills.py",
            "moves/test_lost_lease.py",
            "moves/test_paused_movers.py",
            "moves/test_published_rows.py",
            "moves/test_way_back.py",
            "shard_moves/test_interleavings.py",
            "shard_moves/test_kills.py",
            "shard_moves/test_publication.py",
            "shard_moves/test_stopped_movers.py",
            "shard_moves/test_way_back.py",
            "storm",
        }
    ),
    # Arguments, reports and refusals of commands: SQLite has all of them, and no statement of theirs differs.
    "mariadb": Selection(
        long={
            "balancing",
            "imports/test_refusals.py",
            "moves/test_abort.py",
            "moves/test_commands.py",
            "moves/test_refusals.py",
            "moves/test_reports.py",
        }
    ),
    # The same settings of all tests, on MariaDB. Which key and shard a query or a form is about is decided
    # before there is any SQL, and so is whether a plan fits and whether a subquery is run or refused. Pages
    # and reports are made of rows that the ORM has read. SQLite has all of it.
    "mysql": Selection(
        long={
            "admin/test_adding.py",
            "admin/test_addresses.py",
            "admin/test_bound_key.py",
            "admin/test_costs.py",
            "admin/test_filtering.py",
            "admin/test_generic_inlines.py",
            "admin/test_history.py",
            "admin/test_inlines.py",
            "admin/test_options.py",
            "admin/test_own_classes.py",
            "admin/test_permissions.py",
            "admin/test_pickers.py",
            "queries/test_bound_key.py",
            "queries/test_bound_key_base_manager.py",
            "queries/test_bound_key_frameworks.py",
            "queries/test_bound_key_in_forms.py",
            "queries/test_bound_key_leaks.py",
            "queries/test_bound_key_matrix.py",
            "queries/test_bound_key_prefetching.py",
            "queries/test_bound_key_random.py",
            "queries/test_cached_level1.py",
            "queries/test_cached_routes.py",
            "queries/test_forward_matrix.py",
            "queries/test_key_in_forms.py",
            "queries/test_key_lookups.py",
            "queries/test_library_tables.py",
            "queries/test_patched_querysets.py",
            "queries/test_plan_ablations.py",
            "queries/test_plans_of_changed_models.py",
            "queries/test_prefetching.py",
            "queries/test_refusals_in_frameworks.py",
            "queries/test_relation_matrix.py",
            "queries/test_relations_in_forms.py",
            "queries/test_same_key.py",
            "queries/test_scatter_look_ups.py",
            "queries/test_serializers.py",
            "queries/test_shortcuts.py",
            "shards/test_broken_relations.py",
            "subqueries/test_rules.py",
        }
    ),
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
    return any(
        selection.leaves_out(item.path)
        and runs_on(item, backend)
        # No other backend has this test.
        and not item.get_closest_marker(f"{backend}_settings")
        for backend, selection in SELECTIONS.items()
    )


def runs_on(item: pytest.Item, backend: str) -> bool:
    """Whether the test is about ``backend``: its parameter says so, or the settings of the run do."""
    return (
        f"[{backend}" in item.name or f"-{backend}" in item.name or backend == DATABASE == "mysql"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    elsewhere = [name for name in ("mysql", "postgresql") if name != DATABASE]
    chosen: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        is_dropped = (
            (is_long(item) and not config.getoption("--long"))
            or any(item.get_closest_marker(f"{name}_settings") for name in elsewhere)
            or (DATABASE == "postgresql" and item.get_closest_marker("update_form"))
        )
        (dropped if is_dropped else chosen).append(item)
    if dropped:
        items[:] = chosen
        config.hook.pytest_deselected(items=dropped)


def pytest_collection_finish() -> None:
    keep_all()


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
