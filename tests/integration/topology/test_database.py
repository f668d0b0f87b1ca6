"""A topology in the global database: what differs from the other sources."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import MySQLdb
import pytest

from sharded_orm.topology.sources.database_tables import PROCESSES, VERSIONS, _statement
from tests.integration.topology.conftest import DatabaseSite, site_with_database
from tests.integration.topology.site import ROOT, Site, document, wait_for
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
    assert "the table 'sharded_orm_topology' of the database 'default' cannot be used" in done.err
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
    site = site_with_database(tmp_path, sqlite_nodes, HISTORY=20)
    site.push(document(1))
    with site.process() as process:
        process.run("for n in range(2, 23): change(0, n)")
    entries = site.topology("history", "--limit", "99", "--json").json
    assert [entry["version"] for entry in entries] == list(range(22, 2, -1))
    assert "keeps no version 2" in site.topology("rollback", "2", code=1).err
    site.topology("rollback", "3")
    assert site.topology("pull").json["version"] == 23


def test_tables_that_are_made_anew_are_followed(site: DatabaseSite) -> None:
    site.push(document(1))
    with site.process() as process:
        for table in (VERSIONS, PROCESSES):
            site.sql(f"DROP TABLE {table}")
        site.push(document(2, "two"))
        process.wait_version(2)
        assert process.ask("place()") == "two"
        wait_for(lambda: site.reported_version(process.popen.pid) == 2, "it is listed again")


def test_a_table_that_is_lost_alone_is_made_again(site: DatabaseSite) -> None:
    site.push(document(1))
    for version, table in enumerate((VERSIONS, PROCESSES), start=2):
        site.sql(f"DROP TABLE {table}")
        site.push(document(version, ("one", "two")[version % 2]))
        assert site.topology("show", "--json").json["version"] == version


def test_an_alias_without_autocommit(mariadb_site: MariaDBSite) -> None:
    content = json.loads(mariadb_site.file.read_text())
    content["databases"]["default"]["AUTOCOMMIT"] = False
    mariadb_site.file.write_text(json.dumps(content))
    mariadb_site.push(document(1), "--comment", "mit Gefühl \N{WHITE SMILING FACE}")
    with mariadb_site.process() as process:
        mariadb_site.push(document(1, "two"))
        process.wait_version(2)
    entries = mariadb_site.topology("history", "--json").json
    assert entries[1]["comment"] == "mit Gefühl \N{WHITE SMILING FACE}"


def test_in_an_event_loop_and_in_a_test_case(site: DatabaseSite) -> None:
    site.push(document(1))
    with site.process() as process:
        process.run(
            "import asyncio, unittest\n"
            "from django.test import SimpleTestCase\n"
            "async def load():\n"
            "    return runtime.source().load().version\n"
            "class Case(SimpleTestCase):\n"
            "    def test_it(self):\n"
            "        assert runtime.source().load().version == 1\n"
            "result = Case('test_it').run()\n"
            "assert result.wasSuccessful(), result.errors\n"
            "answer = asyncio.run(load())\n"
        )
        assert process.ask("asyncio.run(load())") == 1


def test_a_worker_that_imports_the_site_in_its_event_loop_starts(site: DatabaseSite) -> None:
    """As uvicorn does with the name of a module."""
    site.push(document(1))
    code = (
        "import asyncio, json, sys\n"
        "from tests.integration.topology import project\n"
        "async def main():\n"
        "    project.configure(json.load(open(sys.argv[1])))\n"
        "asyncio.run(main())\n"
        "print(project.version(), project.place())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(site.file)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "1 one\n", done.stderr


def test_no_fork_happens_during_a_statement() -> None:
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            with _statement:
                pass

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                os._exit(0 if _statement.acquire(blocking=False) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        ended.set()
        thread.join()


def test_who_may_not_write_follows_all_the_same(site: DatabaseSite) -> None:
    site.push(document(1))
    database = site.folder / "default.sqlite3"
    content = json.loads(site.file.read_text())
    content["databases"]["default"] |= {
        "NAME": f"file:{database}?mode=ro", "OPTIONS": {"uri": True},
    }  # fmt: skip
    site.file.write_text(json.dumps(content))
    with site.process() as process:
        process.wait_log("This process cannot tell the table")
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
