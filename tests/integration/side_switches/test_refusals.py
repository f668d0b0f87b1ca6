"""What is no healthy pair is refused before anything is changed."""

from __future__ import annotations

import json

from tests.integration.side_switches.site import PairSite
from tests.services.replication import execute, execute_alone


def problems(site: PairSite, *arguments: str) -> str:
    """Run a switch that is refused, and return its reasons as one text."""
    done = site.switch(*(arguments or ("photos", "0")), "--json", code=1)
    assert not done.json["ok"]
    assert site.writable() == ["db1"]
    assert site.active() == ["db1", "db1", "db2", "db2"]
    return "\n".join(done.json["problems"])


def test_settings_of_servers(site: PairSite) -> None:
    """All reasons are listed at once, those that ``pairs check`` finds."""
    wrong = {
        "gtid_domain_id": 1,
        "binlog_format": "'MIXED'",
        "slave_run_triggers_for_rbr": "'YES'",
    }
    right = {
        "gtid_domain_id": 2,
        "binlog_format": "'ROW'",
        "slave_run_triggers_for_rbr": "'NO'",
    }
    second = site.pair.second
    execute(second, "STOP SLAVE")
    for name, value in wrong.items():
        execute(second, f"SET GLOBAL {name} = {value}")
    try:
        text = problems(site)
    finally:
        for name, value in right.items():
            execute(second, f"SET GLOBAL {name} = {value}")
        execute(second, "START SLAVE")
    for part in (
        "the same gtid_domain_id (1)",
        "'db2' has binlog_format = 'MIXED'",
        "'db2' has slave_run_triggers_for_rbr = 'YES'",
    ):
        assert part in text


def test_replication_that_is_filtered_late_or_without_gtid(site: PairSite) -> None:
    second = site.pair.second
    execute(second, "STOP SLAVE")
    execute(second, "CHANGE MASTER TO MASTER_USE_GTID = no, MASTER_DELAY = 5")
    execute(second, "SET GLOBAL replicate_ignore_table = 'x.y'")
    try:
        text = problems(site)
    finally:
        execute(second, "SET GLOBAL replicate_ignore_table = ''")
    assert "'db2' replicates without GTID" in text
    assert "'db2' does not replicate everything (Replicate_Ignore_Table = 'x.y')" in text
    assert "'db2' replicates 5 s later on purpose" in text


def test_a_side_that_is_read_only_or_does_not_replicate(site: PairSite) -> None:
    second = site.pair.second
    execute(second, "SET GLOBAL read_only = ON")
    try:
        assert (
            "'db2' is read only, as after a restart: run 'manage.py pairs rejoin db2'"
            in problems(site)
        )
    finally:
        execute(second, "SET GLOBAL read_only = OFF")
    execute(second, "STOP SLAVE")
    try:
        assert "replication from 'db1' to 'db2' does not run" in problems(site)
    finally:
        execute(second, "START SLAVE")


def test_tables_that_differ(site: PairSite) -> None:
    execute_alone(site.pair.second, "ALTER TABLE photos_00001.entries_entry ADD extra INT")
    assert "photos_00001.entries_entry have not the same columns" in problems(site)


def test_one_direction_only(site: PairSite) -> None:
    execute(site.pair.first, "STOP SLAVE")
    execute(site.pair.first, "RESET SLAVE ALL")
    assert "'db1' does not replicate from 'db2'" in problems(site)


def test_the_same_server_id(site: PairSite) -> None:
    execute(site.pair.second, "SET GLOBAL server_id = 1")
    try:
        assert "have the same server_id (1)" in problems(site)
    finally:
        execute(site.pair.second, "SET GLOBAL server_id = 2")


def test_a_passive_side_that_stays_behind(site: PairSite) -> None:
    with site.locked("second"):
        site.write_a_row(1)
        done = site.switch("photos", "0", "--patience", "1", "--json", code=1)
    assert "did not get to" in done.json["failures"]["0"]
    assert site.writable() == ["db1"]


def test_a_transaction_that_stays_open(site: PairSite) -> None:
    with site.writing("first", 0):
        done = site.switch("photos", "0", "--patience", "1", "--json", code=1)
    assert "there was always a transaction that used a table" in done.json["failures"]["0"]
    assert site.writable() == ["db1"]
    assert site.switch("photos", "0", "--json").json["switched"] == {"0": "db2"}


def test_tables_that_triggers_do_not_guard(site: PairSite) -> None:
    for statement in (
        "CREATE TABLE photos_00000.files (id INT PRIMARY KEY) ENGINE = Aria",
        "CREATE TABLE photos_00000.names (id BIGINT PRIMARY KEY, FOREIGN KEY (id) REFERENCES"
        " photos_00001.entries_entry (entry_id) ON DELETE CASCADE)",
    ):
        execute(site.pair.first, statement)
    site.wait_until_equal()
    text = problems(site)
    assert "the table 'files' is not of InnoDB" in text
    assert "a foreign key of the table 'names' leads to another schema" in text


def test_what_the_topology_does_not_allow(site: PairSite) -> None:
    assert "has no shard 4:" in problems(site, "photos", "4")
    assert "has no shard 4-6,9:" in problems(site, "photos", "4-6,9")
    assert "there is no node 'db9'" in problems(site, "photos", "0", "--to-side", "db9")
    groups = json.loads(json.dumps(site.groups))
    groups["photos"]["RANGES"][1] = {"range": [2, 3], "primary": "db1", "replica": "db2"}
    site.publish(groups)
    done = site.switch("photos", "3", code=1)
    assert "shard 3 of group 'photos' is not on a pair, but on 'db1'" in done.err


def test_commands_that_cannot_work_on_a_pair(site: PairSite) -> None:
    for arguments, reason in (
        (("shards", "promote", "db1"), "'db1' is a side of the pair ('db1', 'db2')"),
        (("shards", "move", "photos", "0", "--to", "db2"), "is on a pair of servers"),
        (("shards", "switch", "photos", "0", "--force"), "needs --all-from NODE"),
        (
            ("shards", "switch", "photos", "--all-from", "db1", "--force"),
            "switch without --force, which loses nothing",
        ),
    ):
        done = site.manage(*arguments)
        assert done.code == 1
        assert reason in done.err


def test_a_topology_in_the_settings(site: PairSite) -> None:
    for name, group in site.document()["groups"].items():
        site.setting["GROUPS"][name]["RANGES"] = group["RANGES"]
    del site.setting["TOPOLOGY"]
    site.save()
    assert "Sides cannot be switched" in site.switch("photos", "0", code=1).err


def test_no_operator_account(site: PairSite) -> None:
    del site.setting["NODES"]["db2"]["OPERATOR"]
    site.save()
    assert "node 'db2' has no OPERATOR" in problems(site)
