"""``migrate_shards`` as operators run it: a process of its own, on real databases."""

from __future__ import annotations

import contextlib
import os
import pty
import termios
from pathlib import Path

import pytest

from tests.integration.migrate.fleet_project import (
    ADD_NOTE,
    MAY_FAIL,
    Fleet,
    fleet_on,
)
from tests.patience import PATIENCE

#: For what a run decides, records or tells when the shards have answered. What it sends to shards is tested on
#: each backend by the other tests here.
like_sqlite = pytest.mark.long_on("mariadb", "postgresql")

FIRST = "id user_id title"
NOTED = "id user_id title note"
PEOPLE = """
from django.db import models

class Person(models.Model):
    name = models.CharField(max_length=50)
"""
FIRST_OF_PEOPLE = """
from django.db import migrations, models

class Migration(migrations.Migration):
    operations = [migrations.CreateModel("Person", [
        ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
    ])]
"""
MIGRATE = """
from django.db.migrations.autodetector import MigrationAutodetector
from sharded_orm.management.commands import migrate

class NoChanges(MigrationAutodetector):
    def changes(self, *args, **kwargs):
        return {}

class Command(migrate.Command):
    autodetector = NoChanges
"""


def shards(*numbers: int) -> list[str]:
    return [f"shop_{number:05d}" for number in numbers]


# ##### The global database #####


def test_a_global_database_that_cannot_be_reached_is_named(fleet: Fleet, backend: str) -> None:
    change = {"HOST": "127.0.0.1", "PORT": "1"}
    place = "server '127.0.0.1:1'"
    if backend == "sqlite":
        change, place = {"NAME": "/nowhere/default.sqlite3"}, "file '/nowhere/default.sqlite3'"
    settings = (fleet.folder / "settings.py").read_text()
    fleet.write("settings.py", f'{settings}\nDATABASES["default"].update({change!r})\n')
    for arguments in ((), ("--status",), ("--settle", "shop_00001=done")):
        error = fleet.manage("migrate_shards", *arguments, status=1).err
        assert f"the global database ('default', {place})" in error
        assert "and run the command again" in error


# ##### Selections of shards #####


