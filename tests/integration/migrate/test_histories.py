"""Shards with a past: squashed migrations, half-done migrations of other tools, topologies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.migrate import kill_plan
from tests.integration.migrate.fleet_project import ADD_NOTE, Fleet, fleet_on

_LOOK = """
import json
from django.db import connections
from django.db.migrations.recorder import MigrationRecorder
from sharded_orm import runtime
found = {}
for shard in runtime.group("shop").shards():
    connection = connections[shard.alias]
    found[shard.alias] = [
        dict(connection.schema_snapshot().definitions),
        sorted(MigrationRecorder(connection).applied_migrations()),
    ]
print(json.dumps(found))
"""


def look(fleet: Fleet) -> dict[str, Any]:
    """Return definitions and applied migrations by alias."""
    found: dict[str, Any] = json.loads(fleet.python(_LOOK))
    return found


# ##### Squashed migrations #####

_SQUASHED = """
from django.db import migrations, models

class Migration(migrations.Migration):
    replaces = [("shop", "0001_first"), ("shop", "0002_note"), ("shop", "0003_mark")]
    operations = [
        migrations.CreateModel("Order", [
            ("id", models.BigAutoField(primary_key=True)),
            ("user_id", models.BigIntegerField()),
            ("title", models.CharField(max_length=50)),
            ("note", models.CharField(max_length=20, default="n")),
            ("mark", models.IntegerField(default=7)),
        ]),
    ]
"""
_MARK = 'migrations.AddField("order", "mark", models.IntegerField(default=7))'
_SIZE = 'migrations.AddField("order", "size", models.IntegerField(default=1))'


def test_squashed_migrations_end_as_where_django_migrates(fleet: Fleet) -> None:
    """Of two shards in each state, one is migrated by Django."""
    fleet.migration("0002_note", ADD_NOTE)
    fleet.migration("0003_mark", _MARK)
    fleet.manage("migrate_shards", "--create", "--shards", "0,4")
    fleet.manage("migrate_shards", "shop", "0001", "--create", "--shards", "1,5")
    fleet.manage("migrate_shards", "shop", "0002", "--create", "--shards", "2,6")
    # Shards 3 and 7 have nothing yet.
    fleet.manage("migrate_shards", "shop", "zero", "--create", "--shards", "3,7")
    fleet.write("shop/migrations/0001_squashed_0003_mark.py", _SQUASHED)
    fleet.migration("0004_size", _SIZE)
    for number in range(4, 8):
        fleet.manage("migrate", "--database", f"shop_{number:05d}", "-v0")
    fleet.manage("migrate_shards", "--shards", "0-3")
    found = look(fleet)
    for number in range(4):
        mine, django = found[f"shop_{number:05d}"], found[f"shop_{number + 4:05d}"]
        assert mine == django
    # All look alike, and the replaced ones may go.
    assert len({json.dumps(definitions) for definitions, _ in found.values()}) == 1
    for name in ("0001_first", "0002_note", "0003_mark"):
        (fleet.folder / f"shop/migrations/{name}.py").unlink()
    fleet.write(
        "shop/migrations/0001_squashed_0003_mark.py",
        "\n".join(line for line in _SQUASHED.splitlines() if "replaces" not in line),
    )
    fleet.write(
        "shop/migrations/0004_size.py",
        (fleet.folder / "shop/migrations/0004_size.py")
        .read_text()
        .replace("'0003_mark'", "'0001_squashed_0003_mark'"),
    )
    fleet.manage("migrate_shards", "--check")


# ##### Half-done migrations #####


_EXTRA = """migrations.CreateModel("Extra", [
    ("id", models.BigAutoField(primary_key=True)),
    ("user_id", models.BigIntegerField(db_index=True)),
])"""


def execute(fleet: Fleet, alias: str, statement: str) -> None:
    fleet.python(
        "from django.db import connections\n"
        f"with connections[{alias!r}].cursor() as cursor:\n"
        f"    cursor.execute({statement!r})"
    )


def test_a_shard_that_another_tool_left_half_migrated(migrated: Fleet) -> None:
    """It fails alone and unchanged, and names the obstacle; once fixed, it is migrated."""
    execute(migrated, "shop_00002", "CREATE TABLE shop_extra (id bigint, user_id bigint)")
    before = look(migrated)["shop_00002"]
    migrated.migration("0002_extra", _EXTRA)
    # Each run reports the cause and changes nothing.
    for _ in range(2):
        done = migrated.manage("migrate_shards", status=1)
        assert "shop_00002: failed" in done.err
        assert "shop.0002_extra (Create model Extra) failed on a copy of 'shop_00002'" in done.err
        assert "already exists" in done.err
        assert "Not migrated: 1 of 8 shards." in done.err
    found = look(migrated)
    assert found["shop_00002"] == before
    assert ["shop", "0002_extra"] in found["shop_00003"][1]
    execute(migrated, "shop_00002", "DROP TABLE shop_extra")
    migrated.manage("migrate_shards", "--retry-failed")
    found = look(migrated)
    assert found["shop_00002"] == found["shop_00003"]


_PERSON = """migrations.CreateModel("Person", [("id", models.BigAutoField(primary_key=True))]),
    migrations.AddField("order", "owner", models.ForeignKey("shop.Person", models.CASCADE, null=True))"""
_OWNER = """
    owner = models.ForeignKey("Person", models.DO_NOTHING, null=True, db_constraint=False, related_name="+")
