"""Conditions that forbid a promotion on PostgreSQL, which then changes nothing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest

from tests.integration.promotion.postgresql_site import PostgreSQLSite
from tests.services.postgresql import DATABASE
from tests.services.streaming import (
    APPLICATION,
    OPERATOR,
    OTHER_DATABASE,
    StreamingPair,
    StreamingServer,
    connect,
    execute,
)


@pytest.fixture(scope="module")
def shared(streaming: StreamingPair, tmp_path_factory: pytest.TempPathFactory) -> PostgreSQLSite:
    site = PostgreSQLSite(streaming, tmp_path_factory.mktemp("refusals"))
    site.create_databases()
    return site


@pytest.fixture
def site(shared: PostgreSQLSite) -> Iterator[PostgreSQLSite]:
    """One site for all tests; each test repairs what it has broken on the servers."""
    databases = copy.deepcopy(shared.databases)
    yield shared
    shared.databases = databases
    shared.save()
    assert shared.is_as_before()


@contextlib.contextmanager
def altered(
    server: StreamingServer, broken: str, mended: str, database: str = DATABASE
) -> Iterator[None]:
    execute(server, broken, database=database)
    try:
        yield
    finally:
        execute(server, mended, database=database)


def test_a_database_without_shards_is_reported(site: PostgreSQLSite) -> None:
    warnings = site.promote("--check", "--json").json["warnings"]
    (warning,) = warnings
    assert warning.startswith("the database 'other' of 'db1' has no shards and is not closed")


def test_a_global_database_on_the_server_is_refused(site: PostgreSQLSite) -> None:
    node = site.pair.node(site.pair.first)
    site.databases["other"] = {
        **{key: node[key] for key in ("HOST", "PORT", "USER", "PASSWORD")},
        "ENGINE": "django.db.backends.postgresql",
        "NAME": OTHER_DATABASE,
    }
    site.save()
    assert "'other' of DATABASES is on the same server" in site.promote(code=1).err


def test_accounts_that_cannot_do_it(site: PostgreSQLSite) -> None:
    first = site.pair.first
    operator, application = OPERATOR[0], APPLICATION[0]
    function = "FUNCTION pg_promote(boolean, integer)"
    for broken, mended, message in (
        (
            f"REVOKE pg_monitor, pg_signal_backend FROM {operator}",
            f"GRANT pg_monitor, pg_signal_backend TO {operator}",
            "GRANT pg_monitor, pg_signal_backend TO that account",
        ),
        (
            f"REVOKE EXECUTE ON {function} FROM {operator}",
            f"GRANT EXECUTE ON {function} TO {operator}",
            f"run GRANT EXECUTE ON {function}",
        ),
        (
            f"REVOKE {application} FROM {operator}",
            f"GRANT {application} TO {operator}",
            "it must own the database 'site'",
        ),
        (
            f"ALTER ROLE {application} SUPERUSER",
            f"ALTER ROLE {application} NOSUPERUSER",
            "'application' of node 'db1' is a superuser",
        ),
    ):
        with altered(first, broken, mended, "postgres"):
            site.wait_until_equal()
            assert message in site.promote("--check", code=1).err


def test_tables_that_are_not_replicated(site: PostgreSQLSite) -> None:
    table = "photos_00001.entries_entry"
    with altered(
        site.pair.first, f"ALTER TABLE {table} SET UNLOGGED", f"ALTER TABLE {table} SET LOGGED"
    ):
        error = site.promote("--check", code=1).err
    assert "photos_00001.entries_entry of node 'db1' are not replicated (UNLOGGED)" in error


def test_a_session_that_the_operator_may_not_end(site: PostgreSQLSite) -> None:
    with connect(site.pair.first) as superuser:
        error = site.promote(code=1).err
        superuser.execute("SELECT 1")
    assert "'db1' could not be closed (" in error
    assert "superuser" in error.lower()
    assert "Everything is as before" in error
    assert site.is_as_before()


def test_shards_are_not_copied_to_a_replica(site: PostgreSQLSite) -> None:
    error = site.manage("shards", "move", "photos", "0", "--to", "db2").err
    assert "'db2' replicates from 'db1', and shards are not copied" in error
    assert "shards split" not in error


def test_a_server_is_not_split_with_its_replica(site: PostgreSQLSite) -> None:
    done = site.manage("shards", "split", "db1", "--to", "db2", "--shards", "photos:2-3")
    assert done.code == 1
    assert "'db2' replicates from 'db1', and shards are not copied" in done.err
    assert site.is_as_before()
