"""``shards create``, ``shards sql`` and ``shards run``."""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.shards.conftest import Fleet, MariaDBFleet
from tests.services.mariadb import MariaDBServer


def test_create_is_repeatable_and_leaves_what_is_there(fleet: Fleet) -> None:
    fleet.sql(
        "photos", 2, "INSERT INTO photos_app_photo (photo_id, user_id, title) VALUES (1, 1, 'x')"
    )
    fleet.drop("events", 1)
    first = fleet.shards("create", "-v2")
    assert "events_00001: made (" in first.err
    assert "events_00000: was there (" in first.err
    assert "1 made, 17 were there" in first.out
    assert "0 made, 18 were there" in fleet.shards("create").out
    assert fleet.sql("photos", 2, "SELECT COUNT(*) FROM photos_app_photo") == [(1,)]
    fleet.sql("photos", 2, "DELETE FROM photos_app_photo")
    fleet.python("-m", "django", "migrate", "-v0", "--database", "events_00001")


def test_create_on_the_nodes_that_answer(
    mysql_fleet: MariaDBFleet, own_mariadb: MariaDBServer
) -> None:
    mysql_fleet.drop("photos", 0)
    own_mariadb.stop()
    try:
        failed = mysql_fleet.shards("create", "--group", "photos", code=1)
        assert mysql_fleet.exists("photos", 0)
        assert "two: 2002" in failed.err or "two: 2003" in failed.err
        assert "4 of 8 shards could not be made" in failed.err
    finally:
        own_mariadb.start()
    assert "0 made, 8 were there" in mysql_fleet.shards("create", "--group", "photos").out
    mysql_fleet.python("-m", "django", "migrate", "-v0", "--database", "photos_00000")


def test_sql_opens_the_shell_in_the_shard(fleet: Fleet) -> None:
    fleet.sql("pins", 3, "INSERT INTO photos_app_pin (id, note) VALUES (7, 'here')")
    query = "SELECT note FROM photos_app_pin"
    passed = {
        "sqlite": [query],
        "mysql": ["--skip-column-names", "-e", query],
        "postgresql": ["--tuples-only", "--no-align", "-c", query],
    }[fleet.vendor]
    assert fleet.shards("sql", "pins_00003", "--", *passed).out == "here\n"
    fleet.sql("pins", 3, "DELETE FROM photos_app_pin")


def test_sql_needs_a_shard_that_exists(fleet: Fleet) -> None:
    failed = fleet.shards("sql", "pins_00009", code=1)
    assert "no shard 'pins_00009'; they are called ['photos_00000'" in failed.err
    assert "no shard 'default'" in fleet.shards("sql", "default", code=1).err
    fleet.drop("pins", 3)
    passed = ["-c"] if fleet.vendor == "postgresql" else []
    fleet.shards("sql", "pins_00003", "--", *passed, "SELECT 1", code=1)
    assert not fleet.exists("pins", 3)
    fleet.shards("create", "--group", "pins")
    fleet.python("-m", "django", "migrate", "-v0", "--database", "pins_00003")


@pytest.mark.parametrize("parallel", ["1", "3"])
def test_run_on_each_shard(fleet: Fleet, parallel: str) -> None:
    run = fleet.shards("run", "visit", "--group", "photos", "--parallel", parallel)
    visited = re.findall(r"^  (photos_\d{5}) has auth in process (\d+)$", run.out, re.MULTILINE)
    assert sorted(alias for alias, _ in visited) == [f"photos_{n:05d}" for n in range(8)]
    processes = {process for _, process in visited}
    assert len(processes) == 1 if parallel == "1" else 1 <= len(processes) <= 3
    assert run.out.endswith("8 shards are done.\n")
    assert run.err == ""