"""


@pytest.mark.long_on("postgresql")
def test_an_old_foreign_key_to_a_table_that_is_global(migrated: Fleet, backend: str) -> None:
    """It was made before its table was sharded. The message says what to write into the migration."""
    models = migrated.folder / "shop/models.py"
    start, meta = models.read_text().split("\n    class ShardMeta")
    models.write_text(
        f"{start}{_OWNER}\n    class ShardMeta{meta}\nclass Person(models.Model):\n    pass\n"
    )
    migrated.migration("0002_owner", _PERSON)
    if backend != "sqlite":  # SQLite allows a key to a table that does not exist.
        done = migrated.manage("migrate_shards", status=1)
        assert "no table to which shop.Order.owner could refer" in done.err
        assert "Write db_constraint=False" in done.err
    migration = migrated.folder / "shop/migrations/0002_owner.py"
    migration.write_text(
        migration.read_text().replace("null=True", "null=True, db_constraint=False")
    )
    migrated.manage("migrate_shards")
    migrated.manage("migrate_shards", "--check")


def test_a_table_that_exists_already(migrated: Fleet) -> None:
    """Its migration was never recorded; ``--fake-initial`` notices the table."""
    execute(migrated, "shop_00002", "DROP TABLE django_migrations")
    done = migrated.manage("migrate_shards", status=1)
    assert "shop_00002: failed" in done.err
    assert "already exists" in done.err
    initial = migrated.folder / "shop/migrations/0001_first.py"
    initial.write_text(initial.read_text() + "    initial = True\n")
    migrated.manage("migrate_shards", "--fake-initial")
    found = look(migrated)
    assert found["shop_00002"] == found["shop_00003"]
    migrated.manage("migrate_shards", "--check")


# ##### Topologies #####

_MORE_NODES = """
SHARDED_ORM["NODES"]["three"] = SHARDED_ORM["NODES"]["one"] | {{"NAME": {folder!r}}}
SHARDED_ORM["GROUPS"]["shop"]["RANGES"] = [
    {{"range": (0, 99), "primary": "three"}},
    {{"range": (100, 1023), "primary": "one", "replica": "two"}},
]
"""


def test_makemigrations_sees_nothing_of_the_topology(tmp_path: Path) -> None:
    with fleet_on("sqlite", None, tmp_path, shop=2) as fleet:
        kill_plan.write(fleet)
        fleet.manage("makemigrations", "--check", "--dry-run")
        settings = (tmp_path / "settings.py").read_text()
        fleet.write("settings.py", settings + _MORE_NODES.format(folder=str(tmp_path / "three")))
        output = fleet.manage("makemigrations", "--check", "--dry-run").out
        assert "No changes detected" in output
        # It does see changes of models.
        fleet.write("shop/models.py", kill_plan.MODELS.replace("max_length=80", "max_length=90"))
        output = fleet.manage("makemigrations", "--check", "--dry-run", status=1).out
        assert "Alter field name on order" in output
