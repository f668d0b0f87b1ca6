"""Many shards: the queries of ``migrate_shards``, and its memory."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import MySQLdb
import pytest

from tests.integration.migrate.fleet_project import ADD_NOTE, NODES, Fleet, fleet_on
from tests.services.mariadb import Address

MANY = 4096
KB, MB = 1024, 1024 * 1024


def test_current_shards_are_neither_connected_to_nor_asked_singly(
    request: pytest.FixtureRequest, tmp_path: Path, mariadb_nodes: list[Address]
) -> None:
    def served() -> Counter[str]:
        found = Counter[str]()
        for address in mariadb_nodes:
            with MySQLdb.connect(**address.mysqldb()) as connection:
                cursor = connection.cursor()
                # Statements. "Questions" also counts the end of a session, at some later moment.
                cursor.execute(
                    "SHOW GLOBAL STATUS WHERE variable_name LIKE 'Com\\_%'"
                    " OR variable_name = 'Connections'"
                )
                found.update({name: int(value) for name, value in cursor.fetchall()})
        return found

    with fleet_on("mariadb", request, tmp_path, shop=16) as fleet:
        fleet.manage("migrate_shards", "--create")
        costs = []
        # One of each node; all sixteen.
        for shards in ("0,8", "0-15"):
            before = served()
            done = fleet.manage("migrate_shards", "--shards", shards)
            costs.append(served() - before)
            assert "are migrated" in done.out
    assert costs[0] == costs[1]


@pytest.fixture
def many(tmp_path: Path) -> Iterator[Fleet]:
    """A group of 4096 files that are all current."""
    with fleet_on("sqlite", None, tmp_path, shop=MANY) as fleet:
        fleet.manage("migrate_shards", "--create", "--shards", "0")
        first = fleet.folder / NODES[0] / "shop_00000.sqlite3"
        (fleet.folder / NODES[1]).mkdir(exist_ok=True)
        for number in range(1, MANY):
            folder = fleet.folder / NODES[number >= MANY // 2]
            shutil.copyfile(first, folder / f"shop_{number:05d}.sqlite3")
        yield fleet


SURVEY = """
import tracemalloc
from django.core.management import call_command
from django.db import connections
call_command("migrate_shards", shards="0-63", verbosity=0)
tracemalloc.start()
call_command("migrate_shards", verbosity=0)
print(tracemalloc.get_traced_memory()[1], len(connections.all(initialized_only=True)))
"""


def test_a_survey_of_current_shards_keeps_little_of_each(many: Fleet) -> None:
    peak, connections = map(int, many.python(SURVEY).split())
    assert peak < MANY * KB
    # The global database, the group, one of each node: no connection is opened for a single shard.
    assert connections <= 4


KEPT = """
from django.core.management import call_command
from django.db import connections
from django.db.models.signals import post_migrate
kept = []
def look(**kwargs):
    kept.append(len(connections["shop"].shards.wrappers))
post_migrate.connect(look)
call_command("migrate_shards", shards="0-127", verbosity=0)
print(len(kept) >= 128, max(kept))
"""


def test_a_worker_keeps_no_connection_objects_of_shards_that_are_done(many: Fleet) -> None:
    many.migration("0002_note", ADD_NOTE)
    assert many.python(KEPT) == "True 1\n"


# The first shards load everything that is loaded once. Peaks only ever grow.
MIGRATE = """
import resource
from django.core.management import call_command
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
call_command("migrate_shards", shards="0-{first}", verbosity=0)
before = peak()
call_command("migrate_shards", shards="0-{last}", verbosity=0)
print(peak() - before)
"""


@pytest.mark.long
def test_migrating_keeps_little_of_each_shard(many: Fleet) -> None:
    many.migration("0002_note", ADD_NOTE)
    first = MANY // 8
    grown = int(many.python_alone(MIGRATE.format(first=first - 1, last=MANY - 1)))
    assert grown < (MANY - first) * 2 * KB
    status = many.manage("migrate_shards", "--status", "--json").json["groups"]["shop"]
    assert (status["current"], status["left"]) == (MANY, {})
