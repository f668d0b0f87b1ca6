"""``migrate_shards`` is killed at every moment, and later runs continue its work.

Whatever the moment was, in the end each shard is as after an undisturbed run, each operation
has been applied once, and nothing is left over. Unclear operations are left to the operator.
"""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.migrate import kill_plan
from tests.integration.migrate.kill_server import Moment
from tests.integration.migrate.killing import (
    Killing,
    NotAsItShouldBe,
    PostgreSQLSchemas,
    Schemas,
    killing_on,
)
from tests.patience import PATIENCE

# Shards 0 and 1 have the first migration and rows; 2 does not exist. 3, 4 and 5 are like them, on
# the other node.
ALIASES = [f"shop_{number:05d}" for number in range(6)]
# One after the other, so that the events are the same each time.
ONE = ("--shards", "0", "--parallel", "1", "-v0")
NEW = ("--shards", "2", "--parallel", "1", "-v0", "--create")
THREE = ("--shards", "0-2", "--parallel", "1", "-v0", "--create")


@dataclass
class Undisturbed:
    """The events and the result of a run that is not killed."""

    killing: Killing
    events: list[str]
    promised: dict[str, Any]


@pytest.fixture(scope="module", params=["sqlite", "mariadb", "postgresql"])
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Undisturbed]:
    with killing_on(request.param, request, tmp_path_factory.mktemp("kills")) as killing:
        started = killing.start("migrate_shards", *THREE)
        done = started.end()
        assert not done.status, done.err
        promised = killing.look()
        killing.check(promised, ALIASES[:3])
        yield Undisturbed(killing, started.events, promised)


@pytest.fixture
def killing(undisturbed: Undisturbed) -> Iterator[Killing]:
    """The fleet, restored to its state before the test."""
    killing = undisturbed.killing
    killing.store.put_back()
    killing.unclear.clear()
    yield killing
    killing.ablations = ()


@pytest.fixture
def on_mariadb(killing: Killing) -> Schemas:
    if not isinstance(killing.store, Schemas):
        pytest.skip("a test of MariaDB's statements")
    return killing.store


@pytest.fixture
def on_postgresql(killing: Killing) -> PostgreSQLSchemas:
    if not isinstance(killing.store, PostgreSQLSchemas):
        pytest.skip("a test of PostgreSQL's statements")
    return killing.store


# ##### One kill, and one run that is not killed #####


def kinds(events: list[str]) -> list[int]:
    """Return the first event of each kind: the same statement counts once for all shards."""
    found: dict[str, int] = {}
    for number, event in enumerate(events):
        found.setdefault(re.sub(r"shop_\d{5}", "shard", event), number)
    return list(found.values())


def kill_once(undisturbed: Undisturbed, event: int) -> None:
    """Kill a run before ``event``, run it again, and check the result."""
    killing = undisturbed.killing
    killing.store.put_back()
    killing.run_until_killed(THREE, Moment(event))
    killing.run_to_end(THREE)
    killing.check(undisturbed.promised, ALIASES[:3])


def test_a_kill_before_a_statement(undisturbed: Undisturbed, killing: Killing) -> None:
    """A selection of events; ``--long`` takes all, on each shard."""
    for event in kinds(undisturbed.events)[::16]:
        kill_once(undisturbed, event)


@pytest.mark.long
@pytest.mark.parametrize("part", range(20))
def test_a_kill_at_any_moment(part: int, undisturbed: Undisturbed, killing: Killing) -> None:
    for event in range(part, len(undisturbed.events), 20):
        kill_once(undisturbed, event)
    assert set(killing.unclear) <= set(kill_plan.UNCLEAR)


def test_killed_when_all_is_done_but_the_end(undisturbed: Undisturbed, killing: Killing) -> None:
    """A later run finds no shard that is behind, and finishes the interrupted one."""
    killing.run_until_killed(ONE, Moment(0, parts=["default UPDATE", "finished_at"]))
    status = killing.run("migrate_shards", "--status").out
    assert "broken off; 1 done" in status
    assert killing.migrate(ONE).status == 0
    killing.check(undisturbed.promised, ALIASES[:1])
    assert "broken off" not in killing.run("migrate_shards", "--status").out


