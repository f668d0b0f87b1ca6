"""Schema snapshots of the backends, and schemas built from them."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connections

from sharded_orm.backends.snapshot import applied_digest
from tests.integration.migrate.engine.fleets import Fleet

pytestmark = pytest.mark.every_backend

TABLES = [
    "CREATE TABLE one (id integer PRIMARY KEY, word varchar(20) NOT NULL)",
    "CREATE TABLE two (id integer PRIMARY KEY, one_id integer, CONSTRAINT two_one"
    " FOREIGN KEY (one_id) REFERENCES one (id))",
    "CREATE INDEX by_word ON one (word)",
    "CREATE VIEW zwei AS SELECT id FROM two",
    "CREATE VIEW eins AS SELECT id FROM zwei",
]
TRIGGER = {
    "mysql": "CREATE TRIGGER upper BEFORE INSERT ON one FOR EACH ROW SET NEW.word = UPPER(NEW.word)",
    "sqlite": "CREATE TRIGGER upper AFTER INSERT ON one BEGIN"
    " UPDATE one SET word = UPPER(NEW.word) WHERE id = NEW.id; END",
    "postgresql": "CREATE FUNCTION upper_word() RETURNS trigger LANGUAGE plpgsql AS"
    " $$ BEGIN NEW.word := UPPER(NEW.word); RETURN NEW; END $$;"
    " CREATE TRIGGER upper BEFORE INSERT ON one FOR EACH ROW EXECUTE FUNCTION upper_word()",
}


def test_a_schema_is_built_from_what_another_one_told(fleet: Fleet) -> None:
    fleet.create(0, 4)
    for statement in [*TABLES, TRIGGER[fleet.connection(0).vendor]]:
        fleet.execute(0, statement)
    snapshot = fleet.schema(0)
    assert fleet.schema(4).is_empty
    for _ in range(2):
        fleet.connection(4).build_schema(snapshot)
        assert fleet.schema(4).differences(snapshot) == []
    fleet.execute(4, "INSERT INTO one (id, word) VALUES (1, 'x')")
    assert fleet.execute(4, "SELECT word FROM one") == [("X",)]


def test_what_was_begun_is_finished(fleet: Fleet) -> None:
    fleet.create(0, 1)
    for statement in TABLES:
        fleet.execute(0, statement)
    fleet.execute(1, TABLES[0])
    fleet.execute(1, "INSERT INTO one (id, word) VALUES (1, 'x')")
    if fleet.connection(0).vendor == "mysql":
        fleet.execute(1, TABLES[2])  # part of the definition of its table
    fleet.connection(1).build_schema(fleet.schema(0))
    fleet.assert_same_schema(1, 0)
    assert fleet.execute(1, "SELECT word FROM one") == [("x",)]


def test_rows_and_their_next_number_are_no_part_of_it(fleet: Fleet) -> None:
    fleet.create(0, 1)
    for number in (0, 1):
        fleet.migrate_with_django(number, "fleet", "0001")
    fleet.execute(0, "INSERT INTO fleet_album (id, user_id, name) VALUES (77, 1, 'x')")
    fleet.assert_same_schema(0, 1)


def test_digests_of_what_is_applied(fleet: Fleet) -> None:
    fleet.create(0, 1, 2)
    for number in (0, 1):
        fleet.migrate_with_django(number, "fleet", "0002")
    fleet.migrate_with_django(1, "fleet", "0001")
    shards = [fleet.shard(number) for number in (0, 1, 2, 3)]
    found = fleet.connection(0).applied_digests(shards)
    assert found == {
        "fleet_00000": applied_digest(fleet.applied(0)),
        "fleet_00001": applied_digest(fleet.applied(1)),
        "fleet_00002": "",
        "fleet_00003": None,
    }
    present = fleet.connection(0).schemas_present()
    assert [shard.schema in present for shard in shards] == [True, True, True, False]


@pytest.mark.mysql_settings
def test_a_snapshot_takes_two_packets_and_a_glance_one(packets: list[str], fleet: Fleet) -> None:
    fleet.create(1)
    fleet.migrate_with_django(1)
    connection = fleet.connection(1)
    # Packets are counted on sessions that are opened from now on.
    connection.node_pool.dispose()
    connection.schema_snapshot()
    packets.clear()
    known = connection.schema_snapshot()
    assert (len(known.definitions), len(packets)) == (7, 2)
    assert connection.schema_glance(known, ["fleet_photo"]) == known
    assert len(packets) == 3


def test_what_a_glance_sees(fleet: Fleet) -> None:
    """New and missing tables, and changes of the tables that were asked for."""
    fleet.create(1)
    fleet.migrate_with_django(1)
    connection = connections[fleet.shard(1).alias]
    known = connection.schema_snapshot()
    fleet.execute(1, "CREATE TABLE guest (id integer)")
    guest = connection.schema_glance(known, ["fleet_photo"])
    assert guest != known
    assert "guest" in guest.definitions
    fleet.execute(1, "DROP TABLE guest")
    fleet.execute(1, "CREATE VIEW seen AS SELECT 1 AS one")
    assert "seen" in connection.schema_glance(known, []).definitions
    known = connection.schema_snapshot()
    fleet.execute(1, "ALTER TABLE fleet_photo ADD COLUMN extra integer")
    changed = connection.schema_glance(known, ["fleet_photo"])
    assert "extra" in changed.definitions["fleet_photo"]
    assert changed.changed_tables(known) == ["fleet_photo"]
    fleet.execute(1, "DROP TABLE fleet_remark")
    assert "fleet_remark" not in connection.schema_glance(known, []).definitions


def test_a_schema_that_does_not_exist(fleet: Fleet) -> None:
    with pytest.raises(OperationalError):
        fleet.schema(3)
