"""``shards status`` and ``shards check``: their findings, their advice, and their cost."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

import pytest

from tests.integration.shards.conftest import (
    GROUPS,
    WIDTH,
    Fleet,
    MariaDBFleet,
    PostgreSQLFleet,
    check_and_count,
)
from tests.services.mariadb import MariaDBServer

#: The definition of the function that makes timestamped ids.
_ID_FUNCTION = (
    "SELECT pg_get_functiondef(p.oid) FROM pg_proc p WHERE proname ^@ 'sharded_orm_next_id_'"
    " AND pronamespace::regnamespace::text = current_schema()"
)
CARRIED = 46  # the bit from which an id of "pins" carries its shard


def pin(shard: int, local: int = 1) -> int:
    return shard << CARRIED | local


def test_a_healthy_fleet(healthy: Fleet) -> None:
    run = healthy.shards("status")
    for group, count in GROUPS.items():
        for node in ("one", "two"):
            row = run.row(node, group)
            assert row[2] == str(count // 2)
            assert row[-1] == "ok"
    checked = healthy.shards("check")
    assert checked.err == ""
    assert max(map(len, [*run.out.splitlines(), *checked.out.splitlines()])) <= WIDTH


def test_sizes(healthy: Fleet) -> None:
    node, _ = healthy.json("status", "--each")["nodes"]
    for group in node["groups"]:
        assert group["bytes"] > 0
        assert group["bytes"] == sum(one["bytes"] for one in group["each"])
        rows = [one["rows"] for one in group["each"]]
        if healthy.vendor == "sqlite":
            assert group["rows"] is None
        else:
            assert group["rows"] == sum(rows) > 0  # of django_migrations, at least
    assert "KB" in healthy.shards("status", "--each").out
    unsized = healthy.json("status", "--no-sizes")["nodes"][0]["groups"][0]
    assert unsized["bytes"] is None


def test_only_what_is_selected(healthy: Fleet) -> None:
    status = healthy.json("status", "--group", "photos", "--shards", "2-5", "--each")
    shown = [one["alias"] for node in status["nodes"] for g in node["groups"] for one in g["each"]]
    assert shown == [f"photos_{n:05d}" for n in (2, 3, 4, 5)]
    only = healthy.json("status", "--node", "two")["nodes"]
    assert [node["name"] for node in only] == ["two"]
    failed = healthy.shards("status", "--group", "photos", "--shards", "7-8", code=1)
    assert "no shard 8" in failed.err


def test_missing_shards_are_created_by_the_remedy(healthy: Fleet) -> None:
    healthy.drop("photos", 1)
    healthy.drop("photos", 2)
    run = healthy.shards("status")
    assert run.row("one", "photos") == [
        "one",
        "photos",
        "4",
        "2",
        *run.row("one", "photos")[4:-1],
        "WRONG",
    ]
    failed = healthy.shards("check", code=1)
    assert "photos_00001, photos_00002" in failed.err
    assert "shards create --group photos --shards 1-2" in failed.err
    made = healthy.shards("create", "--group", "photos", "--shards", "1-2")
    assert "2 made, 0 were there" in made.out
    assert healthy.exists("photos", 1)
    behind = healthy.shards("check", code=1)
    assert "migrate_shards --group photos --shards 1-2" in behind.err
    assert healthy.shards("status").row("one", "photos")[-1] == "behind"
    for alias in ("photos_00001", "photos_00002"):
        healthy.python("-m", "django", "migrate", "-v0", "--database", alias)


def test_a_migration_of_a_global_app_leaves_no_shard_behind(healthy: Fleet) -> None:
    """It changes nothing there; migrate_shards records it when it runs next."""
    for app, name in (("auth", "0012_alter_user_first_name_max_length"), ("sharded_orm", "%")):
        healthy.sql(
            "events", 1, f"DELETE FROM django_migrations WHERE app = '{app}' AND name LIKE '{name}'"
        )
    assert healthy.shards("status").row("two", "events")[-1] == "ok"
    healthy.shards("check", "--group", "events")
    healthy.python("-m", "django", "migrate", "-v0", "--database", "events_00001")
    assert healthy.sql("events", 1, "SELECT 1 FROM django_migrations WHERE app = 'sharded_orm'")


def test_a_shard_that_is_behind(healthy: Fleet) -> None:
    healthy.sql("events", 1, "DELETE FROM django_migrations WHERE name LIKE '0003_proxies%'")
    status = healthy.json("status")
    by_name = {node["name"]: node for node in status["nodes"]}
    events = {g["group"]: g for g in by_name["two"]["groups"]}["events"]
    assert events["behind"] == ["events_00001"]
    failed = healthy.shards("check", code=1)
    assert "is behind on 'two': events_00001; the first lacks 1 migration from" in failed.err
    # Its tables are not compared with those of the shards that are further.
    assert "does not look like" not in failed.err
    healthy.shards(
        "run", "migrate photos_app 0003 --fake -v0", "--group", "events", "--shards", "1"
    )


def test_a_schema_that_does_not_belong_there(healthy: Fleet) -> None:
    healthy.make("photos", 0, "two")  # its replica
    healthy.make("photos", 5, "one")
    healthy.make("photos", 99, "one")
    status = healthy.json("status")
    found = {
        (node["name"], group["group"]): group["unexpected"]
        for node in status["nodes"]
        for group in node["groups"]
        if group["unexpected"]
    }
    assert found == {("one", "photos"): [healthy.schema("photos", n) for n in (5, 99)]}
    failed = healthy.shards("check", code=1)
    assert "shard 5 of 'photos' is on 'two'" in failed.err
    assert "group 'photos' has no such shard" in failed.err
    for number, node in ((0, "two"), (5, "one"), (99, "one")):
        healthy.unmake("photos", number, node)


def test_wrong_options_of_a_node_are_named(sqlite_fleet: Fleet) -> None:
    engine = "sharded_orm.backends.sqlite3"
    nodes = {
        "one": {
            "ENGINE": engine,
            "NAME": str(sqlite_fleet.folder / "one"),
            "OPTIONS": {"timout": 5},
        },
        "two": {"ENGINE": engine, "NAME": str(sqlite_fleet.folder / "two")},
    }
    run = sqlite_fleet.shards("status", FLEET_NODES=json.dumps(nodes))
    assert run.row("one", "photos")[-2:] == ["WRONG", "SETTINGS"]
    assert run.row("two", "photos")[-1] == "ok"
    [problem] = [line for line in run.out.splitlines() if line.startswith("Node")]
    assert re.fullmatch(
        r"Node 'one' cannot be asked with its settings: .*'timout'.*[^.]\. Nothing is known of its"
        r" shards, \d+ of '\w+'(, \d+ of '\w+')*\. Correct the settings in NODES, and check again\.",
        problem,
    )


def test_drift_names_the_shard_and_the_difference(healthy: Fleet) -> None:
    healthy.sql("photos", 6, "ALTER TABLE photos_app_tag ADD COLUMN colour integer NULL")
    healthy.sql("photos", 2, "DROP INDEX photo_posted" + (
        " ON photos_app_photo" if healthy.vendor == "mysql" else ""
    ))  # fmt: skip
    (index, column) = healthy.json("check", code=1)["drift"]
    assert (index["shard"], column["shard"]) == ("photos_00002", "photos_00006")
    assert index["sibling"] not in ("photos_00002", "photos_00006")
    assert index["siblings"] == 6
    assert any("photo_posted" in what for what in index["differences"])
    assert any("photos_app_tag" in what and "colour" in what for what in column["differences"])
    failed = healthy.shards("check", "--group", "photos", code=1)
    assert "'photos_00006' does not look like 6 siblings" in failed.err
    assert "colour" in failed.err
    healthy.sql("photos", 6, "ALTER TABLE photos_app_tag DROP COLUMN colour")
    healthy.sql("photos", 2, "CREATE INDEX photo_posted ON photos_app_photo (posted_at)")
    if healthy.vendor == "sqlite":
        # Only the spelling differs, which is a difference of another kind.
        (sql,) = healthy.sql(
            "photos", 3, "SELECT sql FROM sqlite_master WHERE name = 'photo_posted'"
        )
        healthy.sql("photos", 2, "DROP INDEX photo_posted", sql[0])
        (tag,) = healthy.sql(
            "photos", 3, "SELECT sql FROM sqlite_master WHERE name = 'photos_app_tag'"
        )
        assert healthy.sql(
            "photos", 6, "SELECT sql FROM sqlite_master WHERE name = 'photos_app_tag'"
        ) == [tag]


def test_id_functions_of_two_versions_are_made_equal_by_the_remedy(
    postgresql_fleet: PostgreSQLFleet,
) -> None:
    fleet = postgresql_fleet
    ((function,),) = fleet.sql("visits", 1, _ID_FUNCTION)
    fleet.sql("visits", 1, function.replace("BEGIN\n", "BEGIN\n  -- An earlier version.\n", 1))
    failed = fleet.shards("check", "--group", "visits", code=1)
    assert "'manage.py migrate --database visits_00001'" in failed.err
    assert "by hand" not in failed.err
    migrated = fleet.python("-m", "django", "migrate", "--database", "visits_00001")
    assert migrated.code == 0, migrated.err
    fleet.shards("check", "--group", "visits")


def test_an_id_function_of_another_shard_is_named_and_replaced_by_the_remedy(
    postgresql_fleet: PostgreSQLFleet,
) -> None:
    """As in a schema that was copied by hand from shard 0."""
    fleet = postgresql_fleet
    ((function,),) = fleet.sql("visits", 0, _ID_FUNCTION)
    own, other = fleet.schema("visits", 1), fleet.schema("visits", 0)
    fleet.sql("visits", 1, function.replace(other, own))
    failed = fleet.shards("check", "--group", "visits", code=1)
    assert "on 'visits_00001' makes ids of shard 0" in failed.err
    assert (
        "'manage.py migrate --database visits_00001' gives the function the number 1" in failed.err
    )
    assert [entry["shard"] for entry in fleet.json("check", code=1)["foreign_ids"]] == [
        "visits_00001"
    ]
    migrated = fleet.python("-m", "django", "migrate", "--database", "visits_00001")
    assert migrated.code == 0, migrated.err
    fleet.shards("check", "--group", "visits")


@pytest.mark.parametrize("number", [0, 2])
def test_a_counter_of_another_shard_is_named(healthy: Fleet, number: int) -> None:
    """As in a table that was copied by hand from a shard with a lower or a higher number."""
    if healthy.vendor == "sqlite":
        pytest.skip("the schema of a file has no counters")
    set_counter = "ALTER TABLE photos_app_board AUTO_INCREMENT = {}"
    if healthy.vendor == "postgresql":
        set_counter = "SELECT setval(pg_get_serial_sequence('photos_app_board', 'id'), {} - 1)"
    first, following = pin(1, 1 << 36 | 1), pin(number, 1 << 36 | 5)
    healthy.sql("pins", 1, set_counter.format(following))
    failed = healthy.shards("check", "--group", "pins", code=1)
    assert f"The next id of 'photos_app_board' on 'pins_00001' is {following}" in failed.err
    remedy = "'manage.py migrate --database pins_00001' sets the counter"
    assert (remedy in failed.err) == (number < 1)
    assert (f"or to {first} if there is none" in failed.err) == (number > 1)
    if number < 1:
        migrated = healthy.python("-m", "django", "migrate", "--database", "pins_00001")
        assert migrated.code == 0, migrated.err
    else:
        healthy.sql("pins", 1, set_counter.format(first))
    healthy.shards("check", "--group", "pins")


def test_a_table_that_is_gone_is_drift_and_no_end(healthy: Fleet) -> None:
    if healthy.vendor == "postgresql":
        take = "ALTER TABLE photos_app_event SET SCHEMA public"
        give = f"ALTER TABLE public.photos_app_event SET SCHEMA {healthy.schema('events', 0)}"
    else:
        take = "DROP TABLE photos_app_event"
        show = (
            "SELECT '', sql FROM sqlite_master WHERE name = 'photos_app_event'"
            if healthy.vendor == "sqlite"
            else "SHOW CREATE TABLE photos_app_event"
        )
        ((_, give),) = healthy.sql("events", 0, show)
    healthy.sql("events", 0, take)
    healthy.sql("events", 1, "INSERT INTO photos_app_event (account, number) VALUES ('1.2.3.4', 1)")
    failed = healthy.shards("check", "--all", code=1)
    assert "photos_app_event" in failed.err
    assert "'events_00000' cannot be looked at to the end" in failed.err
    assert "1 rows looked at" in failed.out
    healthy.sql("events", 0, give)
    healthy.sql("events", 1, "DELETE FROM photos_app_event")


def test_misplaced_rows_of_each_strategy(healthy: Fleet) -> None:
    healthy.place(7, 3)
    photo = "INSERT INTO photos_app_photo (photo_id, user_id, title) VALUES ({}, {}, 'x')"
    healthy.sql("photos", 3, photo.format(1, 7), photo.format(2, 7))
    healthy.sql("photos", 5, photo.format(3, 7), photo.format(4, 7))
    healthy.sql("photos", 0, photo.format(5, 8))  # placed nowhere
    event = "INSERT INTO photos_app_event (account, number) VALUES ('{}', 1)"
    # The md5 sums of "a" and of "1.2.3.4" are odd; see routing/modulo.py.
    healthy.sql("events", 0, event.format("a"), event.format("1.2.3.4"))
    reading = "INSERT INTO photos_app_reading (sensor, value) VALUES ({}, 1)"
    healthy.sql("archive", 0, reading.format(5), reading.format(1005), reading.format(999_999))
    note = "INSERT INTO photos_app_pin (id, note) VALUES ({}, 'x')"
    healthy.sql("pins", 1, note.format(pin(1)), note.format(pin(3)), note.format(pin(9)))
    for how in (["--all"], ["--sample", "50"]):
        report = healthy.json("check", *how, code=1)
        found = {(one["shard"], one["model"]): one for one in report["misplaced"]}
        assert {where: (one["keys"], one["rows"]) for where, one in found.items()} == {
            ("photos_00005", "photos_app.Photo"): (1, 2),
            ("photos_00000", "photos_app.Photo"): (1, 1),
            ("events_00000", "photos_app.Event"): (2, 2),
            ("archive_00000", "photos_app.Reading"): (2, 2),
            ("pins_00001", "photos_app.Pin"): (2, 2),
        }
        assert report["rows_looked_at"] == 13
        (moved,) = found["photos_00005", "photos_app.Photo"]["examples"]
        assert moved == {
            "key": 7, "home": "photos_00003", "why": "the directory places 7 on shard 3"
        }  # fmt: skip
        homes = {
            one["key"]: one["home"] for one in found["pins_00001", "photos_app.Pin"]["examples"]
        }
        assert homes == {pin(3): "pins_00003", pin(9): None}
        homes = {
            one["key"]: one["home"]
            for one in found["archive_00000", "photos_app.Reading"]["examples"]
        }
        assert homes == {1005: "archive_00001", 999_999: None}
    failed = healthy.shards("check", "--all", "--group", "photos", code=1)
    assert "2 rows of photos_app.Photo on 'photos_00005'" in failed.err
    assert "user_id=7 belongs on 'photos_00003': the directory places 7 on shard 3" in failed.err
    assert "user_id=8 has no shard" in failed.err
    assert healthy.json("check", "--sample", "0")["misplaced"] == []
    for group, number, table in (
        ("photos", 3, "photo"), ("photos", 5, "photo"), ("photos", 0, "photo"),
        ("events", 0, "event"), ("archive", 0, "reading"), ("pins", 1, "pin"),
    ):  # fmt: skip
        healthy.sql(group, number, f"DELETE FROM photos_app_{table}")
    healthy.forget(7)


def test_rows_of_colocated_models_are_held_to_their_shard_key(healthy: Fleet) -> None:
    healthy.sql("pins", 2, f"INSERT INTO photos_app_board (id, name) VALUES ({pin(2)}, 'x')")
    # On the shard of its board. The id of the second says shard 0, its board says 3.
    healthy.sql("pins", 2,
        f"INSERT INTO photos_app_save (id, board_id, note) VALUES ({pin(2)}, {pin(2)}, 'x')",
    )  # fmt: skip
    off = {
        "sqlite": "PRAGMA foreign_keys = 0",
        "mysql": "SET foreign_key_checks = 0",
        "postgresql": "SET session_replication_role = replica",
    }[healthy.vendor]
    healthy.sql("pins", 2, off,
        f"INSERT INTO photos_app_save (id, board_id, note) VALUES ({pin(2, 2)}, {pin(3)}, 'x')",
    )  # fmt: skip
    (only,) = healthy.json("check", code=1)["misplaced"]
    assert (only["model"], only["field"], only["rows"]) == ("photos_app.Save", "board", 1)
    assert only["examples"][0]["home"] == "pins_00003"
    healthy.sql("pins", 2, "DELETE FROM photos_app_save", "DELETE FROM photos_app_board")


REMEDY = """
import django
django.setup()
from tests.photos.models import Photo

