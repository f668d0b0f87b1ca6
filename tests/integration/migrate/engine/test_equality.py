"""A shard migrated by the engine equals a shard migrated by Django's ``migrate``."""

from __future__ import annotations

import pytest

from sharded_orm.exceptions import RehearsalFailed
from sharded_orm.operations.exceptions import InvalidMigrationTarget
from tests.integration.migrate.engine.fleets import Fleet, Migrations

pytestmark = pytest.mark.every_backend

ROWS = [
    "INSERT INTO fleet_album (id, user_id, name) VALUES (1, 7, ' first '), (2, 7, 'second')",
    "INSERT INTO fleet_photo (id, user_id, title, path, stars, width)"
    " VALUES (1, 7, '', 'a.jpg', 3, 10), (2, 7, 'b', 'b.jpg', 4, 20)",
]
CONTENT = [
    "SELECT id, user_id, name FROM fleet_album ORDER BY id",
    "SELECT id, user_id, title, file, note, album_id, taken, height, mood, checked"
    " FROM fleet_photo ORDER BY id",
]


def test_a_new_shard(fleet: Fleet) -> None:
    fleet.create(0, 1, 5)
    fleet.migrate_with_django(0)
    fleet.migrate(1, 5)
    fleet.assert_same(1, 0)
    fleet.assert_same(5, 0)


@pytest.mark.parametrize("start", ["0001", "0008", "0024", "0027"])
def test_a_shard_on_its_way(fleet: Fleet, start: str) -> None:
    fleet.create(0, 1)
    for number in (0, 1):
        fleet.migrate_with_django(number, "fleet", start)
    fleet.migrate_with_django(0)
    fleet.migrate(1)
    fleet.assert_same(1, 0)


def test_rows(fleet: Fleet) -> None:
    fleet.create(0, 1)
    for number in (0, 1):
        fleet.migrate_with_django(number, "fleet", "0002")
        for statement in ROWS:
            fleet.execute(number, statement)
    fleet.migrate_with_django(0)
    fleet.migrate(1)
    for query in CONTENT:
        found = fleet.execute(1, query)
        assert found == fleet.execute(0, query)
        assert found


@pytest.mark.parametrize("target", ["0024", "0019", "0008", "zero"])
def test_backwards(fleet: Fleet, target: str) -> None:
    fleet.create(0, 1)
    for number in (0, 1):
        fleet.migrate_with_django(number)
    fleet.migrate_with_django(0, "fleet", target)
    fleet.migrate(1, target=("fleet", target))
    fleet.assert_same(1, 0)


def test_there_and_back_again(fleet: Fleet) -> None:
    """A shard that was built from a template goes on like one that was not."""
    fleet.create(0, 1)
    fleet.migrate_with_django(0)
    fleet.migrate(1)
    for target in ("0006", None):
        fleet.migrate_with_django(0, *(["fleet", target] if target else []))
        fleet.migrate(1, target=("fleet" if target else None, target))
        fleet.assert_same(1, 0)


def test_one_app_or_one_migration(fleet: Fleet) -> None:
    fleet.create(0, 1)
    fleet.migrate_with_django(0, "fleet", "0013")
    fleet.migrate(1, target=("fleet", "0013"))
    fleet.assert_same(1, 0)
    fleet.migrate_with_django(0, "contenttypes")
    fleet.migrate(1, target=("contenttypes", None))
    fleet.assert_same(1, 0)


@pytest.mark.mysql_settings
def test_a_shard_that_has_drifted_gets_sql_of_its_own(fleet: Fleet) -> None:
    """Schema editors look at the existing schema; the siblings' SQL would fail on this shard."""
    fleet.create(0, 1, 2)
    for number in (0, 1, 2):
        fleet.migrate_with_django(number, "fleet", "0013")
    ((name,),) = fleet.execute(
        0,
        "SELECT constraint_name FROM information_schema.table_constraints WHERE table_schema ="
        " DATABASE() AND table_name = 'fleet_remark' AND constraint_type = 'UNIQUE'",
    )
    fleet.execute(1, f"ALTER TABLE fleet_remark RENAME INDEX {name} TO by_hand")
    fleet.migrate_with_django(0, "fleet", "0012")
    fleet.migrate(2, 1, target=("fleet", "0012"))
    fleet.assert_same(1, 0)
    fleet.assert_same(2, 0)


def test_faked(fleet: Fleet) -> None:
    fleet.create(0, 1)
    for number in (0, 1):
        fleet.migrate_with_django(number, "fleet", "0023")
    fleet.migrate_with_django(0, fake=True)
    fleet.migrate(1, fake=True)
    fleet.assert_same(1, 0)
    fleet.migrate_with_django(0, "fleet", "0023", fake=True)
    fleet.migrate(1, target=("fleet", "0023"), fake=True)
    fleet.assert_same(1, 0)


def test_initial_migrations_whose_tables_exist_are_faked(fleet: Fleet) -> None:
    fleet.create(0, 1, 2)
    for number in (0, 1, 2):
        fleet.migrate_with_django(number, "fleet", "0001")
        fleet.execute(number, "DROP TABLE django_migrations")
    fleet.migrate_with_django(0, fake_initial=True)
    fleet.migrate(1, fake_initial=True)
    fleet.assert_same(1, 0)
    before = fleet.schema(2).definitions["fleet_photo"]
    with pytest.raises(RehearsalFailed, match=r"fleet\.0001_initial \(Create model Album\) failed"):
        fleet.migrate(2)
    assert fleet.schema(2).definitions["fleet_photo"] == before


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (("nowhere", None), "No installed app with label 'nowhere'"),
        (("samples", None), "'samples' does not have migrations"),
        (("fleet", "0099"), "no migration that begins with '0099'"),
        (("fleet", "00"), "More than one migration of app 'fleet' begins with '00'"),
    ],
)
def test_a_target_that_does_not_exist(
    fleet: Fleet, target: tuple[str, str | None], message: str
) -> None:
    fleet.create(1)
    with pytest.raises(InvalidMigrationTarget, match=message):
        fleet.migrate(1, target=target)
    assert fleet.schema(1).is_empty


SQUASHED = """
from django.db import migrations, models

class Migration(migrations.Migration):
    replaces = [("fleet", "0001_first"), ("fleet", "0002_place")]
    operations = [
        migrations.CreateModel("Album", [
            ("id", models.BigAutoField(primary_key=True)),
            ("user_id", models.BigIntegerField()),
            ("name", models.CharField(max_length=60)),
            ("place", models.CharField(max_length=9, null=True)),
        ]),
    ]
"""
PLACE = 'migrations.AddField("album", "place", models.CharField(max_length=9, null=True))'


@pytest.mark.parametrize("applied", ["0001", "0002", None])
def test_squashed_migrations(fleet: Fleet, migrations: Migrations, applied: str | None) -> None:
    migrations.add("0002_place", PLACE)
    fleet.create(0, 1)
    if applied:
        for number in (0, 1):
            fleet.migrate_with_django(number, "fleet", applied)
    migrations.write("0001_squashed", SQUASHED)
    fleet.migrate_with_django(0)
    fleet.migrate(1)
    fleet.assert_same(1, 0)
    assert ("fleet", "0001_squashed") in fleet.applied(1)
