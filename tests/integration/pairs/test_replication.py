"""``manage.py pairs setup`` and ``pairs check``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pytest_django import DjangoDbBlocker

from sharded_orm.backends.mysql.pair_side import MySQLPairSide
from tests.integration.pairs.site import PairSite
from tests.services.replication import (
    APPLICATION,
    OPERATOR,
    LoggingServer,
    MasterPair,
    execute,
    execute_alone,
)

APP, OP = (f"'{account[0]}'@'%'" for account in (APPLICATION, OPERATOR))


@pytest.fixture(scope="module")
def shared(pair: MasterPair, tmp_path_factory: pytest.TempPathFactory) -> PairSite:
    site = PairSite(pair, tmp_path_factory.mktemp("pairs"))
    site.create_databases()
    return site


@pytest.fixture
def site(shared: PairSite) -> Iterator[PairSite]:
    """One site for all tests; each test repairs what it has broken on the servers."""
    setting = copy.deepcopy(shared.setting)
    yield shared
    shared.setting = setting
    shared.save()
    assert shared.pairs("check", "db1", "db2").out == "db1 and db2 are a pair in order.\n"


@contextmanager
def altered(server: LoggingServer, broken: str, mended: str) -> Iterator[None]:
    execute_alone(server, *broken.split(";"))
    try:
        yield
    finally:
        execute_alone(server, *mended.split(";"))


def problems(site: PairSite, first: str = "db1", second: str = "db2") -> list[str]:
    found: list[str] = site.pairs("check", first, second, "--json", code=1).json["problems"]
    return found


def assert_named(sentences: list[str], *parts: tuple[str, str]) -> None:
    """Each problem has a sentence with the reason and the remedy, and there is no other."""
    for reason, remedy in parts:
        assert any(reason in each and remedy in each for each in sentences), (reason, sentences)
    assert len(sentences) == len(parts), sentences


def test_settings_of_a_server_are_refused_with_the_remedy(site: PairSite) -> None:
    second = site.pair.second
    broken, mended = (
        f"SET GLOBAL server_id = {number}; SET GLOBAL gtid_domain_id = {number};"
        f" SET GLOBAL binlog_format = {log}; SET GLOBAL binlog_row_image = {image};"
        f" SET GLOBAL slave_run_triggers_for_rbr = {triggers}; SET GLOBAL gtid_strict_mode = {strict}"
        for number, log, image, triggers, strict in (
            (1, "MIXED", "MINIMAL", "YES", "OFF"),
            (2, "ROW", "FULL", "NO", "ON"),
        )
    )
    with altered(second, broken, mended):
        assert_named(
            problems(site),
            ("the same server_id (1)", "give one of them another"),
            ("the same gtid_domain_id (1)", "SET GLOBAL gtid_domain_id"),
            ("binlog_format = 'MIXED'", "SET GLOBAL binlog_format = ROW"),
            ("binlog_row_image = 'MINIMAL'", "SET GLOBAL binlog_row_image = FULL"),
            ("slave_run_triggers_for_rbr = 'YES'", "SET GLOBAL slave_run_triggers_for_rbr = NO"),
            ("gtid_strict_mode = 'OFF'", "SET GLOBAL gtid_strict_mode = ON"),
        )
        assert "binlog_format" in site.pairs("setup", "db1", "db2", code=1).err


def test_a_server_that_is_open_after_a_restart_is_refused(
    django_db_blocker: DjangoDbBlocker,
) -> None:
    with django_db_blocker.unblock(), LoggingServer(read_only="OFF") as server:
        settings = {"ENGINE": "sharded_orm.backends.mysql", **server.address.django()}
        with MySQLPairSide("db1", settings) as side:
            (problem,) = [each for each in side.server_problems() if "restart" in each]
            assert "set read_only = ON in its configuration" in problem


def test_accounts_are_refused_with_the_remedy(site: PairSite) -> None:
    with (
        altered(
            site.pair.first,
            f"GRANT BINLOG ADMIN, READ_ONLY ADMIN ON *.* TO {APP}",
            f"REVOKE BINLOG ADMIN, READ_ONLY ADMIN ON *.* FROM {APP}",
        ),
        altered(
            site.pair.second,
            f"REVOKE BINLOG ADMIN ON *.* FROM {OP}; REVOKE TRIGGER ON `%`.* FROM {OP}",
            f"GRANT BINLOG ADMIN ON *.* TO {OP}; GRANT TRIGGER ON `%`.* TO {OP}",
        ),
    ):
        assert_named(
            problems(site),
            ("may write through read_only (READ_ONLY ADMIN)", "Give the application an account"),
            ("may write without logging it", "REVOKE BINLOG ADMIN"),
            ("lacks a privilege; there", "GRANT BINLOG ADMIN ON *.*"),
            ("lacks a privilege on the schema 'photos_00000'", "GRANT TRIGGER ON"),
        )


def test_replication_that_does_not_bring_everything_is_refused(site: PairSite) -> None:
    first, second = site.pair.first, site.pair.second
    with (
        altered(
            second,
            "STOP SLAVE; SET GLOBAL replicate_ignore_table = 'photos_00000.x';"
            " CHANGE MASTER TO MASTER_USE_GTID = no, MASTER_DELAY = 1; START SLAVE",
            "STOP SLAVE; SET GLOBAL replicate_ignore_table = '';"
            " CHANGE MASTER TO MASTER_USE_GTID = slave_pos, MASTER_DELAY = 0; START SLAVE",
        ),
        altered(first, "STOP SLAVE SQL_THREAD", "START SLAVE"),
    ):
        assert_named(
            problems(site),
            ("'db2' replicates without GTID", "MASTER_USE_GTID = slave_pos"),
            ("Replicate_Ignore_Table = 'photos_00000.x'", "Remove the filter"),
            ("replicates 1 s later on purpose", "set it to 0"),
            ("replication from 'db2' to 'db1' does not run", "START SLAVE SQL_THREAD on 'db1'"),
        )


def test_what_does_not_belong_on_the_passive_side_is_refused(site: PairSite) -> None:
    first, second = site.pair.first, site.pair.second
    trigger = "TRIGGER photos_00000.audit BEFORE INSERT ON photos_00000.entries_entry FOR EACH ROW"
    execute_alone(second, f"CREATE {trigger} SET @audited = 1")
    execute_alone(second, "CREATE EVENT photos_00001.purge ON SCHEDULE EVERY 1 DAY DO SELECT 1")
    execute_alone(
        first,
        "ALTER TABLE photos_00002.entries_entry ADD extra INT",
        "CREATE TABLE photos_00003.sharded_orm_lookup (id INT PRIMARY KEY)",
    )
    try:
        assert_named(
            problems(site),
            ("the trigger 'audit' in 'photos_00000'", "DROP TRIGGER `photos_00000`.`audit`"),
            ("the event 'purge' in 'photos_00001'", "DROP EVENT `photos_00001`.`purge`"),
            (
                "photos_00002.entries_entry, photos_00003.sharded_orm_lookup have not the same columns",
                "make one side anew",
            ),
        )
    finally:
        execute_alone(second, "DROP TRIGGER photos_00000.audit", "DROP EVENT photos_00001.purge")
        execute_alone(
            first,
            "ALTER TABLE photos_00002.entries_entry DROP extra",
            "DROP TABLE photos_00003.sharded_orm_lookup",
        )


def test_nodes_that_cannot_be_a_pair_are_refused(site: PairSite) -> None:
    site.setting["NODES"]["postgres"] = {
        "ENGINE": "sharded_orm.backends.postgresql",
        "NAME": "photos",
    }
    site.save()
    assert_named(problems(site, "db1", "nowhere"), ("there is no node 'nowhere'", "NODES has"))
    assert_named(
        problems(site, "db1", "postgres"),
        ("only MariaDB servers can replicate from each other", "manage.py shards promote"),
    )
    assert_named(problems(site, "db1", "db1"), ("are the same server", "correct HOST and PORT"))


def test_setup_starts_replication_in_both_directions(site: PairSite) -> None:
    """The second is a replica of the first so far; what runs already stays."""
    first, second = site.pair.first, site.pair.second
    execute(first, "STOP SLAVE")
    execute(first, "RESET SLAVE ALL")
    assert_named(problems(site), ("'db1' does not replicate from 'db2'", "pairs setup"))
    done = site.pairs("setup", "db1", "db2")
    assert done.out == "db1 and db2 replicate from each other.\n"
    assert "db2 replicates from db1 already" in done.err
    for server, schema in ((first, "photos_00000"), (second, "photos_00002")):
        execute(server, f"INSERT INTO {schema}.entries_entry VALUES (1, 1)")
    site.pair.settle()
    for server, schema in ((second, "photos_00000"), (first, "photos_00002")):
        assert execute(server, f"SELECT * FROM {schema}.entries_entry") == [(1, 1)]
        execute(site.pair.other(server), f"DELETE FROM {schema}.entries_entry")
    site.pair.settle()


def test_setup_does_not_connect_servers_with_unrelated_rows(site: PairSite) -> None:
    for server in (site.pair.first, site.pair.second):
        execute(server, "STOP SLAVE")
        execute(server, "RESET SLAVE ALL")
    execute(site.pair.second, "RESET MASTER")
    execute(site.pair.second, "SET GLOBAL gtid_slave_pos = ''")
    error = site.pairs("setup", "db1", "db2", code=1).err
    assert "'db2' has tables of shards, and no position in the log of 'db1'" in error
    assert "Make it anew from a copy" in error
    site.create_databases()


def test_setup_says_why_an_account_cannot_read_the_log(site: PairSite) -> None:
    first = site.pair.first
    execute(first, "STOP SLAVE")
    execute(first, "RESET SLAVE ALL")
    site.setting["NODES"]["db2"]["REPLICATION"] = {"USER": "nobody", "PASSWORD": "wrong"}
    site.save()
    error = site.pairs("setup", "db1", "db2", "--timeout", "1", code=1).err
    assert "replication from 'db2' to 'db1' does not run" in error
    assert "Access denied" in error
    execute(first, "STOP SLAVE")
    execute(first, "RESET SLAVE ALL")
    site.setting["NODES"]["db2"] = site.pair.node(site.pair.second)
    site.save()
    site.pairs("setup", "db1", "db2")