# ##### Several kills, one after another #####


@pytest.mark.parametrize(
    "selected",
    [
        pytest.param(ONE, id="behind"),
        pytest.param(NEW, id="new", marks=pytest.mark.long_on("sqlite")),
    ],
)
@pytest.mark.parametrize(
    "least",
    [
        pytest.param(12, marks=pytest.mark.long_on("sqlite")),
        # Where a transaction holds each migration, the steps to its commit are repeated many times.
        pytest.param(20, marks=pytest.mark.long_on("mariadb", "postgresql")),
        pytest.param(1, marks=pytest.mark.long),
    ],
)
def test_every_process_is_killed(
    selected: Sequence[str], least: int, undisturbed: Undisturbed, killing: Killing
) -> None:
    """Each process gets a few statements further than the last, or as far as its first commit."""
    # With 20 changes each, three processes are enough on a server, and four for a new SQLite file.
    is_on_server = isinstance(killing.store, Schemas | PostgreSQLSchemas)
    few = least == 20 and (selected is NEW or is_on_server)
    assert killing.run_to_end_with_kills(selected, least) > (2 if few else 5)
    killing.check(undisturbed.promised, [ALIASES[int(selected[1])]])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_with_several_workers(
    seed: int, undisturbed: Undisturbed, killing: Killing
) -> None:
    chance = random.Random(seed)
    everything = ("--parallel", "2", "--canary", "0", "--create", "-v0")
    for _ in range(chance.randint(2, 5)):
        moment = Moment(chance.randrange(len(undisturbed.events)))
        done = killing.start("migrate_shards", *everything, kill=moment).end()
        if done.status != -signal.SIGKILL:
            killing.is_finished(done)
    killing.run_to_end(everything)
    promised = dict(undisturbed.promised["shards"])
    for number in range(3):
        one = promised[ALIASES[number]]
        orders = [{**row, "user_id": number + 3} for row in one["shop_order"]]
        promised[ALIASES[number + 3]] = {**one, "shop_order": orders}
    killing.check({"shards": promised}, ALIASES)


# ##### Unclear operations #####


# One of the two rows of an operation without a transaction is stored.
BETWEEN_ROWS = Moment(0, parts=["shop_00000 INSERT", "shop_log", "%s, %s"], nth=4)


@pytest.mark.parametrize(
    "complete",
    [
        pytest.param(True, id="done", marks=pytest.mark.long_on("sqlite")),
        pytest.param(False, id="undone"),
    ],
)
def test_an_operation_without_a_transaction_is_asked_for(
    complete: bool, undisturbed: Undisturbed, killing: Killing
) -> None:
    """Killed after the first of its two rows; only a person can tell what is missing."""
    killing.run_until_killed(THREE, BETWEEN_ROWS)
    assert killing.migrate(THREE).status == 1
    (failure,) = killing.failures()
    error = failure["error"]
    assert error.startswith("shop.0004_loose: ")
    assert "was interrupted on shop_00000, and it is not in one transaction" in error
    # No run touches that shard, and all others can be migrated.
    before = killing.look()["shards"]["shop_00000"]
    assert [row["word"] for row in before["shop_log"]][-1] == "loose a"
    assert killing.migrate(("--shards", "1-2", "--create", "-v0")).status == 0
    assert killing.migrate(THREE).status == 1
    assert killing.run("migrate_shards", "--retry-failed").status == 0
    assert killing.look()["shards"]["shop_00000"] == before
    killing.settle(failure, complete=complete)
    killing.run_to_end(THREE)
    killing.check(undisturbed.promised, ALIASES[:3])


# ##### Statements that still run in the server #####

_SLOW = "CHECK (LENGTH(SHA2(REPEAT(name, 10000000), 512)) > 0)"
_SLOW_MIGRATION = """
from django.db import migrations

class Migration(migrations.Migration):
    dependencies = [("shop", "0007_nothing")]
    operations = [
        migrations.RunSQL("ALTER TABLE shop_order ADD COLUMN late integer NULL, ALGORITHM=COPY")
    ]
"""


