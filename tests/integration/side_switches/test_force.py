"""A side that dies is given up; when it comes back, it stays closed until it has rejoined its pair."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.side_switches.site import PAIR, PairSite
from tests.patience import PATIENCE
from tests.services.replication import execute, replication_status

GIVE_UP = ("photos", "--all-from", "db1", "--force", "--no-input")


@pytest.fixture
def site(durable_site: PairSite) -> PairSite:
    return durable_site


def entry(number: int, user: int) -> str:
    return f"INSERT INTO photos_00000.entries_entry VALUES ({number}, {user})"


def lose_writes(site: PairSite) -> None:
    """The first server dies with writes that the second has not received."""
    site.write_a_row(1)
    execute(site.pair.first, entry(2, 20))
    site.wait_until_equal()
    execute(site.pair.second, "STOP SLAVE IO_THREAD")
    execute(site.pair.first, entry(3, 30))
    execute(
        site.pair.first, "UPDATE photos_00000.entries_entry SET user_id = 21 WHERE entry_id = 2"
    )
    execute(site.pair.first, "DELETE FROM photos_00000.entries_entry WHERE entry_id = 1")
    site.pair.first.kill()


def put_aside(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def assert_all_is_put_aside(files: list[str]) -> None:
    lines = [line for file in files for line in put_aside(file)]
    statements = [text for line in lines for text in line.get("statements", ())]
    assert entry(3, 30) in statements
    rows = [(line["row"], line["instead"]) for line in lines if line.get("table")]
    assert ({"entry_id": "3", "user_id": "30"}, None) in rows
    assert ({"entry_id": "2", "user_id": "21"}, {"entry_id": "2", "user_id": "20"}) in rows
    assert (None, {"entry_id": "1", "user_id": "0"}) in rows


def assert_in_order(site: PairSite) -> None:
    assert site.manage("pairs", "check").code == 0
    assert site.writable() == ["db2"]
    assert site.all_rows() == {1, 2, 4}
    # Everything works as before, in both directions.
    site.switch("photos", "0", "--to-side", "db1")
    site.write_a_row(5)
    assert site.all_rows() == {1, 2, 4, 5}


def test_what_the_survivor_never_got_is_put_aside(site: PairSite, tmp_path: Path) -> None:
    lose_writes(site)
    refused = site.switch("photos", "--all-from", "db1", code=1).err
    assert "--all-from db1 --force gives it up" in refused
    assert "Nobody can be asked" in site.switch(*GIVE_UP[:-1], code=1).err
    done = site.switch(*GIVE_UP)
    assert "What db1 has written after that is lost, unless it comes back" in done.err
    assert "db1 was not reached" in done.out
    assert site.active() == ["db2"] * 4
    execute(site.pair.second, entry(4, 0))
    site.pair.first.start()
    # It is closed until the command, and nothing of it comes back through the replication.
    assert site.writable() == ["db2"]
    assert "db1' was given up" in site.switch("photos", "0", code=1).err
    assert "db1' was given up" in site.manage("pairs", "setup", "db1", "db2").err
    assert "pairs rejoin db1" in site.manage("shards", "status").out
    report = site.manage("pairs", "rejoin", "db1", "--folder", str(tmp_path), "--json").json
    assert report["was_given_up"]
    assert report["transactions"] >= 3
    assert_all_is_put_aside([report["file"]])
    assert_in_order(site)


def test_a_side_that_had_sent_everything(site: PairSite, tmp_path: Path) -> None:
    site.write_a_row(1)
    execute(site.pair.first, entry(2, 20))
    site.wait_until_equal()
    site.pair.first.kill()
    site.switch(*GIVE_UP)
    execute(site.pair.second, entry(4, 0))
    site.pair.first.start()
    report = site.manage("pairs", "rejoin", "db1", "--folder", str(tmp_path), "--json").json
    assert (report["was_given_up"], report["file"]) == (True, "")
    assert_in_order(site)


def test_a_node_with_shards_of_several_groups(site: PairSite, tmp_path: Path) -> None:
    visits = {"STRATEGY": "modulo", "RANGES": [{"range": [0, 0], **PAIR, "active": "db1"}]}
    site.setting["GROUPS"]["visits"] = {
        "STRATEGY": "modulo",
        "DATABASE_NAME": "photos_visits_{shard}",
    }
    site.save()
    site.publish({**site.document()["groups"], "visits": visits})
    execute(site.pair.first, "CREATE DATABASE photos_visits_0")
    site.pair.settle()
    site.switch("visits", "0", "--fence")
    lose_writes(site)
    site.switch(*GIVE_UP)
    execute(site.pair.second, entry(4, 0))
    site.pair.first.start()
    rejoin = ("pairs", "rejoin", "db1", "--folder", str(tmp_path))
    remedy = "manage.py shards switch visits --all-from db1 --force"
    assert remedy in site.manage(*rejoin).err
    site.switch("visits", *GIVE_UP[1:])
    done = site.manage(*rejoin)
    assert done.code == 0, done.err
    assert_in_order(site)


def test_two_phases_hide_no_remedy(site: PairSite) -> None:
    """The search for prepared branches asks the dead server, too."""
    site.apps = ["sharded_orm.contrib.two_phase"]
    site.save()
    site.pair.first.kill()
    assert "--all-from db1 --force gives it up" in site.switch("photos", "0", code=1).err


def test_a_node_that_is_in_several_pairs(site: PairSite) -> None:
    """Each pair is given up by itself. The third node is the second server by another name."""
    site.setting["NODES"]["db3"] = site.setting["NODES"]["db2"]
    site.save()
    groups = site.document()["groups"]
    other = {"range": [2, 3], "pair": ["db1", "db3"], "active": "db1"}
    groups["photos"]["RANGES"][1:] = [other]
    site.publish(groups)
    site.pair.first.kill()
    assert "name one of them with --to-side" in site.switch(*GIVE_UP, code=1).err
    for side in ("db2", "db3"):
        site.switch(*GIVE_UP, "--to-side", side)
    assert site.active() == ["db2", "db2", "db3", "db3"]
    site.pair.first.start()
    refused = site.manage("pairs", "rejoin", "db1")
    assert refused.code == 1
    assert "'db1' is in several pairs" in refused.err


def test_a_survivor_that_has_restarted(site: PairSite) -> None:
    """A rejoin needs both servers, so the operator opens it."""
    site.write_a_row(1)
    site.wait_until_equal()
    site.pair.first.kill()
    site.pair.second.kill()
    site.pair.second.start()
    refused = site.switch(*GIVE_UP, code=1).err
    assert "SET GLOBAL read_only = OFF there if 'db1' does not come back" in refused
    execute(site.pair.second, "SET GLOBAL read_only = OFF")
    site.switch(*GIVE_UP)
    site.as_application(site.pair.second, entry(2, 0))


def test_a_side_that_was_not_given_up(site: PairSite) -> None:
    site.write_a_row(1)
    site.pair.first.kill()
    site.pair.first.start()
    site.wait_until_replicating()
    assert "is read only, as after a restart" in site.switch("photos", "0", code=1).err
    assert site.writable() == []
    done = site.manage("pairs", "rejoin", "db1")
    assert done.out == "db1 is a side of its pair again.\n", done.err
    assert site.writable() == ["db1"]
    assert site.switch("photos", "0", "--json").json["switched"] == {"0": "db2"}
    assert site.all_rows() == {1}


def test_a_side_that_has_lost_its_last_transactions(site: PairSite) -> None:
    """As if it had not flushed them before its machine lost power. The other side has them."""
    site.write_a_row(1)
    site.wait_until_equal()
    site.pair.first.kill()
    ((position,),) = execute(site.pair.second, "SELECT @@gtid_current_pos")
    later = re.sub(r"\b1-1-(\d+)", lambda match: f"1-1-{int(match[1]) + 5}", position)
    for statement in ("STOP SLAVE", f"SET GLOBAL gtid_slave_pos = '{later}'", "START SLAVE"):
        execute(site.pair.second, statement)
    site.pair.first.start()
    done = site.manage("pairs", "rejoin", "db1")
    assert done.code == 1
    assert "'db1' has lost transactions of its own" in done.err
    assert site.writable() == []


def test_a_living_side_that_is_cut_off_from_the_other_is_closed_first(
    site: PairSite, tmp_path: Path
) -> None:
    site.write_a_row(1)
    site.wait_until_equal()
    execute(site.pair.second, "STOP SLAVE IO_THREAD")
    execute(site.pair.first, entry(3, 30))
    report = site.switch(*GIVE_UP, "--json").json
    assert report["loss"]["unsent"].startswith("1-1-")
    assert site.writable() == ["db2"]
    for number in (2, 4):
        execute(site.pair.second, entry(number, 0))
    file = site.manage("pairs", "rejoin", "db1", "--folder", str(tmp_path), "--json").json["file"]
    assert entry(3, 30) in [s for line in put_aside(file) for s in line.get("statements", ())]
    assert_in_order(site)


def test_the_site_writes_all_the_time_beside_a_rejoin(site: PairSite, tmp_path: Path) -> None:
    """The survivor has written more transactions than the side that comes back."""
    lose_writes(site)
    site.switch(*GIVE_UP)
    site.pair.first.start()
    ended = threading.Event()

    def write(number: int) -> None:
        while not ended.is_set():
            number += 1
            execute(site.pair.second, entry(number, 0))

    with ThreadPoolExecutor(3) as threads:
        writers = [threads.submit(write, 1_000_000 * each) for each in (1, 2, 3)]
        try:
            done = site.manage("pairs", "rejoin", "db1", "--folder", str(tmp_path))
        finally:
            ended.set()
        for writer in writers:
            writer.result()
    assert done.code == 0, done.err
    assert {1, 2} < site.all_rows()
    assert site.manage("pairs", "check").code == 0


def test_what_the_survivor_has_received_and_not_executed(site: PairSite) -> None:
    site.write_a_row(1)
    site.wait_until_equal()
    execute(site.pair.second, "STOP SLAVE SQL_THREAD")
    execute(site.pair.first, entry(3, 30))
    ((written,),) = execute(
        site.pair.first, "SELECT REGEXP_SUBSTR(@@gtid_binlog_pos, '1-1-[0-9]+')"
    )
    end = time.monotonic() + PATIENCE
    while written not in replication_status(site.pair.second)["Gtid_IO_Pos"].split(","):
        assert time.monotonic() < end
    site.pair.first.kill()
    assert "START SLAVE SQL_THREAD on 'db2'" in site.switch(*GIVE_UP, code=1).err
    execute(site.pair.second, "START SLAVE SQL_THREAD")
    site.switch(*GIVE_UP)
    assert site.rows("second") == {1, 3}


def test_a_topology_of_a_time_before_a_side_was_given_up(site: PairSite, tmp_path: Path) -> None:
    """It names the side active that was given up. The other side has the newer rows, and keeps them."""
    lose_writes(site)
    before = site.document()
    site.switch(*GIVE_UP)
    execute(site.pair.second, entry(4, 0))
    site.pair.first.start()
    after = site.document()
    site.document_file.write_text(json.dumps({**before, "version": after["version"] + 1}))
    older = "'db2' has a later epoch of photos_00000, photos_00001 than the topology"
    rejoin = ("pairs", "rejoin", "db2", "--folder", str(tmp_path))
    for arguments in (rejoin, ("pairs", "check"), ("shards", "switch", "photos", "0")):
        assert older in site.manage(*arguments).err
    assert older in site.manage("shards", "status").out
    assert site.rows("second") == {1, 2, 4}
    site.document_file.write_text(json.dumps({**after, "version": after["version"] + 2}))
    done = site.manage("pairs", "rejoin", "db1", "--folder", str(tmp_path))
    assert done.code == 0, done.err
    assert_in_order(site)


def test_a_side_that_hangs(site: PairSite, tmp_path: Path) -> None:
    """Its host accepts connections, and nobody answers there."""
    site.write_a_row(1)
    site.wait_until_equal()
    execute(site.pair.second, "STOP SLAVE IO_THREAD")
    assert site.pair.first.pid is not None
    os.kill(site.pair.first.pid, signal.SIGSTOP)
    try:
        report = site.switch(*GIVE_UP, "--json").json
    finally:
        os.kill(site.pair.first.pid, signal.SIGCONT)
    assert report["switched"] == {"0": "db2", "1": "db2"}
    assert "db1 was not reached" in report["notes"][0]
    # The second shard does not wait for it any more.
    assert report["pauses"][1] < 2 < report["pauses"][0]
    for number in (2, 4):
        execute(site.pair.second, entry(number, 0))
    done = site.manage("pairs", "rejoin", "db1", "--folder", str(tmp_path))
    assert done.code == 0, done.err
    assert_in_order(site)


_REJOIN = "after:sharded_orm.operations.pairs.rejoin._Rejoin"
_ROWS = "after:sharded_orm.operations.pairs.side_rows.SideRows"
_SIDE = "after:sharded_orm.backends.mysql.pair_side.MySQLPairSide"
STEPS = [
    f"{_REJOIN}.close:1",
    f"{_ROWS}.compare:1",
    "after:sharded_orm.operations.pairs.put_aside.PutAsideFile.write:1",
    f"{_ROWS}.repair:1",
    f"{_SIDE}.continue_at:1",
    f"{_SIDE}.take_as_received:1",
    f"{_REJOIN}.receive:1",
    f"{_REJOIN}.send:1",
    f"{_REJOIN}.store_epochs:1",
]


@pytest.mark.parametrize(
    "step",
    [
        step if step in (STEPS[3], STEPS[5]) else pytest.param(step, marks=pytest.mark.long)
        for step in STEPS
    ],
)
def test_a_killed_rejoin_goes_on(site: PairSite, tmp_path: Path, step: str) -> None:
    lose_writes(site)
    site.switch(*GIVE_UP)
    execute(site.pair.second, entry(4, 0))
    site.pair.first.start()
    folder = ("--folder", str(tmp_path))
    assert site.manage("pairs", "rejoin", "db1", *folder, KILL_AT=step).code == -9
    assert site.writable() == ["db2"]
    done = site.manage("pairs", "rejoin", "db1", *folder)
    assert done.code == 0, done.err
    assert_all_is_put_aside([str(file) for file in tmp_path.glob("db1-*.jsonl")])
    assert_in_order(site)
