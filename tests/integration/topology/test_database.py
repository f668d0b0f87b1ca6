"""A topology in the global database: what differs from the other sources."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import MySQLdb
import pytest

from sharded_orm.topology.sources.database import PROCESSES, VERSIONS
from tests.integration.topology.conftest import DatabaseSite, site_with_database
from tests.integration.topology.site import Site, document, wait_for
from tests.services.mariadb import MariaDBServer
from tests.services.postgresql import Address

SCHEMA = "topology_site"


@pytest.fixture
def site(tmp_path: Path, sqlite_nodes: dict[str, dict[str, Any]]) -> DatabaseSite:
    return site_with_database(tmp_path, sqlite_nodes)


class MariaDBSite(DatabaseSite):
    """A site whose global database is on MariaDB."""

    server: MariaDBServer

    def save(self) -> None:
        super().save()
        content = json.loads(self.file.read_text())
        address = self.server.address.django()
        content["databases"]["default"] = {
            "ENGINE": "django.db.backends.mysql", "NAME": SCHEMA, **address,
        }  # fmt: skip
        self.file.write_text(json.dumps(content))

    def sql(self, statement: str, *parameters: Any) -> list[Any]:
        connection = MySQLdb.connect(**self.server.address.mysqldb(), db=SCHEMA, autocommit=True)
        with connection, connection.cursor() as cursor:
            cursor.execute(statement.replace("?", "%s"), parameters)
            return list(cursor.fetchall())


@pytest.fixture
def mariadb_site(
    tmp_path: Path, sqlite_nodes: dict[str, dict[str, Any]], own_mariadb: MariaDBServer
) -> Iterator[MariaDBSite]:
    if own_mariadb.pid is None:
        own_mariadb.start()
    with MySQLdb.connect(**own_mariadb.address.mysqldb()) as connection:
        connection.cursor().execute(f"DROP DATABASE IF EXISTS {SCHEMA}")
        connection.cursor().execute(f"CREATE DATABASE {SCHEMA}")
    MariaDBSite.server = own_mariadb
    options = {"INTERVAL": 0.05, "LAST_GOOD": str(tmp_path / "last_good/topology.json")}
    yield MariaDBSite(tmp_path, sqlite_nodes, {"SOURCE": "database", "OPTIONS": options})
    if own_mariadb.pid is None:
        own_mariadb.start()


def test_a_push_reaches_every_process(mariadb_site: MariaDBSite) -> None:
    mariadb_site.push(document(1))
    with mariadb_site.processes(3) as processes:
        assert {process.ask("place()") for process in processes} == {"one"}
        done = mariadb_site.push(document(1, "two"), "--wait", "60")
        assert "3 other processes are connected, and use it." in done.out
        assert {process.ask("place()") for process in processes} == {"two"}
        shown = mariadb_site.topology("show", "--json").json
        assert shown["source"] == "the table 'sharded_orm_topology' of the database 'default'"
        assert {one["version"] for one in shown["processes"]} == {2}


def test_a_server_that_comes_back_is_found_again(mariadb_site: MariaDBSite) -> None:
    mariadb_site.push(document(1))
    with mariadb_site.process() as process:
        mariadb_site.server.kill()
        process.wait_log("this process goes on with version 1")
        assert process.ask("place()") == "one"
        assert "cannot be changed" not in mariadb_site.push(document(1, "two"), code=1).err
        with mariadb_site.processes() as (starting,):
            assert starting.ask("place()") == "one"
            assert "Going on with the last good copy" in starting.log
            mariadb_site.server.start()
            mariadb_site.push(document(1, "two"))
            for each in (process, starting):
                each.wait_version(2)
                assert each.ask("place()") == "two"
                each.wait_log("answers again")


def test_on_postgresql(
    tmp_path: Path, sqlite_nodes: dict[str, dict[str, Any]], postgresql: Address
) -> None:
    site = site_with_database(tmp_path, sqlite_nodes)
    content = json.loads(site.file.read_text())
    content["databases"]["default"] = {
        "ENGINE": "django.db.backends.postgresql", "NAME": "postgres", **postgresql.django(),
    }  # fmt: skip
    site.file.write_text(json.dumps(content))
    site.push(document(1))
    with site.processes(2) as processes:
        assert {process.ask("place()") for process in processes} == {"one"}
        pids = {process.popen.pid for process in processes}
        wait_for(lambda: {site.reported_version(pid) for pid in pids} == {1}, "both are listed")
        done = site.push(document(1, "two"), "--wait", "60")
        assert "2 other processes are connected, and use it." in done.out
        assert {process.ask("place()") for process in processes} == {"two"}
        processes[0].end()
        assert site.reported_version(processes[0].popen.pid) is None


def test_without_a_copy_and_without_a_server_nothing_starts(mariadb_site: MariaDBSite) -> None:
    mariadb_site.server.kill()
    done = mariadb_site.topology("show", code=1)
    assert "the table 'sharded_orm_topology' of the database 'default' does not answer" in done.err
    assert "There is no last good copy" in done.err
    assert str(mariadb_site.server.address.password) not in done.err


def test_a_transaction_of_the_caller_changes_nothing(mariadb_site: MariaDBSite) -> None:
    mariadb_site.push(document(1))
    with mariadb_site.process() as process:
        # The transaction has a snapshot from before the push, and is rolled back.
        outcome = process.run(
            "from django.db import transaction\n"
            "answer = []\n"
            "try:\n"
            "    with transaction.atomic():\n"
            f"        connections['default'].cursor().execute('SELECT 1 FROM {VERSIONS}')\n"
            f"        answer.append(push({document(1, 'two')!r}))\n"
            "        answer.append(runtime.source().load().version)\n"
            "        raise ZeroDivisionError\n"
            "except ZeroDivisionError:\n"
            "    pass\n"
        )
        assert outcome == ["", 2]
        assert process.ask("place()") == "two"
    assert mariadb_site.topology("pull").json["version"] == 2


def test_a_killed_process_is_gone_when_its_last_sign_of_life_is_old(
    tmp_path: Path, sqlite_nodes: dict[str, dict[str, Any]]
) -> None:
    site = site_with_database(tmp_path, sqlite_nodes, TIMEOUT=1.0)
    site.push(document(1))
    with site.processes(2) as (killed, alive):
        for process in (killed, alive):
            wait_for(lambda p=process: site.reported_version(p.popen.pid) == 1, "it is listed")
        killed.popen.kill()
        wait_for(lambda: site.reported_version(killed.popen.pid) is None, "it is not listed")
        # A push waits for it no longer, and the living one has given signs of life meanwhile.
        assert "1 other process is connected" in site.push(document(1, "two")).out
        assert site.reported_version(alive.popen.pid) == 2


def test_rows_of_ended_processes_do_not_stay(site: DatabaseSite) -> None:
    site.push(document(1))
    site.sql(f"INSERT INTO {PROCESSES} VALUES ('old', 'h', 1, 1, '', '2020-01-01 00:00:00.000')")
    with site.process() as process:
        wait_for(lambda: site.reported_version(process.popen.pid) == 1, "it is listed")
        assert site.sql(f"SELECT name FROM {PROCESSES} WHERE name = 'old'") == []


def test_a_forked_worker_follows_by_itself(site: DatabaseSite) -> None:
    site.push(document(1))
    with site.process() as process:
        child = process.ask("fork()")
        assert process.ask("of_child('place()')") == "one"
        wait_for(lambda: site.reported_version(child) == 1, "the child tells its version")
        site.push(document(1, "two"))
        for ask in (process.ask, lambda text: process.ask(f"of_child({text!r})")):
            wait_for(lambda ask=ask: ask("version()") == 2, "version 2 in use")
            assert ask("place()") == "two"
        # The end of the child takes nothing from its parent.
        process.run("of_child('end')")
        site.push(document(2, "one"))
        process.wait_version(3)
        assert site.reported_version(process.popen.pid) == 3


def test_the_history_is_as_long_as_wanted(
    tmp_path: Path, sqlite_nodes: dict[str, dict[str, Any]]
) -> None:
    site = site_with_database(tmp_path, sqlite_nodes, HISTORY=2)
    for version in range(4):
        site.push(document(version, ("one", "two")[version % 2]))
    assert [e["version"] for e in site.topology("history", "--json").json] == [4, 3]
    assert "keeps no version 2" in site.topology("rollback", "2", code=1).err
    site.topology("rollback", "3")
    assert site.topology("pull").json["version"] == 5


def test_who_may_not_write_follows_all_the_same(site: DatabaseSite) -> None:
    site.push(document(1))
    database = site.folder / "default.sqlite3"
    content = json.loads(site.file.read_text())
    content["databases"]["default"] |= {
        "NAME": f"file:{database}?mode=ro", "OPTIONS": {"uri": True},
    }  # fmt: skip
    site.file.write_text(json.dumps(content))
    with site.process() as process:
        process.wait_log("does not allow this process to tell its version")
        refusal = process.ask(f"push({document(1, 'two')!r})")
        assert "attempt to write a readonly database" in refusal
        Site.save(site)
        site.push(document(1, "two"), "--wait", "0")
        process.wait_version(2)
        assert process.ask("place()") == "two"


def test_a_site_without_tables_is_told_to_push(site: DatabaseSite) -> None:
    sqlite3.connect(site.folder / "default.sqlite3").close()
    assert "nothing was pushed there yet" in site.topology("show", code=1).err
    assert "keeps no history" in site.topology("history").out
    assert "keeps no version 1" in site.topology("rollback", "1", code=1).err
    process = site.start("migrate")
    _, err = process.communicate()
    assert "A first topology is put there by 'manage.py topology push FILE'" in err
    site.push(document(1))
    process = site.start("migrate")
    _, err = process.communicate()
    assert process.returncode == 0, err