@pytest.fixture
def slow(killing: Killing, on_mariadb: Schemas) -> Iterator[Schemas]:
    """A shard on which the next migration takes long, in the server."""
    assert not killing.migrate(ONE).status
    for statement in (
        f"ALTER TABLE shop_order ADD CONSTRAINT slow {_SLOW}",
        "SET check_constraint_checks = 0",
        "INSERT INTO shop_order (user_id, name, note, mark, size)"
        " SELECT 1, 'slow', '', 1, 1 FROM seq_1_to_30",
        "SET check_constraint_checks = 1",
    ):
        on_mariadb.execute("shop_00000", statement)
    killing.fleet.write("shop/migrations/0008_slow.py", _SLOW_MIGRATION)
    yield on_mariadb
    (killing.fleet.folder / "shop/migrations/0008_slow.py").unlink()


def kill_while_it_runs(killing: Killing, store: Schemas, state: str) -> None:
    """Kill a run as soon as its ALTER TABLE is in ``state``."""
    started = killing.start("migrate_shards", *ONE)
    wait_for(store, state)
    started.kill()
    assert started.end().status == -signal.SIGKILL


def wait_for(store: Schemas, state: str) -> None:
    until = time.monotonic() + PATIENCE
    while not altering(store, state):
        assert time.monotonic() < until, f"no ALTER TABLE came to the state {state!r}"


def altering(store: Schemas, state: str = "") -> bool:
    """Whether a session alters the table of shard 0, and is in ``state``."""
    listed = store.rows(
        store.first,
        "SELECT state FROM information_schema.processlist"
        f" WHERE db = '{store.schema('shop_00000')}' AND info LIKE 'ALTER TABLE%'",
    )
    return any(state in found for (found,) in listed)


def test_a_statement_that_outlives_its_client_is_waited_for(
    killing: Killing, slow: Schemas
) -> None:
    kill_while_it_runs(killing, slow, "copy to tmp table")
    done = killing.migrate(ONE)
    assert done.status == 0, done.err
    found = killing.look()
    assert "`late` int" in found["shards"]["shop_00000"]["definitions"]["shop_order"]
    assert ["shop", "0008_slow"] in found["shards"]["shop_00000"]["records"]
    assert not found["left"] and not found["unfinished"]


def test_a_statement_is_done_twice_where_nobody_waits(killing: Killing, slow: Schemas) -> None:
    """An engine without locks fails here."""
    killing.ablations = ["no lock"]
    kill_while_it_runs(killing, slow, "copy to tmp table")
    done = killing.migrate(ONE)
    assert done.status == 1
    assert "Duplicate column name" in done.err


def test_a_statement_that_dies_with_its_client_is_run_again(
    undisturbed: Undisturbed, killing: Killing, on_mariadb: Schemas
) -> None:
    """MariaDB gives the statement up while it waits for a table that another session reads."""
    store = on_mariadb
    reader = store.another("shop_00000")
    store.rows(reader, "BEGIN")
    store.rows(reader, "SELECT * FROM shop_order")
    kill_while_it_runs(killing, store, "metadata lock")
    again = killing.start("migrate_shards", *ONE)
    while altering(store):
        pass
    wait_for(store, "metadata lock")
    reader.rollback()
    reader.close()
    assert again.end().status == 0
    killing.check(undisturbed.promised, ["shop_00000"])


# An ALTER TABLE that waits, in the server, as long as a test has the lock 42.
_WAITING_MIGRATION = """
from django.db import migrations

class Migration(migrations.Migration):
    atomic = {atomic}
    dependencies = [("shop", "0007_nothing")]
    operations = [
        migrations.RunSQL(
            "ALTER TABLE shop_order ADD COLUMN late integer"
            " DEFAULT length(pg_advisory_xact_lock_shared(42)::text)"
        )
    ]
"""