def test_shards_are_made_when_asked(fleet: Fleet) -> None:
    done = fleet.manage("migrate_shards", status=1)
    assert "shop: shards that do not exist: 0-7 (8)." in done.err
    assert "--create" in done.err
    assert fleet.columns() == {}

    done = fleet.manage("migrate_shards", "--create", "--shards", "0-2,6")
    assert done.out == "4 shards are migrated.\n"
    assert fleet.columns() == dict.fromkeys(shards(0, 1, 2, 6), FIRST)

    # Existing shards are migrated although others are missing.
    fleet.migration("0002_note", ADD_NOTE)
    done = fleet.manage("migrate_shards", "--node", "one", status=1)
    assert "shop: shards that do not exist: 3 (1)." in done.err
    assert "Not migrated: 1 of 4 shards." in done.err
    assert fleet.columns() == {**dict.fromkeys(shards(0, 1, 2), NOTED), "shop_00006": FIRST}

    assert fleet.manage("migrate_shards", "--create").out == (
        "8 shards are migrated, 3 of them before.\n"
    )
    assert fleet.columns() == dict.fromkeys(shards(*range(8)), NOTED)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--group", "shops"], "There is no group 'shops'; choose from ['shop']"),
        (["--shards", "5-9"], "Group 'shop' has no shard 9: its shards are 0 to 7"),
        (["--node", "three"], "There is no node 'three'; choose from ['one', 'two']"),
        (["--node", "one", "--shards", "7"], "No shard is selected"),
        (["--settle", "shop_00001=well"], "=done or photos_00042=undone; not 'shop_00001=well'"),
        (["--settle", "shop_00001=done"], "has no operation that is unclear"),
        (["--settle", "shops_00001=done"], "There is no shard 'shops_00001'"),
        (["--canary", "-1"], "canary must be at least 0, not -1"),
        (["--parallel", "0"], "parallel must be at least 1, not 0"),
        (["--database", "shop_00001"], "--group, --shards and --node"),
        (["--prune"], "--prune makes no sense here"),
        (["--run-syncdb"], "--run-syncdb makes no sense here"),
        (["nothing"], "nothing"),
        (["shop", "0009"], "0009"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_refused(arguments: list[str], message: str, idle: Fleet) -> None:
    done = idle.manage("migrate_shards", *arguments, status=1)
    assert message in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


@pytest.fixture(scope="module")
def idle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> object:
    """A project that no test changes."""
    with fleet_on("sqlite", request, tmp_path_factory.mktemp("idle"), shop=8) as made:
        made.manage("migrate_shards", "--create")
        yield made


@pytest.mark.parametrize("numbers", ["5-3", "x", "1,,2", "-1"])
def test_numbers_that_are_none_are_wrong_usage(numbers: str, idle: Fleet) -> None:
    done = idle.manage("migrate_shards", f"--shards={numbers}", status=2)
    assert "is not a number or a range such as 0-511" in done.err


def test_without_a_journal_it_says_what_to_do(tmp_path: Path) -> None:
    with fleet_on("sqlite", None, tmp_path, shop=2) as fleet:
        fleet.manage("migrate", "sharded_orm", "0001")
        done = fleet.manage("migrate_shards", "--create", status=1)
        assert "manage.py migrate sharded_orm" in done.err


# ##### Plans #####


@like_sqlite
def test_a_check_changes_nothing_and_tells_by_its_status(migrated: Fleet) -> None:
    assert migrated.manage("migrate_shards", "--check").err == ""
    migrated.migration("0002_note", ADD_NOTE)
    migrated.manage("migrate_shards", "--shards", "0-2")
    done = migrated.manage("migrate_shards", "--check", status=1)
    assert "Not migrated: 5 of 8 shards." in done.err
    assert migrated.columns()["shop_00003"] == FIRST


@like_sqlite
def test_the_plan_is_told_once_for_shards_that_are_alike(migrated: Fleet) -> None:
    migrated.migration("0002_note", ADD_NOTE)
    migrated.manage("migrate_shards", "--shards", "0-2")
    migrated.migration("0003_may_fail", MAY_FAIL)
    plan = migrated.manage("migrate_shards", "--plan").out
    assert "shop: 8 shards, 0 of them current" in plan
    assert "Shards: 5\n    shop.0002_note\n    shop.0003_may_fail\n" in plan
    assert "Shards: 3\n    shop.0003_may_fail\n" in plan
    plan = migrated.manage("migrate_shards", "--plan", "--json").json["groups"]["shop"]["plans"]
    assert plan == [
        {"shards": 5, "migrations": ["shop.0002_note", "shop.0003_may_fail"]},
        {"shards": 3, "migrations": ["shop.0003_may_fail"]},
    ]
    plan = migrated.manage("migrate_shards", "shop", "zero", "--plan").out
    assert "    shop.0001_first (backwards)\n" in plan
    assert migrated.columns()["shop_00003"] == FIRST


def test_backwards_and_forwards_to_a_named_migration(migrated: Fleet) -> None:
    migrated.migration("0002_note", ADD_NOTE)
    migrated.manage("migrate_shards", "shop", "0002")
    assert migrated.columns() == dict.fromkeys(shards(*range(8)), NOTED)
    migrated.manage("migrate_shards", "shop", "0001", "--shards", "0-3")
    assert migrated.columns() == {
        **dict.fromkeys(shards(0, 1, 2, 3), FIRST), **dict.fromkeys(shards(4, 5, 6, 7), NOTED)
    }  # fmt: skip
    migrated.manage("migrate_shards", "shop", "zero")
    assert migrated.columns() == {}


def test_faked_migrations_are_recorded_only(migrated: Fleet) -> None:
    migrated.migration("0002_note", ADD_NOTE)
    migrated.manage("migrate_shards", "--fake")
    assert migrated.columns() == dict.fromkeys(shards(*range(8)), FIRST)
    migrated.manage("migrate_shards", "--check")
    migrated.manage("migrate_shards", "shop", "zero", "--fake")
    migrated.manage("migrate_shards", "shop", "0001", "--fake-initial")
    migrated.manage("migrate_shards", "shop", "0002")
    assert migrated.columns() == dict.fromkeys(shards(*range(8)), NOTED)


@like_sqlite
def test_with_nothing_to_do_nothing_is_written(migrated: Fleet) -> None:
    count = "from sharded_orm.models import OperationRun; print(OperationRun.objects.count())"
    before = migrated.python(count)
    assert migrated.manage("migrate_shards").out == ("8 shards are migrated, 8 of them before.\n")
    assert migrated.python(count) == before


def test_changes_of_models_without_a_migration_are_told(migrated: Fleet) -> None:
    models = (migrated.folder / "shop" / "models.py").read_text()
    title = "    title = models.CharField(max_length=50)\n"
    assert title in models
    changed = models.replace(title, f"{title}    stars = models.IntegerField(default=0)\n")
    migrated.write("shop/models.py", changed)
    assert migrated.manage("migrate_shards").out == (
        "8 shards are migrated, 8 of them before.\n"
        "Models of 'shop' have changes that no migration has. Run 'manage.py makemigrations', and then"
        " 'manage.py migrate_shards' again.\n"
    )
    assert migrated.manage("migrate_shards", "--verbosity", "0").out == ""


def add_people(migrated: Fleet, place: int) -> None:
    """Install an app with a global model that lacks a migration for its column.

    :param place: the index of the app in INSTALLED_APPS.
    """
    settings = (migrated.folder / "settings.py").read_text()
    migrated.write("settings.py", f'{settings}\nINSTALLED_APPS.insert({place}, "people")\n')
    migrated.write("people/__init__.py", "")
    migrated.write("people/migrations/__init__.py", "")
    migrated.write("people/migrations/0001_first.py", FIRST_OF_PEOPLE)
    migrated.write("people/models.py", PEOPLE)


def change_orders(migrated: Fleet) -> None:
    models = (migrated.folder / "shop" / "models.py").read_text()
    migrated.write("shop/models.py", models.replace("max_length=50", "max_length=60"))


@like_sqlite
def test_changes_of_models_that_no_shard_has_are_not_told(migrated: Fleet) -> None:
    add_people(migrated, 2)
    migrated.manage("migrate_shards")
    assert migrated.manage("migrate_shards").out == "8 shards are migrated, 8 of them before.\n"
    change_orders(migrated)
    assert "\nModels of 'shop' have changes" in migrated.manage("migrate_shards").out


@like_sqlite
def test_changes_of_models_on_shards_of_other_groups_are_not_told(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with fleet_on(backend, request, tmp_path, shop=2, other=2) as fleet:
        fleet.manage("migrate_shards", "--create")
        change_orders(fleet)
        assert "changes" not in fleet.manage("migrate_shards", "--group", "other").out
        assert "Models of 'shop' have changes" in fleet.manage("migrate_shards").out


@like_sqlite
def test_the_command_migrate_of_the_project_finds_the_changes(migrated: Fleet) -> None:
    """A project gives Django another autodetector by its own command ``migrate``."""
    add_people(migrated, 0)
    for folder in ("management", "management/commands"):
        migrated.write(f"people/{folder}/__init__.py", "")
    migrated.write("people/management/commands/migrate.py", MIGRATE)
    change_orders(migrated)
    command = "from django.core.management import call_command; call_command('migrate_shards')"
    migrated.python_alone(command)
    assert migrated.python_alone(command) == "8 shards are migrated, 8 of them before.\n"


# ##### Failures #####


@pytest.mark.parametrize("backend", ["sqlite", "mariadb", "postgresql"])
def test_three_of_64_shards_fail_and_are_mended(
    backend: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The other shards are migrated; each failure is one line; the rerun migrates the three."""
    with fleet_on(backend, request, tmp_path, shop=64) as fleet:
        fleet.manage("migrate_shards", "--create")
        fleet.migration("0002_note", ADD_NOTE)
        fleet.migration("0003_may_fail", MAY_FAIL)
        bad = shards(7, 21, 60)
        fleet.failing(*bad)
        done = fleet.manage("migrate_shards", status=1)
        lines = done.err.splitlines()
        assert sorted(lines[:-1]) == [
            f"{alias}: failed at shop.0003_may_fail: ValueError: the rows of {alias} are not as"
            " they should be"
            for alias in bad
        ]
        assert "Not migrated: 3 of 64 shards." in lines[-1]
        assert done.out == ""
        assert set(fleet.columns().values()) == {NOTED}

        status = fleet.manage("migrate_shards", "--status").out
        assert [line for line in status.splitlines() if line.startswith("shop_")] == sorted(
            lines[:-1]
        )
        status = fleet.manage("migrate_shards", "--status", "--json").json["groups"]["shop"]
        assert (status["current"], status["behind"], status["left"]) == (61, 3, {"failed": 3})
        assert status["run"]["state"] == "failed"
        assert status["run"]["steps"] == {"done": 61, "failed": 3}

        fleet.failing("shop_00021")
        done = fleet.manage("migrate_shards", "--retry-failed", "--canary", "0", status=1)
        assert "Not migrated: 1 of 3 shards." in done.err
        fleet.failing()
        assert fleet.manage("migrate_shards", "--retry-failed").out == "1 shard is migrated.\n"
        assert fleet.manage("migrate_shards", "--retry-failed").out == "No shard has failed.\n"
        fleet.manage("migrate_shards", "--check")
        status = fleet.manage("migrate_shards", "--status", "--json").json["groups"]["shop"]
        assert status["left"] == {}
        assert status["failures"] == []


@like_sqlite
def test_a_failed_canary_keeps_the_others_back(migrated: Fleet) -> None:
    migrated.migration("0002_note", MAY_FAIL, ADD_NOTE)
    migrated.failing("shop_00000")
    done = migrated.manage("migrate_shards", status=1)
    assert "shop: the canary failed; shards not begun or not ended: 7." in done.err
    assert migrated.columns() == dict.fromkeys(shards(*range(8)), FIRST)
    done = migrated.manage("migrate_shards", "--canary", "0", status=1)
    assert "Not migrated: 1 of 8 shards." in done.err
    assert migrated.columns() == {
        **dict.fromkeys(shards(*range(1, 8)), NOTED), "shop_00000": FIRST
    }  # fmt: skip


@like_sqlite
def test_so_many_failures_and_no_more(migrated: Fleet) -> None:
    migrated.migration("0002_note", MAY_FAIL, ADD_NOTE)
    migrated.failing(*shards(*range(1, 8)))
    options = ["--max-failures", "1", "--parallel", "1", "--wave-size", "2", "--pause", "0.01"]
    done = migrated.manage("migrate_shards", *options, "--json", status=1)
    report = done.json["groups"]["shop"]
    assert report["stopped"] == "more than 1 shard failed"
    # The canary, and a wave of two: one per node.
    assert (report["migrated"], len(report["failures"]), report["left"]) == (1, 2, 5)
    assert migrated.manage("migrate_shards", "--status", "--json").json["groups"]["shop"][
        "left"
    ] == {"failed": 2}


def test_a_node_that_is_down_does_not_keep_the_other_back(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with fleet_on("mariadb", request, tmp_path, shop=8) as fleet:
        fleet.manage("migrate_shards", "--create")
        fleet.migration("0002_note", ADD_NOTE)
        settings = (fleet.folder / "settings.py").read_text()
        fleet.write(
            "settings.py",
            settings + '\nSHARDED_ORM["NODES"]["two"] |= {"HOST": "127.0.0.1", "PORT": 1}\n',
        )
        done = fleet.manage("migrate_shards", status=1)
        lines = done.err.splitlines()
        assert [line.partition(": ")[0] for line in lines[:-1]] == shards(4, 5, 6, 7)
        assert all("unreachable: OperationalError" in line for line in lines[:-1])
        assert "Not migrated: 4 of 8 shards." in lines[-1]
        fleet.write("settings.py", settings)
        assert fleet.manage("migrate_shards").out == ("8 shards are migrated, 4 of them before.\n")


# ##### Output #####


@like_sqlite
def test_one_json_object_and_nothing_else(fleet: Fleet) -> None:
    done = fleet.manage("migrate_shards", "--create", "--json")
    assert done.err == ""
    assert done.json["ok"] is True
    assert done.json["groups"]["shop"]["migrated"] == 8
    fleet.migration("0002_may_fail", MAY_FAIL)
    fleet.failing("shop_00006")
    done = fleet.manage("migrate_shards", "--json", status=1)
    assert done.json["ok"] is False
    (failure,) = done.json["groups"]["shop"]["failures"]
    assert failure["alias"] == "shop_00006"
    assert failure["migration"] == "shop.0002_may_fail"
    assert "are not as they should be" in failure["error"]


@like_sqlite
def test_plain_lines_when_piped(fleet: Fleet) -> None:
    done = fleet.manage("migrate_shards", "--create", "--verbosity", "2")
    assert sorted(line.partition(":")[0] for line in done.err.splitlines()) == shards(*range(8))
    assert "\r" not in done.out + done.err
    assert "\x1b" not in done.out + done.err
    fleet.migration("0002_note", ADD_NOTE)
    done = fleet.manage("migrate_shards", "--verbosity", "0")
    assert (done.out, done.err) == ("", "")


@like_sqlite
def test_a_bar_on_a_terminal(fleet: Fleet) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    process = fleet.start("migrate_shards", "--create", stderr=theirs)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # on Linux this says that the other end was closed
        while part := os.read(ours, 10_000):
            seen += part
    os.close(ours)
    out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, "8 shards are migrated.\n")
    assert b"shop: 100%" in seen
    assert b"8/8" in seen
