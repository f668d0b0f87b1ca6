"""Migration operations that only PostgreSQL has: indexes without locks, extensions, collations."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import IntegrityError, OperationalError, connections

from sharded_orm.backends.postgresql.base import DatabaseWrapper
from sharded_orm.exceptions import RehearsalFailed
from sharded_orm.operations.migrate.plan import Unit
from tests.integration.migrate.engine.fleets import Fleet, Migrations

pytestmark = pytest.mark.postgresql_settings

_POSTGRESQL = '__import__("importlib").import_module("django.contrib.postgres.operations")'
ADD_INDEX = (
    f"{_POSTGRESQL}.AddIndexConcurrently("
    '"album", models.Index(fields=["name", "user_id"], name="by_name"))'
)
REMOVE_INDEX = f'{_POSTGRESQL}.RemoveIndexConcurrently("album", "by_name")'
UNIQUE_INDEX = (
    'migrations.RunSQL("CREATE UNIQUE INDEX CONCURRENTLY by_name ON fleet_album (name)",'
    ' "DROP INDEX CONCURRENTLY by_name")'
)
UNNAMED_INDEX = 'migrations.RunSQL("CREATE INDEX CONCURRENTLY ON fleet_album (name)")'


def indexes(fleet: Fleet, number: int) -> list[tuple[str, bool]]:
    """Return the name of each index that a test has created, and whether it is valid."""
    return fleet.execute(
        number,
        "SELECT c.relname::text, i.indisvalid FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid"
        " WHERE i.indrelid = 'fleet_album'::regclass AND c.relname <> 'fleet_album_pkey'",
    )


@contextmanager
def writer(fleet: Fleet, number: int) -> Iterator[None]:
    """A transaction that has written to the table, so that the building of indexes waits for it."""
    session = fleet.connection(number)._stock_wrapper({})
    try:
        session.set_autocommit(False)
        with session.cursor() as cursor:
            cursor.execute("INSERT INTO fleet_album (user_id, name) VALUES (9, 'writer')")
        yield
        session.rollback()
    finally:
        session.close()


@contextmanager
def killer(fleet: Fleet, number: int, text: str) -> Iterator[None]:
    """Ends the session whose statement contains ``text``, as soon as that waits for a lock."""
    session = fleet.connection(number)._stock_wrapper({})
    session.inc_thread_sharing()
    killed = threading.Event()
    stop = threading.Event()

    def kill() -> None:
        with session.cursor() as cursor:
            while not killed.is_set() and not stop.is_set():
                cursor.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE wait_event_type = 'Lock' AND pid <> pg_backend_pid()"
                    " AND position(%s in query) > 0",
                    [text],
                )
                if cursor.fetchall():
                    killed.set()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
        assert killed.is_set()
    finally:
        stop.set()
        thread.join()
        session.close()


def test_indexes_are_built_without_locks(fleet: Fleet, migrations: Migrations) -> None:
    fleet.create(0, 1, 4, 5)
    fleet.migrate(0, 1, 4, target=("fleet", "0001"))
    migrations.add("0002_index", ADD_INDEX)
    fleet.migrate(0, 4)
    fleet.migrate_with_django(1)
    fleet.assert_same(0, 1)
    fleet.assert_same(4, 1)
    assert indexes(fleet, 0) == indexes(fleet, 4) == [("by_name", True)]
    # A new shard gets all at once.
    fleet.migrate(5)
    fleet.assert_same_schema(5, 1)
    migrations.add("0003_no_index", REMOVE_INDEX)
    fleet.migrate(0, 4, 5)
    fleet.migrate_with_django(1)
    fleet.assert_same(0, 1)
    assert indexes(fleet, 0) == indexes(fleet, 4) == []


def test_the_sql_is_recorded_once(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        Unit, "runs_per_shard", lambda unit, number: calls.append(RUNS(unit, number)) or calls[-1]
    )
    fleet.create(0)
    fleet.migrate(0, target=("fleet", "0001"))
    migrations.add("0002_index", ADD_INDEX)
    fleet.migrate(0)
    assert calls and not any(calls)


RUNS = Unit.runs_per_shard


def test_a_transaction_around_it_is_refused_before_any_shard(
    fleet: Fleet, migrations: Migrations
) -> None:
    fleet.create(0)
    fleet.migrate(0, target=("fleet", "0001"))
    migrations.add("0002_index", ADD_INDEX, atomic=True)
    with pytest.raises(RehearsalFailed, match="set atomic = False on the migration"):
        fleet.migrate(0)
    assert indexes(fleet, 0) == []


@pytest.mark.parametrize(
    ("operation", "name"),
    [(ADD_INDEX, "by_name"), (UNIQUE_INDEX, "by_name"), (UNNAMED_INDEX, "fleet_album_name_idx")],
    ids=["Django", "SQL", "SQL without a name"],
)
def test_an_index_whose_building_was_broken_off_is_built_again(
    operation: str, name: str, fleet: Fleet, migrations: Migrations
) -> None:
    fleet.create(0, 1)
    fleet.migrate(0, 1, target=("fleet", "0001"))
    migrations.add("0002_index", operation)
    with writer(fleet, 0):
        with killer(fleet, 0, "CREATE"), pytest.raises(OperationalError):
            fleet.migrate(0)
        connections[fleet.shard(0).alias].close()
        assert indexes(fleet, 0) == [(name, False)]
    fleet.migrate(0)
    assert indexes(fleet, 0) == [(name, True)]
    fleet.migrate_with_django(1)
    fleet.assert_same(0, 1)


def test_an_index_that_rows_did_not_allow_is_not_taken_for_done(
    fleet: Fleet, migrations: Migrations
) -> None:
    fleet.create(0)
    fleet.migrate(0, target=("fleet", "0001"))
    fleet.execute(0, "INSERT INTO fleet_album (user_id, name) VALUES (1, 'x'), (1, 'x')")
    migrations.add("0002_index", UNIQUE_INDEX)
    for _ in range(2):
        with pytest.raises(IntegrityError):
            fleet.migrate(0)
        assert ("fleet", "0002_index") not in fleet.applied(0)
    fleet.execute(0, "DELETE FROM fleet_album WHERE id = 1")
    fleet.migrate(0)
    assert indexes(fleet, 0) == [("by_name", True)]
    assert ("fleet", "0002_index") in fleet.applied(0)


def test_an_index_whose_dropping_was_broken_off_is_dropped(
    fleet: Fleet, migrations: Migrations
) -> None:
    fleet.create(0)
    fleet.migrate(0, target=("fleet", "0001"))
    migrations.add("0002_index", ADD_INDEX)
    migrations.add("0003_no_index", REMOVE_INDEX)
    fleet.migrate(0, target=("fleet", "0002"))
    with writer(fleet, 0):
        with killer(fleet, 0, "DROP"), pytest.raises(OperationalError):
            fleet.migrate(0)
        connections[fleet.shard(0).alias].close()
    fleet.migrate(0)
    assert indexes(fleet, 0) == []
    assert ("fleet", "0003_no_index") in fleet.applied(0)


def test_an_extension_is_created_once_for_each_database(
    fleet: Fleet, migrations: Migrations
) -> None:
    numbers = (0, 1, 4)
    fleet.create(*numbers)
    for number in (0, 4):
        fleet.execute(number, "DROP EXTENSION IF EXISTS pg_trgm CASCADE")
    migrations.add(
        "0002_extension",
        f"{_POSTGRESQL}.TrigramExtension()",
        'migrations.RunSQL("CREATE INDEX trigrams ON fleet_album USING gin (name gin_trgm_ops)")',
        atomic=True,
    )
    fleet.migrate(*numbers)
    fleet.assert_same(0, 1)
    fleet.assert_same(0, 4)
    schema: Any = fleet.execute(
        0, "SELECT extnamespace::regnamespace::text FROM pg_extension WHERE extname = 'pg_trgm'"
    )
    assert schema == [("extensions",)]


def test_collations_and_constraints_that_are_checked_later(
    fleet: Fleet, migrations: Migrations
) -> None:
    fleet.create(0, 1, 4)
    migrations.add(
        "0002_not_valid",
        f'{_POSTGRESQL}.CreateCollation("own", "und-x-icu", provider="icu")',
        'migrations.AddField("album", "word", models.CharField(max_length=9, null=True,'
        ' db_collation="own"))',
        f'{_POSTGRESQL}.AddConstraintNotValid("album", models.CheckConstraint('
        'condition=models.Q(user_id__gt=0), name="positive"))',
    )
    migrations.add("0003_valid", f'{_POSTGRESQL}.ValidateConstraint("album", "positive")')
    fleet.migrate(0, target=("fleet", "0002"))
    fleet.migrate_with_django(1, "fleet", "0002")
    fleet.assert_same_schema(0, 1)
    fleet.migrate(0, 4)
    fleet.migrate_with_django(1)
    fleet.assert_same_schema(0, 1)
    fleet.assert_same_schema(4, 1)


def python(*statements: str) -> str:
    """Return an operation that runs statements of which only the server knows what they do."""
    return f"migrations.RunPython(failing.run{statements!r}, migrations.RunPython.noop)"


COLUMN = 'migrations.AddField("album", "place", models.CharField(max_length=9, null=True))'
WIDEN = (
    'migrations.RunSQL("CREATE FUNCTION widen() RETURNS int LANGUAGE plpgsql AS $$ BEGIN'
    ' ALTER TABLE fleet_album ADD COLUMN extra integer NULL; RETURN 1; END $$")'
)


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE fleet_album ADD COLUMN extra integer NULL",
        "DELETE FROM fleet_album; ALTER TABLE fleet_album ADD COLUMN extra integer NULL",
        "DO $$ BEGIN ALTER TABLE fleet_album ADD COLUMN extra integer NULL; END $$",
        "SELECT widen()",
        "WITH w AS (SELECT widen()) SELECT * FROM w",
        "INSERT INTO django_migrations (app, name, applied) SELECT 'a', 'b', now() FROM widen()",
    ],
)
def test_python_that_alters_a_table_is_noticed(
    fleet: Fleet, migrations: Migrations, statement: str, atomic: bool
) -> None:
    """Later migrations begin at the schema that such an operation has left."""
    fleet.create(0, 1)
    migrations.add("0002_function", WIDEN)
    fleet.migrate(0, 1)
    for number in (0, 1):
        fleet.execute(number, "INSERT INTO fleet_album (user_id, name) VALUES (2, 'x')")
    migrations.add("0003_python", python(statement), atomic=atomic)
    migrations.add("0004_column", COLUMN)
    fleet.migrate(0)
    fleet.migrate_with_django(1)
    fleet.assert_same(0, 1)
    assert "extra" in fleet.schema(0).definitions["fleet_album"]


def test_python_that_changes_rows_costs_no_look_at_the_schema(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.create(0, 1)
    fleet.migrate(0, 1)
    migrations.add("0002_column", COLUMN, atomic=True)
    insert = "migrations.RunPython(failing.insert, migrations.RunPython.noop)"
    migrations.add("0003_python", insert, atomic=True)
    migrations.add("0004_column", COLUMN.replace("place", "country"), atomic=True)
    reads: list[str | None] = []

    def snapshot(wrapper: DatabaseWrapper) -> Any:
        reads.append(wrapper.schema)
        return read(wrapper)

    read = DatabaseWrapper.schema_snapshot
    monkeypatch.setattr(DatabaseWrapper, "schema_snapshot", snapshot)
    fleet.migrate(0, 1)
    # Before the migrations, and after each of those with recorded SQL.
    assert [reads.count(fleet.shard(number).schema) for number in (0, 1)] == [3, 3]
    fleet.assert_same(0, 1)


INTO = "WITH w AS (SELECT 1 AS a) SELECT a INTO other FROM w"
SET_AND_ALTER = (
    "SET LOCAL lock_timeout = '5s'; ALTER TABLE fleet_album ADD COLUMN extra integer NULL"
)


@pytest.mark.parametrize(
    ("operation", "atomic"),
    [
        ("RunSQL('SELECT widen()')", False),
        (f"RunSQL({SET_AND_ALTER!r})", False),
        (f"RunSQL({INTO!r})", True),
        (f"RunPython(failing.run({INTO!r}))", False),
        ("RunPython(lambda a, e: e.connection.cursor().callproc('widen'))", True),
        ("RunPython(lambda a, e: e.connection.connection.execute('SELECT widen()'))", False),
        ("RunPython(lambda a, e: e.deferred_sql.append('SELECT widen()'))", True),
    ],
)
def test_schemas_that_change_in_hidden_ways_are_noticed(
    fleet: Fleet, migrations: Migrations, operation: str, atomic: bool
) -> None:
    """Later migrations begin at the schema that a function, the driver or a deferred statement left."""
    fleet.create(0, 1)
    migrations.add("0002_function", WIDEN)
    fleet.migrate(0, 1)
    migrations.add("0003_hidden", f"migrations.{operation}", COLUMN, atomic=atomic)
    migrations.add("0004_column", COLUMN.replace("place", "country"))
    fleet.migrate(0)
    fleet.migrate_with_django(1)
    fleet.assert_same(0, 1)
