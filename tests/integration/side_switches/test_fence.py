"""The database itself refuses writes on the passive side."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import MySQLdb
import pytest

from tests.integration.side_switches.site import REFUSED, PairSite
from tests.services.replication import LoggingServer, execute, execute_alone

ROW_7 = "photos_00000.entries_entry WHERE entry_id = 7"


STATEMENTS = (
    "INSERT INTO photos_00000.entries_entry VALUES (8, 0)",
    "INSERT IGNORE INTO photos_00000.entries_entry VALUES (9, 0)",
    "REPLACE INTO photos_00000.entries_entry VALUES (7, 0)",
    "INSERT INTO photos_00000.entries_entry VALUES (7, 0) ON DUPLICATE KEY UPDATE user_id = 1",
    "UPDATE photos_00000.entries_entry SET user_id = 2",
    "UPDATE IGNORE photos_00000.entries_entry SET user_id = 3",
    "DELETE IGNORE FROM photos_00000.entries_entry WHERE entry_id = 9",
    "DELETE FROM photos_00000.entries_entry",
)


def test_the_passive_side_refuses_raw_sql(site: PairSite) -> None:
    site.write_a_row(7)
    for statement in STATEMENTS:
        site.wait_until_equal()
        with pytest.raises(MySQLdb.OperationalError, match=REFUSED):
            site.as_application(site.pair.second, statement)
        site.as_application(site.pair.first, statement)
        # The change of the active side arrives, although the passive side refuses the statement.
        site.wait_until_equal()
        changed = [
            execute(server, "SELECT * FROM photos_00000.entries_entry ORDER BY 1")
            for server in (site.pair.first, site.pair.second)
        ]
        assert changed[0] == changed[1]
    assert changed == [[], []]


def test_only_a_session_that_changes_one_side_alone_passes(site: PairSite) -> None:
    insert = "INSERT INTO photos_00000.entries_entry VALUES (7, 0)"
    passes = "SET @sharded_orm_capture_passes = 1"
    with pytest.raises(MySQLdb.OperationalError, match=REFUSED):
        execute_alone(site.pair.second, insert)
    with pytest.raises(MySQLdb.OperationalError, match=REFUSED):
        site.as_application(site.pair.second, f"{passes}; {insert}")
    execute_alone(site.pair.second, passes, insert)
    assert site.rows("second") == {7}


def test_each_side_is_active_for_its_own_shards(site: PairSite) -> None:
    assert [site.writable(number) for number in range(4)] == [["db1"], ["db1"], ["db2"], ["db2"]]


def test_opening_what_is_open_waits_for_no_writer(site: PairSite) -> None:
    """The command that switches opens a side and then removes its triggers, which opens it as well."""
    fence = """
from sharded_orm.operations.pairs.sides import open_fence
with open_fence(runtime.shard("photos", 0), lambda: None) as fence:
    fence.{call}
answer = True
"""
    assert site.run(fence.format(call="prepare(10)"))
    with site.writing("first", 0) as is_writing:
        assert is_writing
        assert site.run(fence.format(call="open(0)"))


def test_the_state_of_a_pair_costs_the_same_for_few_shards_and_for_many(site: PairSite) -> None:
    def sent() -> list[int]:
        names = "('Connections', 'Com_select')"
        return [
            int(value)
            for server in (site.pair.first, site.pair.second)
            for _, value in execute(server, f"SHOW GLOBAL STATUS WHERE variable_name IN {names}")
        ]

    costs = []
    # Both times, each side is active for some of the shards.
    for step in (2, 1):
        before = sent()
        assert site.run(f"""
from sharded_orm.operations.pairs.status import pair_states
(state,) = pair_states(list(runtime.group("photos").shards())[::{step}])
answer = not state.error and not state.problems
""")
        costs.append([after - earlier for earlier, after in zip(before, sent(), strict=True)])
    assert costs[0] == costs[1]


def test_increments_on_both_sides_at_once_are_not_lost(site: PairSite) -> None:
    """Before pairs had fences, 10 to 29 of 100 increments survived, and replication reported nothing."""
    site.write_a_row(7)
    site.wait_until_equal()
    stopped = threading.Event()
    increments = {site.pair.first: 0, site.pair.second: 0}
    refusals = dict(increments)

    def increment(server: LoggingServer) -> None:
        while not stopped.is_set():
            try:
                site.as_application(
                    server,
                    "UPDATE photos_00000.entries_entry SET user_id = user_id + 1 WHERE entry_id = 7",
                )
            except MySQLdb.OperationalError as exc:
                if REFUSED not in exc.args[1]:
                    raise
                refusals[server] += 1
            else:
                increments[server] += 1

    with ThreadPoolExecutor(2) as executor:
        writers = [executor.submit(increment, server) for server in increments]
        try:
            for side in ("db2", "db1", "db2"):
                site.switch("photos", "0", "--to-side", side)
        finally:
            stopped.set()
        for writer in writers:
            writer.result()
    assert min([*increments.values(), *refusals.values()]) > 0
    site.wait_until_equal()
    for server in increments:
        assert execute(server, f"SELECT user_id FROM {ROW_7}") == [(sum(increments.values()),)]
    (state,) = site.manage("shards", "status", "--json").json["pairs"]
    assert [direction["error"] for direction in state["replication"]] == ["", ""]
    assert state["writable"] == state["closed"] == []


def test_a_table_that_is_created_later_is_reported_and_fenced(site: PairSite) -> None:
    execute(site.pair.first, "CREATE TABLE photos_00000.later (id INT PRIMARY KEY)")
    site.wait_until_equal()
    problems = site.manage("shards", "status", "--json").json["problems"]
    assert any("passive side of photos_00000 accepts writes" in each for each in problems)
    site.switch("photos", "0", "--fence")
    shown = site.manage("shards", "status").out
    assert "accepts writes" not in shown
    lines = [line.split() for line in shown.splitlines() if line.startswith("db1 and db2")]
    assert lines == [["db1", "and", "db2", side, "2", "0", "ok"] for side in ("db1", "db2")]
    with pytest.raises(MySQLdb.OperationalError, match=REFUSED):
        site.as_application(site.pair.second, "INSERT INTO photos_00000.later VALUES (1)")


def test_a_fence_is_not_replicated(site: PairSite) -> None:
    logged = [site.logged(which) for which in ("first", "second")]
    site.switch("photos", "0-3", "--fence")
    site.switch("photos", "0")
    site.switch("photos", "0")
    assert [site.logged(which) for which in ("first", "second")] == logged