@pytest.mark.parametrize("atomic", [False, True], ids=["alone", "in a transaction"])
def test_a_statement_in_the_server_is_waited_for(
    atomic: bool, killing: Killing, on_postgresql: PostgreSQLSchemas
) -> None:
    """The session of a killed process holds its locks until its statement has ended.

    The statement has taken effect then, or is rolled back if the migration is one transaction.
    """
    store = on_postgresql
    assert not killing.migrate(ONE).status
    path = killing.fleet.folder / "shop/migrations/0008_waits.py"
    path.write_text(_WAITING_MIGRATION.format(atomic=atomic))
    store.rows(store.first, "SELECT pg_advisory_lock(42)")
    try:
        started = killing.start("migrate_shards", *ONE)
        wait_for_sessions(store, "advisory", "ALTER TABLE")
        started.kill()
        assert started.end().status == -signal.SIGKILL
        again = killing.start("migrate_shards", *ONE)
        wait_for_sessions(store, "advisory", "pg_advisory_lock")
    finally:
        store.rows(store.first, "SELECT pg_advisory_unlock(42)")
    done = again.end()
    path.unlink()
    assert done.status == 0, done.err
    found = killing.look()
    assert '"late" integer' in found["shards"]["shop_00000"]["definitions"]["shop_order"]
    assert ["shop", "0008_waits"] in found["shards"]["shop_00000"]["records"]
    assert not found["left"] and not found["unfinished"]


def wait_for_sessions(store: PostgreSQLSchemas, event: str, text: str) -> None:
    """Wait until a statement with ``text`` waits for a lock of the kind ``event``."""
    until = time.monotonic() + PATIENCE
    while not store.rows(
        store.first,
        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        f" AND wait_event = '{event}' AND position('{text}' in query) > 0",
    ):
        assert time.monotonic() < until, f"no {text!r} waits for {event!r}"


# ##### Weaker engines #####

# A statement that changes the schema, in no transaction, has just run.
AFTER_A_CHANGE = {
    "sqlite": Moment(1, parts=["shop_00000 CREATE TABLE", '"old" bigint']),
    "mariadb": Moment(1, parts=["shop_00000 ALTER TABLE", "ADD COLUMN `mark`"]),
    "postgresql": Moment(1, parts=["shop_00000 ALTER TABLE", 'ADD COLUMN "extra"']),
}
# The first of two statements of one operation has just run.
IN_A_STRETCH = {
    "sqlite": Moment(1, parts=["shop_00000 DROP TABLE"], nth=5),
    "mariadb": Moment(1, parts=["shop_00000 ALTER TABLE", "ADD COLUMN `extra`"]),
    "postgresql": Moment(1, parts=["shop_00000 ALTER TABLE", 'ADD COLUMN "extra"']),
}
# Of these, whole sweeps run on MariaDB, where each statement that changes a schema commits.
on_servers = pytest.mark.long_on("sqlite")
BEFORE_ROWS = Moment(0, parts=["shop_00000", "'sql c'"])
AFTER_ROWS = Moment(2, parts=["shop_00000", "'sql c'"])  # and after their commit


@pytest.mark.parametrize(
    ("ablation", "moment"),
    [
        pytest.param("no position", AFTER_A_CHANGE, marks=on_servers),
        pytest.param("position too late", AFTER_A_CHANGE, marks=on_servers),
        pytest.param("whole stretches", IN_A_STRETCH, marks=on_servers),
        pytest.param("from the beginning", AFTER_ROWS, marks=on_servers),
        ("no marker", AFTER_ROWS),
        pytest.param("marker alone", BEFORE_ROWS, marks=on_servers),
        pytest.param("never unclear", BETWEEN_ROWS, marks=on_servers),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_weaker_engine_is_found_out(
    ablation: str,
    moment: Moment | dict[str, Moment],
    undisturbed: Undisturbed,
    killing: Killing,
) -> None:
    """The engine survives this kill; without one of its precautions it does not."""
    if isinstance(moment, dict):
        moment = moment[killing.backend]
    killing.run_until_killed(ONE, moment)
    killing.run_to_end(ONE)
    killing.check(undisturbed.promised, ALIASES[:1])
    killing.store.put_back()
    killing.ablations = [ablation]
    killing.run_until_killed(ONE, moment)
    with pytest.raises(NotAsItShouldBe):
        killing.run_to_end(ONE)
        killing.check(undisturbed.promised, ALIASES[:1])
