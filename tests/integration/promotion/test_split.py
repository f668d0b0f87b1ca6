"""A server is split in two while the site works: shards go to the server that replicates from it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import MySQLdb
import pytest

from tests.integration.promotion.site import Site
from tests.services.replication import OPERATOR, Pair, execute, wait_until_equal

SPLIT = ("shards", "split", "db1", "--to", "db2", "--shards", "photos:2-3")
_MOVER = "sharded_orm.operations.shard_moves.replicated_mover.ReplicatedShardMover"


@pytest.fixture
def site(mariadb_site: Site, pair: Pair) -> Iterator[Site]:
    """The servers write into domains of their own, and the operator may change tables."""
    site = mariadb_site
    _give_tables(pair, "GRANT", "TO")
    for group in site.groups.values():
        for each in group["RANGES"]:
            del each["replica"]
    site.publish(site.groups)
    execute(pair.second, "SET GLOBAL gtid_domain_id = 2")
    execute(pair.second, "SET GLOBAL read_only = OFF")
    yield site
    execute(pair.second, "SET GLOBAL gtid_domain_id = 0")
    _give_tables(pair, "REVOKE", "FROM")


def _give_tables(pair: Pair, verb: str, preposition: str) -> None:
    for server in (pair.first, pair.second):
        connection = MySQLdb.connect(**server.address.mysqldb(), autocommit=True)
        with contextlib.closing(connection), connection.cursor() as cursor:
            cursor.execute("SET sql_log_bin = 0")
            name = f"{OPERATOR[0]}@'%'"
            cursor.execute(f"{verb} ALL PRIVILEGES ON `photos\\_%`.* {preposition} {name}")
            cursor.execute(f"{verb} RELOAD ON *.* {preposition} {name}")


def entries(site: Site) -> set[int]:
    """All entries that the application sees."""
    return set(site.run("answer = list(Entry.objects.scatter().values_list('pk', flat=True))"))


def places(site: Site) -> dict[tuple[int, ...], str]:
    ranges = site.document()["groups"]["photos"]["RANGES"]
    return {tuple(each["range"]): each["primary"] for each in ranges}


def schemas(site: Site, which: str) -> set[str]:
    server = getattr(site.pair, which)
    rows = execute(server, "SELECT DISTINCT table_schema FROM information_schema.tables"
                           " WHERE table_schema LIKE 'photos%%'")  # fmt: skip
    return {name for (name,) in rows}


def test_no_acknowledged_write_is_lost(site: Site) -> None:
    with site.writers(3) as writers:
        done = site.manage(*SPLIT, "--json")
        assert done.code == 0, done.err
        for number in writers.numbers:
            writers.wait_for_more(number)
    (report,) = done.json["groups"]
    assert report["moved"] == {"2": "db2", "3": "db2"}
    assert places(site) == {(0, 1): "db1", (2, 3): "db2"}
    rows = entries(site)
    for number in writers.numbers:
        assert {row for _, row in writers.acknowledged(number)} <= rows
        # Transactions fail as a whole.
        assert all("ShardMoved" in text for _, _, text in writers.errors(number))
    # What is written now is only on the server of the shard.
    wait_until_equal(site.pair)
    done = site.manage("shards", "split", "db1", "--to", "db2", "--cleanup")
    assert done.code == 0, done.err
    assert entries(site) == rows
    assert schemas(site, "first") == {"photos_00000", "photos_00001"}
    assert schemas(site, "second") == {"photos_00002", "photos_00003"}
    assert execute(site.pair.second, "SHOW ALL SLAVES STATUS") == []
    assert site.manage("shards", "check").code in (0, 1)


@pytest.mark.parametrize("moment", ["_hide:1", "_copy_the_rest:1", "_switch:1", "settle:1"])
def test_a_killed_split_goes_on(site: Site, moment: str) -> None:
    site.write_a_row(7)
    execute(site.pair.first, "INSERT INTO photos_00002.entries_entry VALUES (8, 2)")
    done = site.manage(*SPLIT, KILL_AT=f"after:{_MOVER}.{moment}")
    assert done.code == -signal.SIGKILL, done.err
    site.let_lease_expire()
    done = site.manage(*SPLIT)
    assert done.code == 0, done.err
    assert places(site) == {(0, 1): "db1", (2, 3): "db2"}
    assert entries(site) == {7, 8}
    assert site.replicates()


def test_a_rate_is_for_copies(site: Site) -> None:
    done = site.manage(*SPLIT, "--rate", "1000")
    assert done.code == 1
    assert "leave out --rate" in done.err


def test_a_broken_split_is_undone_by_repair(site: Site) -> None:
    execute(site.pair.first, "INSERT INTO photos_00002.entries_entry VALUES (8, 2)")
    site.manage(*SPLIT, KILL_AT=f"after:{_MOVER}._hide:1")
    site.let_lease_expire()
    done = site.manage("shards", "move", "photos", "--repair")
    assert done.code == 0, done.err
    assert places(site) == {(0, 1): "db1", (2, 3): "db1"}
    assert entries(site) == {8}
    wait_until_equal(site.pair)
    assert execute(site.pair.second, "SELECT entry_id FROM photos_00002.entries_entry") == [(8,)]
    assert site.replicates()


def test_a_replica_that_differs_is_found(site: Site) -> None:
    execute(site.pair.first, "INSERT INTO photos_00002.entries_entry VALUES (8, 2)")
    wait_until_equal(site.pair)
    with site.unlogged_on_second() as on_second:
        on_second("UPDATE photos_00002.entries_entry SET user_id = 6")
    done = site.manage(*SPLIT)
    assert done.code == 1
    assert "the copy differs from the source" in done.err
    # The other shard is equal.
    assert places(site) == {(0, 2): "db1", (3, 3): "db2"}
    assert entries(site) == {8}


def test_a_reader_who_holds_the_replica_back(site: Site) -> None:
    """The shard is out of use for MOVE_WAIT at most."""
    execute(site.pair.first, "INSERT INTO photos_00002.entries_entry VALUES (8, 2)")
    wait_until_equal(site.pair)
    reader = MySQLdb.connect(**site.pair.second.address.mysqldb())
    with contextlib.closing(reader), reader.cursor() as cursor:
        cursor.execute("SELECT * FROM photos_00002.entries_entry")
        done = site.manage("shards", "split", "db1", "--to", "db2", "--shards", "photos:2")
        assert entries(site) == {8}
    assert done.code == 1
    assert "A reader there may hold a table" in done.err
    assert places(site) == {(0, 1): "db1", (2, 3): "db1"}
    wait_until_equal(site.pair)
    assert site.manage(*SPLIT).code == 0
    assert entries(site) == {8}


def test_old_tables_stay_while_they_are_replicated(site: Site) -> None:
    assert site.manage(*SPLIT, "--keep", "0").code == 0
    done = site.manage("shards", "move", "photos", "--cleanup")
    assert "'db2' replicates from there" in done.out
    assert site.replicates()


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("SET GLOBAL read_only = ON", "'db2' is read only"),
        ("SET GLOBAL gtid_domain_id = 0", "the same gtid_domain_id (0)"),
        ("STOP SLAVE", "it was stopped"),
    ],
)
def test_a_server_that_is_not_ready_is_refused(site: Site, statement: str, problem: str) -> None:
    execute(site.pair.second, statement)
    for more in ((), ("--check",)):
        done = site.manage(*SPLIT, *more)
        assert done.code == 1
        assert problem in done.err
    assert places(site) == {(0, 1): "db1", (2, 3): "db1"}


def test_check(site: Site) -> None:
    done = site.manage(*SPLIT, "--check")
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "shard 2 of group 'photos' from db1 to db2",
        "shard 3 of group 'photos' from db1 to db2",
        "Nothing was changed.",
    ]


def test_cleanup_is_refused_while_the_replication_is_needed(site: Site) -> None:
    cleanup = ("shards", "split", "db1", "--to", "db2", "--cleanup")
    assert "no shard is on 'db2'" in site.manage(*cleanup).err
    assert site.manage(*SPLIT).code == 0
    groups = site.document()["groups"]
    groups["photos"]["RANGES"][0]["replica"] = "db2"
    site.publish(groups)
    done = site.manage(*cleanup)
    assert done.code == 1
    assert "names 'db2' as its replica" in done.err
    assert site.replicates()


def test_rows_are_copied_although_the_server_writes_a_binary_log(site: Site) -> None:
    """An ordinary account may create no triggers there, unless the server is told to trust it."""
    first, second = site.pair.first, site.pair.second
    execute(second, "STOP SLAVE")
    execute(second, "RESET SLAVE ALL")
    for number in range(4):
        execute(second, f"DROP DATABASE photos_{number:05d}")
    execute(first, "INSERT INTO photos_00002.entries_entry VALUES (8, 2)")
    done = site.manage("shards", "move", "photos", "2", "--to", "db2")
    assert done.code == 1
    assert "set log_bin_trust_function_creators = ON" in done.err
    execute(first, "SET GLOBAL log_bin_trust_function_creators = ON")
    try:
        done = site.manage("shards", "move", "photos", "2", "--to", "db2")
    finally:
        execute(first, "SET GLOBAL log_bin_trust_function_creators = OFF")
    assert done.code == 0, done.err
    assert places(site) == {(0, 1): "db1", (2, 2): "db2", (3, 3): "db1"}
    assert entries(site) == {8}