strays = Photo.objects.using("photos_00005").filter(user_id=7)
for photo in strays:
    photo.save(using="photos_00003", force_insert=True)
strays.delete()
assert [photo.title for photo in Photo.objects.filter(user_id=7)] == ["stray"]
"""


def test_misplaced_rows_are_moved_by_the_remedy_of_the_manual(healthy: Fleet) -> None:
    healthy.place(7, 3)
    healthy.sql("photos", 5,
        "INSERT INTO photos_app_photo (photo_id, user_id, title) VALUES (1, 7, 'stray')",
    )  # fmt: skip
    healthy.shards("check", code=1)
    moved = healthy.python("-c", REMEDY)
    assert moved.code == 0, moved.err
    healthy.shards("check", "--all")
    healthy.sql("photos", 3, "DELETE FROM photos_app_photo")
    healthy.forget(7)


def test_a_directory_that_is_away_is_told(sqlite_fleet: Fleet) -> None:
    sqlite_fleet.sql("photos", 5,
        "INSERT INTO photos_app_photo (photo_id, user_id, title) VALUES (1, 7, 'x')",
    )  # fmt: skip
    (sqlite_fleet.folder / "directory.sqlite3").unlink()
    failed = sqlite_fleet.shards("check", code=1)
    assert "'photos' cannot be looked at to the end: its keys cannot be looked up" in failed.err
    assert "run 'manage.py migrate --database directory')." in failed.err


def test_a_damaged_file_is_one_shard_that_cannot_be_read(sqlite_fleet: Fleet) -> None:
    sqlite_fleet.path("photos", 2).write_bytes(b"this is no database" * 1000)
    failed = sqlite_fleet.shards("check", code=1)
    assert "Shard 'photos_00002' on 'one' cannot be read (file is not a database)" in failed.err
    assert "1 problems" not in failed.err
    assert sqlite_fleet.shards("status").row("one", "photos")[-1] == "WRONG"
    assert sqlite_fleet.shards("status").row("two", "photos")[-1] == "ok"


def test_a_sample_comes_from_anywhere(healthy: Fleet) -> None:
    """Half of the rows are misplaced, at the end of the table: a sample that always began at the
    first row would never find them.
    """
    rows = (f"({n}, {1000 if n > 100 else 1}, 1)" for n in range(1, 201))
    healthy.sql("archive", 0,
        f"INSERT INTO photos_app_reading (id, sensor, value) VALUES {', '.join(rows)}",
    )  # fmt: skip
    assert healthy.json("check", "--sample", "200", code=1)["misplaced"][0]["rows"] == 100
    assert healthy.json("check", "--all", code=1)["misplaced"][0]["rows"] == 100
    # One run misses them with a probability of one half.
    for _ in range(40):
        run = healthy.python(
            "-m", "django", "shards", "check", "--sample", "1", "--group", "archive"
        )
        if run.code:
            break
    assert "photos_app.Reading" in run.err
    healthy.sql("archive", 0, "DELETE FROM photos_app_reading")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["check", "--sample", "-1"], 2, "'-1' is no number of rows"),
        (["check", "--sample", "5", "--all"], 2, "not allowed with"),
        (["status", "--timeout", "0"], 2, "no positive number"),
        (["status", "--node", "three"], 1, "no node 'three'"),
        (["status", "--shards", "1"], 1, "needs --group"),
        ([], 2, "required: ACTION"),
    ],
)
def test_what_is_no_option(sqlite_fleet: Fleet, arguments: list[str], code: int, said: str) -> None:
    assert said in sqlite_fleet.shards(*arguments, code=code).err


def test_a_node_without_shards_answers(sqlite_fleet: Fleet) -> None:
    nodes = {
        name: {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": str(sqlite_fleet.folder / name)}
        for name in ("one", "two", "three")
    }
    run = sqlite_fleet.shards("status", FLEET_NODES=json.dumps(nodes))
    assert run.row("three") == ["three", "answers"]


# ##### Nodes that do not answer #####


def test_a_node_that_is_down_does_not_hide_the_other(
    mysql_fleet: MariaDBFleet, own_mariadb: MariaDBServer
) -> None:
    own_mariadb.stop()
    try:
        run = mysql_fleet.shards("status")
        assert run.row("two", "photos")[-3:] == ["DOES", "NOT", "ANSWER"]
        assert run.row("one", "photos")[-1] == "ok"
        failed = mysql_fleet.shards("check", code=1)
        assert "Node 'two' does not answer" in failed.err
        assert "4 of 'photos'" in failed.err
        assert mysql_fleet.nodes["two"].password not in failed.err + failed.out
        node = mysql_fleet.json("status")["nodes"][1]
        assert node["groups"] == []
        assert node["expected"] == {g: count // 2 for g, count in GROUPS.items()}
    finally:
        own_mariadb.start()
    mysql_fleet.shards("check")


def test_a_node_that_is_silent_is_not_waited_for(mysql_fleet: MariaDBFleet) -> None:
    nodes = json.loads(mysql_fleet.environment["FLEET_NODES"])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nodes["two"]["PORT"] = silent.getsockname()[1]
        began = time.monotonic()
        run = mysql_fleet.shards("status", "--timeout", "1", FLEET_NODES=json.dumps(nodes))
        took = time.monotonic() - began
    assert "no answer within 1 seconds" in run.out
    assert run.row("one", "photos")[-1] == "ok"
    assert took < 10  # the driver itself would wait for ten seconds


# ##### Costs #####


def test_packets_of_status(mysql_fleet: MariaDBFleet) -> None:
    """A node is queried as often for all its shards as for one."""
    packets_by_count = {}
    for numbers in ("4-7", "4"):
        with mysql_fleet.packets("two") as packets:
            mysql_fleet.shards("status", "--group", "photos", "--shards", numbers)
        packets_by_count[numbers] = len(packets)
    assert packets_by_count["4-7"] == packets_by_count["4"] <= 11
    with mysql_fleet.packets("two") as packets:
        mysql_fleet.shards("status", "--group", "photos", "--shards", "4-7", "--no-sizes")
    assert len(packets) == packets_by_count["4"] - 1


def test_packets_of_check(mysql_fleet: MariaDBFleet) -> None:
    """Two more per shard for the schema, and one per model and relation for the rows of all shards."""
    packets_by_shards: dict[tuple[str, ...], int] = {}
    for options in (("4", "0"), ("4-7", "0"), ("4", "10"), ("4-7", "10")):
        numbers, sample = options
        with mysql_fleet.packets("two") as packets:
            mysql_fleet.shards(
                "check", "--group", "photos", "--shards", numbers, "--sample", sample
            )
        packets_by_shards[options] = len(packets)
    models, relations = 5, 5
    assert packets_by_shards["4-7", "0"] - packets_by_shards["4", "0"] == 2 * 3
    assert packets_by_shards["4", "10"] - packets_by_shards["4", "0"] == models + relations
    assert packets_by_shards["4-7", "10"] - packets_by_shards["4-7", "0"] == models + relations
    with mysql_fleet.packets("two") as packets:
        mysql_fleet.shards("check", "--group", "photos", "--shards", "4-7", "--all")
    assert len(packets) - packets_by_shards["4-7", "0"] == (models + relations) * 4


def test_look_ups_in_the_directory_come_in_batches(sqlite_fleet: Fleet) -> None:
    """1200 keys take three queries, and each key that is reported as an example takes one more."""
    rows = ", ".join(f"({n}, {n}, 'x')" for n in range(1200))
    sqlite_fleet.sql("photos", 5,
        f"INSERT INTO photos_app_photo (photo_id, user_id, title) VALUES {rows}",
    )  # fmt: skip
    counted = check_and_count(sqlite_fleet, 5, "report.rows", "sharded_orm_directory")
    assert counted.out.split() == ["1200", "6"], counted.err


def test_thousands_of_files_in_bounded_memory(tmp_path: Path) -> None:
    """4096 shards that were created and not migrated."""
    changes = {
        "STRATEGY": "modulo",
        "RANGES": [{"range": [0, 4095], "primary": "one"}],
    }
    fleet = Fleet(tmp_path, {"FLEET_CHANGES": json.dumps(changes)})
    fleet.shards("create", "--group", "photos")
    status = fleet.json("status", "--group", "photos")
    (node,) = status["nodes"]
    assert len(node["groups"][0]["behind"]) == 4096
