"""Features of Django's schema editors that the app of these tests does not use."""

from __future__ import annotations

import pytest

from tests.integration.migrate.engine.fleets import Fleet, Migrations

pytestmark = pytest.mark.every_backend

OPERATIONS = [
    """migrations.AddField("album", "twice", models.GeneratedField(
        expression=models.F("user_id") * 2, output_field=models.BigIntegerField(), db_persist=True))""",
    'migrations.AddField("album", "stars", models.IntegerField(db_default=models.Value(5)))',
    """migrations.AddField("album", "code", models.CharField(
        max_length=9, db_comment="it's; \\"x\\" `y`\\nz", default="a%s"))""",
    """migrations.AddIndex("album", models.Index(fields=["-user_id", "name"], name="by_user"))""",
    """migrations.AddConstraint("album", models.CheckConstraint(
        condition=models.Q(name__gt="") & ~models.Q(name="a'b"), name="named"))""",
    """migrations.AddConstraint("album", models.UniqueConstraint(
        fields=["user_id", "name"], name="once"))""",
    """migrations.CreateModel("Tag", [
        ("id", models.BigAutoField(primary_key=True)),
        ("user_id", models.BigIntegerField()),
        ("albums", models.ManyToManyField("fleet.album")),
    ], options={"db_table_comment": "a ; b"})""",
    'migrations.RenameModel("Tag", "Label")',
    'migrations.RenameModel("Album", "Record")',
    'migrations.RenameField("record", "stars", "points")',
    'migrations.AlterField("record", "name", models.CharField(max_length=80, null=True))',
    """migrations.CreateModel("Theirs", [("id", models.BigAutoField(primary_key=True))],
        options={"managed": False})""",
    """migrations.CreateModel("Proxy", [], options={"proxy": True}, bases=("fleet.record",))""",
    'migrations.AlterModelTable("record", "records")',
]
#: Created by hand, by vendor.
BY_HAND = {
    "mysql": [
        "CREATE TABLE parts (a int) PARTITION BY RANGE (a)"
        " (PARTITION p0 VALUES LESS THAN (10), PARTITION p1 VALUES LESS THAN MAXVALUE)",
        "CREATE TABLE log (a int) COMMENT = 'AUTO_INCREMENT=5 x'",
        "CREATE TRIGGER logged AFTER INSERT ON log FOR EACH ROW INSERT INTO parts VALUES (NEW.a)",
        "CREATE VIEW seen AS SELECT a FROM log",
        "CREATE FUNCTION five() RETURNS int DETERMINISTIC RETURN 5",
    ],
    "postgresql": [
        "CREATE TABLE parts (a int) PARTITION BY HASH (a)",
        "CREATE TABLE part PARTITION OF parts FOR VALUES WITH (MODULUS 1, REMAINDER 0)",
        "CREATE TABLE log (a int)",
        "COMMENT ON TABLE log IS 'PARTITION x'",
        "CREATE FUNCTION logs() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO parts VALUES (NEW.a); RETURN NEW; END $$",
        "CREATE TRIGGER logged AFTER INSERT ON log FOR EACH ROW EXECUTE FUNCTION logs()",
        "CREATE VIEW seen AS SELECT a FROM log",
        "CREATE FUNCTION five() RETURNS int LANGUAGE sql IMMUTABLE RETURN 5",
    ],
}


def test_there_and_back_again(fleet: Fleet, migrations: Migrations) -> None:
    migrations.add("0002_features", *OPERATIONS)
    fleet.create(0, 1, 2, 3)
    for number in (0, 1):
        fleet.migrate_with_django(number, "fleet", "0001")
        fleet.execute(number, "INSERT INTO fleet_album (user_id, name) VALUES (1, 'x'), (2, 'y')")
        for sql in BY_HAND.get(fleet.connection(number).vendor, ()):
            fleet.execute(number, sql)
    fleet.migrate_with_django(0, "fleet")
    fleet.migrate(1, target=("fleet", None))
    fleet.assert_same(1, 0)
    rows = "SELECT user_id, twice, points, code, name FROM records ORDER BY id"
    assert fleet.execute(1, rows) == fleet.execute(0, rows)
    fleet.migrate_with_django(0, "fleet", "0001")
    fleet.migrate(1, target=("fleet", "0001"))
    fleet.assert_same(1, 0)
    fleet.migrate_with_django(2, "fleet")
    fleet.migrate(3, target=("fleet", None))  # built from the template
    fleet.assert_same(3, 2)