@pytest.mark.parametrize(
    ("how", "message", "parallel"),
    [
        ("error", "photos_00002: told to fail", "1"),
        ("error", "photos_00002: told to fail", "2"),
        ("exception", "photos_00002: ValueError: a mistake", "1"),
        ("exit", "photos_00002: it ended with status 3", "2"),
        ("ask", "photos_00002: it asked a question, which nobody answers", "1"),
    ],
)
def test_a_failure_does_not_keep_the_others_back(
    sqlite_fleet: Fleet, how: str, message: str, parallel: str
) -> None:
    fleet = sqlite_fleet
    command = f"visit --fail-on photos_00002 --fail-on photos_00005 --how {how}"
    run = fleet.shards(
        "run", command, "--group", "photos", "--parallel", parallel, code=1, given="yes\n" * 9
    )
    assert message in run.err
    assert "2 of 8 shards failed: photos_00002, photos_00005. The others are done." in run.err
    assert "  about to fail on photos_00005" in run.out
    assert run.out.count("has auth in process") == 8
    assert run.out.count(": ok in ") == 6


def test_a_worker_that_dies_is_told(sqlite_fleet: Fleet) -> None:
    run = sqlite_fleet.shards(
        "run", "visit --fail-on photos_00001 --how die", "--group", "photos", "--parallel", "2",
        code=1,
    )  # fmt: skip
    assert "photos_00001: a worker process died, so it was cut off or not begun" in run.err


def test_run_with_a_placeholder(fleet: Fleet) -> None:
    run = fleet.shards("run", "tell to {alias}/x '{alias} and'", "--group", "events")
    assert "  to events_00000/x events_00000 and" in run.out
    named = fleet.shards("run", "visit --database {alias}", "--group", "events")
    assert "events_00001 has auth" in named.out
    quiet = fleet.shards("run", "visit", "--group", "events", "-v0")
    assert quiet.out == "2 shards are done.\n"


def test_commands_of_django(sqlite_fleet: Fleet) -> None:
    # Its option may be given several times.
    checked = sqlite_fleet.shards("run", "check --tag database", "--group", "events")
    assert checked.out.count("System check identified no issues") == 2
    dumped = sqlite_fleet.shards(
        "run", "dumpdata photos_app.Event --database {alias} -o '{folder}/{alias}.json'".replace(
            "{folder}", str(sqlite_fleet.folder)
        ), "--group", "events", "--parallel", "2",
    )  # fmt: skip
    assert dumped.err == ""
    assert (sqlite_fleet.folder / "events_00001.json").read_text().strip() == "[]"
    loaded = sqlite_fleet.shards(
        "run", f"loaddata {sqlite_fleet.folder}/events_00001.json", "--group", "events"
    )
    assert loaded.out.count("Installed 0 object(s) from 1 fixture(s)") == 2


def test_what_cannot_be_run(sqlite_fleet: Fleet) -> None:
    for arguments, said in (
        (["visits"], "no management command 'visits'"),
        ([""], "no management command ''"),
        (["tell 'x"], "no command line: No closing quotation"),
        (["tell x"], "'tell' has no option --database: write {alias}"),
        (["visit --database photos_00001"], "leave --database out"),
        (["visit --database=photos_00001"], "leave --database out"),
        (["visit", "--group", "photos", "--shards", "9"], "no shard 9"),
        (["visit", "--group", "nothing"], "no group 'nothing'"),
    ):
        assert said in sqlite_fleet.shards("run", *arguments, code=1).err
    assert "'0' is no number" in sqlite_fleet.shards("run", "visit", "--parallel", "0", code=2).err
    assert "required: COMMAND" in sqlite_fleet.shards("run", code=2).err


def test_an_empty_selection_is_an_error(sqlite_fleet: Fleet) -> None:
    changes = {"RANGES": [{"range": [0, 7], "primary": "one"}]}
    run = sqlite_fleet.shards(
        "run", "visit", "--group", "photos", "--node", "two", code=1,
        FLEET_CHANGES=json.dumps(changes),
    )  # fmt: skip
    assert "No shard is selected" in run.err
    assert run.out == ""
