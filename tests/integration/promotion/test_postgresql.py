"""Promotions on PostgreSQL: what a routine run proves, and what differs from MariaDB.

The other tests of this folder run on PostgreSQL with ``--long``.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.integration.promotion.postgresql_site import PostgreSQLSite
from tests.services.postgresql import DATABASE
from tests.services.streaming import (
    APPLICATION,
    OTHER_DATABASE,
    StreamingServer,
    connect,
    execute,
)

OTHER_SCHEMA = "CREATE SCHEMA photos_visits_0"


@pytest.fixture
def site(postgresql_site: PostgreSQLSite) -> PostgreSQLSite:
    return postgresql_site


def test_no_acknowledged_write_is_lost(site: PostgreSQLSite) -> None:
    with site.writers(3) as writers:
        done = site.promote("--json")
        for number in writers.numbers:
            writers.wait_for_more(number)
    report = done.json
    assert report["outcome"] == "promoted"
    assert done.err.splitlines() == [
        "closes the databases of db1",
        f"waits until db2 has {report['position']}",
        "publishes the new map",
        "promotes db2, and opens its databases",
        "db2 is the primary of photos 0-1, photos 2-3, visits 0-0",
    ]
    assert site.is_promoted()
    assert site.replicas() == {"db1"}
    rows = site.rows("second")
    for number in writers.numbers:
        assert {row for _, row in writers.acknowledged(number)} <= rows
        assert all(site.is_refusal(code, text) for _, code, text in writers.errors(number))
    status = site.manage("shards", "status").out
    assert (
        "Promotion 1 (shards promote db1) has closed it, for good: 'db2' is the primary." in status
    )
    assert "Make 'db1' a replica of 'db2' by pg_rewind or a new pg_basebackup" in status
    # Nobody gets in, not even the superuser, and not after a restart either.
    site.pair.first.stop()
    site.pair.first.start()
    for account in (APPLICATION, None):
        with pytest.raises(psycopg.OperationalError, match="not currently accepting connections"):
            execute(site.pair.first, "SELECT 1", account=account)
    print(f"writes were refused for {report['refused_for']:.3f} s;"
          f" longest silence {writers.longest_silence():.3f} s")  # fmt: skip


def test_what_is_open_at_the_fence_ends(site: PostgreSQLSite) -> None:
    """A session, a transaction that has written, one that is prepared, and a commit in memory."""
    insert = "INSERT INTO photos_00000.entries_entry VALUES (%s, 0)"
    with contextlib.ExitStack() as stack:
        idle, busy, preparing, careless = (
            stack.enter_context(connect(site.pair.first, DATABASE, APPLICATION)) for _ in range(4)
        )
        busy.execute("BEGIN")
        busy.execute(insert.encode(), (1,))
        # It would be in the way of a fence that only the transaction's default makes.
        idle.execute("SET default_transaction_read_only = off")
        preparing.execute("BEGIN")
        preparing.execute(insert.encode(), (2,))
        preparing.execute("PREPARE TRANSACTION 'left'")
        careless.execute("SET synchronous_commit = off")
        careless.execute(insert.encode(), (3,))
        site.promote()
        for connection in (idle, busy, preparing, careless):
            with pytest.raises(psycopg.OperationalError):
                connection.execute("COMMIT")
    # The commit that was only in memory was acknowledged.
    assert site.rows("second") == {3}
    # The transaction that is prepared is on the new primary, and only there somebody can end it.
    assert execute(site.pair.second, "COMMIT PREPARED 'left'") == []
    assert site.rows("second") == {2, 3}


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("end:fencing", marks=pytest.mark.long),
        "begin:switching",
        "begin:promoting",
        pytest.param("end:promoting", marks=pytest.mark.long),
    ],
)
def test_killed_and_run_again(site: PostgreSQLSite, place: str) -> None:
    site.write_a_row(1)
    site.promote_and_die(place)
    assert site.is_closed("first")
    status = site.manage("shards", "status").out
    assert "Promotion 1 (shards promote db1) has closed it, and is not finished." in status
    assert (
        "'manage.py shards promote db1', or undo it by 'manage.py shards promote db1 --abort'"
        in status
    )
    assert "Mend the node" not in status
    assert site.promote("--json").json["outcome"] == "promoted"
    assert site.is_promoted()
    assert site.rows("second") == {1}


def test_killed_and_undone_before_the_map_was_published(site: PostgreSQLSite) -> None:
    """The replica was not touched, so it goes on."""
    site.promote_and_die("begin:switching")
    # Whether it answers does not matter.
    site.pair.second.kill()
    assert site.promote("--abort", "--json").json["outcome"] == "undone"
    site.pair.second.start()
    assert site.is_as_before()
    site.write_a_row(2)
    site.wait_until_equal()
    assert site.rows("second") == {2}


@pytest.mark.long
def test_a_replica_that_dies_after_the_map_was_published(site: PostgreSQLSite) -> None:
    site.promote_and_die("begin:promoting")
    site.pair.second.kill()
    error = site.promote(code=1).err
    assert "The map names 'db2', which does not take writes yet" in error
    assert "'manage.py shards promote db1'" in error
    assert "cannot be undone" in site.promote("--abort", code=1).err
    site.pair.second.start()
    site.promote()
    assert site.is_promoted()


@pytest.mark.long
def test_a_replica_that_stays_behind_is_undone_in_time(site: PostgreSQLSite) -> None:
    site.execute("second", "SELECT pg_wal_replay_pause()")
    site.write_a_row(1)
    error = site.promote("--check", code=1).err
    assert "does not execute what it receives: its replay is paused" in error
    site.execute("second", "SELECT pg_wal_replay_resume()")
    site.wait_until_equal()
    site.promote_and_die("begin:fencing")
    with site.locked("second"):
        site.open_first()
        site.write_a_row(2)
        error = site.promote("--timeout", "1", code=1).err
    assert "did not get to" in error
    assert "Everything is as before" in error
    assert site.is_as_before()
    site.wait_until_equal()
    assert site.rows("second") == {1, 2}


def test_without_the_old_primary(site: PostgreSQLSite) -> None:
    site.write_a_row(1)
    site.wait_until_equal()
    site.stop_receiving()
    site.write_a_row(2)  # only the old primary has this row
    site.pair.first.kill()
    site.start_receiving()
    error = site.promote(code=1).err
    assert "node 'db1' does not answer" in error
    assert "--force does without it" in error
    report = site.promote("--force", "--no-input", "--json").json
    assert report["forced"]
    assert report["loss"]["received"] == report["loss"]["executed"] == report["position"]
    assert report["loss"]["idle"] >= 0
    assert site.primaries() == {"db2"}
    assert site.replicas() == {None}
    assert not site.is_read_only("second")
    assert site.rows("second") == {1}


def test_an_old_primary_that_dies_after_the_fence(site: PostgreSQLSite) -> None:
    """The replica has replayed the fence, so nobody gets in there either, until it is promoted."""
    site.write_a_row(1)
    site.promote_and_die("begin:waiting")
    site.wait_until_equal()
    site.pair.first.kill()
    done = site.promote("--abort", "--json")
    assert any("ALLOW_CONNECTIONS true" in each for each in done.json["warnings"])
    report = site.promote("--force", "--no-input", "--json").json
    assert any("'db2' is closed until it is the primary" in each for each in report["warnings"])
    assert site.rows("second") == {1}


@pytest.mark.long
def test_a_primary_that_somebody_has_closed(site: PostgreSQLSite) -> None:
    site.write_a_row(1)
    site.fence_first()
    # A refused account is an answer, too: the server is not dead.
    assert "'db1' answers" in site.promote("--force", "--no-input", code=1).err
    done = site.promote("--json")
    assert any("'db1' is closed already" in each for each in done.json["warnings"])
    assert site.rows("second") == {1}


@pytest.mark.long
def test_sessions_that_begin_at_the_moment_of_the_fence(site: PostgreSQLSite) -> None:
    """Each row comes by a session of its own; some commit only in memory."""
    acknowledged: set[int] = set()
    ended = threading.Event()

    def connect_and_write(first: int) -> None:
        for number in itertools.count(first, 16):
            try:
                with connect(site.pair.first, DATABASE, APPLICATION) as connection:
                    if number % 2:
                        connection.execute("SET synchronous_commit = off")
                    connection.execute(
                        "INSERT INTO photos_00000.entries_entry VALUES (%s, 0)", (number,)
                    )
            except psycopg.Error:
                if ended.is_set():
                    return
            else:
                acknowledged.add(number)

    def write_all_the_time() -> None:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(connect_and_write, range(16)))

    for _ in range(5):
        ended.clear()
        acknowledged.clear()
        site.create_databases()
        site.publish(site.groups)
        site.save()
        writing = threading.Thread(target=write_all_the_time)
        writing.start()
        while len(acknowledged) < 100:
            time.sleep(0.01)  # between two looks
        site.promote()
        ended.set()
        writing.join()
        assert acknowledged <= site.rows("second")


# ##### The whole server #####


@pytest.fixture
def divided(site: PostgreSQLSite) -> PostgreSQLSite:
    """A site with its two groups in two databases of the same servers."""
    execute(site.pair.first, OTHER_SCHEMA, database=OTHER_DATABASE, account=APPLICATION)
    site.wait_until_equal()
    for number, server in (("1", site.pair.first), ("2", site.pair.second)):
        node = site.pair.node(server, NAME=OTHER_DATABASE)
        site.setting["NODES"][f"other{number}"] = node
    site.save()
    groups = copy.deepcopy(site.groups)
    groups["visits"]["RANGES"][0].update(primary="other1", replica="other2")
    site.publish(groups)
    return site


def test_all_databases_of_the_server_go_together(divided: PostgreSQLSite) -> None:
    site = divided
    done = site.promote("--json")
    assert [(move["group"], move["from"], move["to"]) for move in done.json["moves"]] == [
        ("photos", "db1", "db2"), ("photos", "db1", "db2"), ("visits", "other1", "other2")
    ]  # fmt: skip
    for database in (DATABASE, OTHER_DATABASE):
        assert site.is_closed("first", database)
        assert not site.is_closed("second", database)


@pytest.mark.long
def test_a_replica_with_another_database_is_refused(divided: PostgreSQLSite) -> None:
    site = divided
    site.setting["NODES"]["other2"]["NAME"] = DATABASE
    site.save()
    error = site.promote(code=1).err
    assert "node 'other2' has the NAME 'site' instead of 'other'" in error
    groups = site.document()["groups"]
    del groups["visits"]["RANGES"][0]["replica"]
    site.publish(groups)
    assert "range (0, 0) of group 'visits' names no replica" in site.promote(code=1).err


# ##### What is refused #####


@pytest.mark.long
def test_a_server_that_is_no_replica_of_the_primary(site: PostgreSQLSite) -> None:
    second = site.pair.second
    second.stop()
    (second.data / "standby.signal").unlink()
    second.start()
    error = site.promote(code=1).err
    assert "'db2' does not replicate from 'db1', nor from any other server" in error
    assert (
        "shards are not copied"
        not in site.manage("shards", "move", "photos", "0", "--to", "db2").err
    )


def test_a_replica_of_a_copy_of_the_primary(site: PostgreSQLSite) -> None:
    """It has the same identifier and timeline, and comes to the same position."""
    third = StreamingServer()
    with third:
        third.back_up(site.pair.first)
        third.start()
        second = site.pair.second
        second.back_up(third)
        second.make_replica_of(third)
        second.start()
        site.wait_until_replicating()
        # The copy runs ahead.
        execute(third, "SELECT pg_logical_emit_message(false, '', repeat('x', 1000000))")
        error = site.promote(code=1).err
        assert "'db2' is at the position of 'db1' and has not closed its databases" in error
        assert "Everything is as before" in error
        assert not site.is_closed("first")
        assert site.primaries() == {"db1"}


@pytest.mark.long
def test_a_replica_that_would_refuse_writes(site: PostgreSQLSite) -> None:
    second = site.pair.second
    second.stop()
    second.write_setting("default_transaction_read_only", "on")
    second.write_setting("recovery_min_apply_delay", "1h")
    second.write_setting("synchronous_standby_names", "nobody")
    second.start()
    report = site.promote("--check", "--json", code=1).json
    assert any("set default_transaction_read_only = off" in each for each in report["problems"])
    assert any("replicates 1h later on purpose" in each for each in report["problems"])
