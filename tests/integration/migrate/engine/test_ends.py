"""Shards that were interrupted between two steps, or have changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db.models.signals import post_migrate

from sharded_orm.exceptions import RehearsalFailed
from sharded_orm.models import OperationStep
from sharded_orm.operations.exceptions import OperationStopped, OperationUnclear, SchemaDiffers
from sharded_orm.operations.migrate import MigrateOptions, Migrator
from sharded_orm.operations.migrate.executor import ScriptExecutor
from sharded_orm.operations.migrate.migration_records import Records
from sharded_orm.operations.migrate.per_shard_operation import PerShardOperation
from sharded_orm.operations.runs import journal
from tests.integration.migrate.engine import failing
from tests.integration.migrate.engine.failing import Broken
from tests.integration.migrate.engine.fleets import NEVER, Fleet, Migrations
from tests.integration.migrate.engine.test_equality import PLACE, SQUASHED
from tests.integration.migrate.engine.test_per_shard_operations import (
    COLUMN,
    INSERT,
    is_clean,
    names,
)

pytestmark = pytest.mark.every_backend


def first(fleet: Fleet) -> None:
    """Shard 1 has applied the first migration."""
    fleet.create(1)
    fleet.migrate_with_django(1, "fleet")


def test_a_difference_in_the_middle_of_a_migration_is_mended(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operations that were done are not done again."""
    first(fleet)
    migrations.add("0002_rows", INSERT.format(atomic=True), COLUMN, 'migrations.RunSQL("SELECT 1")')
    execute = ScriptExecutor._execute

    def with_a_guest(executor: ScriptExecutor, statement: Any) -> None:
        execute(executor, statement)
        if "place" in statement.sql:
            execute(executor, type(statement)(("fleet", "x"), 0, "", "CREATE TABLE guest (id int)"))

    with monkeypatch.context() as patch:
        patch.setattr(ScriptExecutor, "_execute", with_a_guest)
        for _ in range(2):
            with pytest.raises(SchemaDiffers, match="table 'guest' is not expected"):
                fleet.migrate(1)
    fleet.execute(1, "DROP TABLE guest")
    fleet.migrate(1)
    assert names(fleet) == ["before", "after"]
    assert is_clean(fleet)


def test_a_squashed_migration_is_recorded_and_then_broken_off(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrations.add("0002_place", PLACE)
    migrations.write(
        "0001_squashed",
        SQUASHED.replace(
            "class Migration(migrations.Migration):",
            "class Migration(migrations.Migration):\n    atomic = False",
        ),
    )
    fleet.create(0, 1)
    for number in (0, 1):
        fleet.execute(
            number, "CREATE TABLE other (id int)"
        )  # so that it is not built from the template
    fleet.migrate_with_django(0, "fleet")
    record = Records.record

    def broken(records: Records, *args: Any, **kwargs: Any) -> None:
        record(records, *args, **kwargs)
        if ("fleet", "0001_first") in args[0]:
            raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(Records, "record", broken)
        with pytest.raises(Broken):
            fleet.migrate(1, target=("fleet", None))
    fleet.migrate(1, target=("fleet", None))
    fleet.assert_same(1, 0)


def test_it_stops_right_after_what_nothing_tells(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation was done, so nobody is asked, and it is not done again."""
    first(fleet)
    migrations.add("0002_rows", INSERT.format(atomic=False), COLUMN)
    run: list[object] = []
    own = PerShardOperation.run

    def counted(operation: PerShardOperation) -> None:
        own(operation)
        run.append(operation)

    monkeypatch.setattr(PerShardOperation, "run", counted)
    with pytest.raises(OperationStopped):
        fleet.migrate(1, stopping=lambda: bool(run))
    fleet.migrate(1)
    assert names(fleet) == ["before", "after"]
    assert is_clean(fleet)


@pytest.mark.mysql_settings
@pytest.mark.parametrize(
    "sql",
    [
        "SET STATEMENT max_statement_time=9 FOR UPDATE fleet_album SET user_id = user_id + 1",
        "ALTER TABLE fleet_album ADD COLUMN x int; UPDATE fleet_album SET user_id = user_id + 1",
    ],
)
def test_statements_in_a_statement(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    first(fleet)
    migrations.add("0002_rows", f"migrations.RunSQL([{sql!r}])")
    execute = PerShardOperation._execute

    def broken(operation: PerShardOperation, sql: str, params: Any) -> None:
        execute(operation, sql, params)
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(PerShardOperation, "_execute", broken)
        with pytest.raises(Broken):
            fleet.migrate(1)
    with pytest.raises(OperationUnclear):
        fleet.migrate(1)


def test_a_shard_that_was_made_anew(fleet: Fleet, migrations: Migrations) -> None:
    """The checkpoint of the old shard is gone with it."""
    first(fleet)
    migrations.add("0002_rows", COLUMN, INSERT.format(atomic=True))
    failing.error = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        fleet.migrate(1)
    failing.error = None
    connection = fleet.connection(1)
    if connection.vendor == "sqlite":
        connection.close()
        Path(connection.settings_dict["NAME"]).unlink()
    else:
        connection.drop_shard_database()
    fleet.create(1)
    fleet.migrate(1)
    assert names(fleet) == ["before", "after"]
    assert is_clean(fleet)


def test_back_over_a_squashed_migration_that_is_not_recorded_yet(
    fleet: Fleet, migrations: Migrations
) -> None:
    migrations.add("0002_place", PLACE)
    migrations.add("0003_more", PLACE.replace('"place"', '"more"'))
    fleet.create(0, 1)
    for number in (0, 1):
        fleet.migrate_with_django(number, "fleet")
    migrations.write("0001_squashed", SQUASHED)
    fleet.migrate_with_django(0, "fleet", "0001_squashed")
    fleet.migrate(1, target=("fleet", "0001_squashed"))
    fleet.assert_same(1, 0)
    assert "more" not in fleet.schema(1).definitions["fleet_album"]


@pytest.mark.mysql_settings
def test_a_session_that_dies_is_an_interruption(fleet: Fleet, migrations: Migrations) -> None:
    """The running operation may have taken effect, in part."""
    first(fleet)
    migrations.add("0002_rows", INSERT.format(atomic=False).replace("insert,", "lose,"))
    with pytest.raises(Exception, match=r"killed|gone away|Lost"):
        fleet.migrate(1)
    with pytest.raises(OperationUnclear):
        fleet.migrate(1)


def test_a_shard_whose_records_contradict_each_other_keeps_nobody_back(
    fleet: Fleet, migrations: Migrations
) -> None:
    migrations.add("0002_place", PLACE)
    shards = fleet.create(0, 1)
    for number in (0, 1):
        fleet.migrate_with_django(number, "fleet")
    fleet.execute(0, "DELETE FROM django_migrations WHERE app = 'fleet' AND name = '0001_first'")
    found = Migrator(fleet.group, MigrateOptions(("fleet", None)), journal.Scripts()).applied_state(
        shards
    )
    assert found.current == 1
    (why,) = found.unreachable.values()
    assert "fleet_00000: Migration fleet.0002_place is applied before" in str(why)


@pytest.mark.mysql_settings
def test_a_schema_of_somebody_is_no_place_to_rehearse(fleet: Fleet, migrations: Migrations) -> None:
    first(fleet)
    migrations.add("0002_place", PLACE)
    theirs = f"{fleet.group.schema_name(0)}_rehearsal"
    fleet.execute(1, f"CREATE DATABASE {theirs}")
    try:
        fleet.execute(1, f"CREATE TABLE {theirs}.mine (id int)")
        fleet.execute(1, f"INSERT INTO {theirs}.mine VALUES (1)")
        with pytest.raises(RehearsalFailed, match="_rehearsal' has rows"):
            fleet.migrate(1)
        assert fleet.execute(1, f"SELECT COUNT(*) FROM {theirs}.mine") == [(1,)]
        fleet.execute(1, f"DELETE FROM {theirs}.mine")
        fleet.migrate(1)  # as after a kill
    finally:
        fleet.execute(1, f"DROP DATABASE IF EXISTS {theirs}")


@pytest.mark.mysql_settings
def test_a_function_within_a_transaction_of_the_global_database(
    fleet: Fleet, migrations: Migrations
) -> None:
    """Its records in the journal are not rolled back with that transaction."""
    first(fleet)
    migrations.add(
        "0002_rows", INSERT.format(atomic=True).replace("insert,", "alter_within_default,")
    )
    failing.error = Broken()
    with pytest.raises(Broken):
        fleet.migrate(1)
    failing.error = None
    with pytest.raises(OperationUnclear, match="commits by itself"):
        fleet.migrate(1)


def attempt(fleet: Fleet, stopping: Any = NEVER) -> str:
    """Migrate shard 1 as the command does, and return what the journal records of its end."""
    with fleet.run() as run:
        run.create_steps([fleet.shard(1).alias])
        step = run.step(fleet.shard(1).alias)
        migrator = Migrator(fleet.group, MigrateOptions(("fleet", None)), journal.Scripts())
        try:
            migrator.migrate(fleet.shard(1), step, stopping=stopping)
        except OperationStopped:
            step.mark_stopped()
        except Exception as exc:
            step.mark_failed(exc)
        else:
            step.mark_done()
    return f"{step.state} {step.error}".strip()


@contextmanager
def heard_at_the_end(fleet: Fleet, hear: Callable[[], None]) -> Iterator[None]:
    """Call ``hear`` when shard 1 is finished."""

    def receiver(sender: Any, using: str, **kwargs: Any) -> None:
        if using == fleet.shard(1).alias and sender.label == "fleet":
            hear()

    post_migrate.connect(receiver)
    try:
        yield
    finally:
        post_migrate.disconnect(receiver)


def test_nothing_is_recorded_that_was_not_compared(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    first(fleet)
    migrations.add("0002_place", PLACE)
    migrations.add("0003_more", PLACE.replace('"place"', '"more"'))
    execute = ScriptExecutor._execute

    def with_a_guest(executor: ScriptExecutor, statement: Any) -> None:
        execute(executor, statement)
        if "more" in statement.sql:
            fleet.execute(1, "CREATE TABLE guest (id int)")

    with monkeypatch.context() as patch:
        patch.setattr(ScriptExecutor, "_execute", with_a_guest)
        for _ in range(3):
            assert "table 'guest' is not expected" in attempt(fleet)
    assert ("fleet", "0002_place") in fleet.applied(1)
    assert ("fleet", "0003_more") not in fleet.applied(1)
    fleet.execute(1, "DROP TABLE guest")
    with monkeypatch.context() as patch:
        patch.setattr(ScriptExecutor, "_execute", None)
        assert attempt(fleet) == "done"
    assert fleet.applied(1).count(("fleet", "0003_more")) == 1


def test_stopped_between_two_migrations_of_a_script(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second migration continues the script, at whose end the comparison is."""
    first(fleet)
    migrations.add("0002_place", PLACE)
    migrations.add("0003_more", PLACE.replace('"place"', '"more"'))
    record = Records.record
    recorded: list[int] = []

    def with_a_guest(records: Records, *args: Any, **kwargs: Any) -> None:
        record(records, *args, **kwargs)
        if not recorded:
            fleet.execute(1, "CREATE TABLE guest (id int)")
        recorded.append(1)

    monkeypatch.setattr(Records, "record", with_a_guest)
    assert attempt(fleet, stopping=lambda: bool(recorded)) == "stopped"
    assert attempt(fleet, stopping=lambda: True) == "stopped"
    assert ("fleet", "0003_more") not in fleet.applied(1)
    assert "table 'guest' is not expected" in attempt(fleet)
    fleet.execute(1, "DROP TABLE guest")
    assert attempt(fleet) == "done"
    assert fleet.applied(1).count(("fleet", "0003_more")) == 1


def test_killed_when_a_receiver_of_the_end_has_made_something(
    fleet: Fleet, migrations: Migrations
) -> None:
    """Recorded steps are not compared again; the receiver is called again."""
    first(fleet)
    migrations.add("0002_place", PLACE)
    heard: list[int] = []

    def hear() -> None:
        heard.append(1)
        if len(heard) == 1:
            fleet.execute(1, "CREATE VIEW mine AS SELECT 1 AS one")
            raise Broken

    with heard_at_the_end(fleet, hear):
        with pytest.raises(Broken):
            attempt(fleet)
        assert attempt(fleet) == "done"
    assert len(heard) == 2


@pytest.mark.mysql_settings
def test_a_session_that_dies_when_all_is_done(fleet: Fleet, migrations: Migrations) -> None:
    """The lock is gone with it: nothing is left to be done on the shard."""
    first(fleet)
    migrations.add("0002_place", PLACE)

    def hear() -> None:
        ((session,),) = fleet.execute(1, "SELECT CONNECTION_ID()")
        with fleet.connection(1).node_cursor() as cursor:
            cursor.execute(f"KILL {session}")

    with heard_at_the_end(fleet, hear):
        assert attempt(fleet) == "done"


def test_what_a_person_has_recorded_is_not_compared(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed, and somebody has created the tables by hand in another way."""
    first(fleet)
    migrations.add("0002_place", PLACE)

    def broken(executor: ScriptExecutor, statement: Any) -> None:
        raise ValueError("no")

    with monkeypatch.context() as patch:
        patch.setattr(ScriptExecutor, "_execute", broken)
        assert attempt(fleet) == "failed ValueError: no"
    fleet.execute(1, "ALTER TABLE fleet_album ADD COLUMN place varchar(99) NULL")
    fleet.migrate_with_django(1, "fleet", fake=True)
    assert attempt(fleet) == "done"
    assert fleet.applied(1).count(("fleet", "0002_place")) == 1


def test_a_receiver_of_the_end_fails(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal records the failure, and the next attempt calls only the receiver again."""
    first(fleet)
    migrations.add("0002_place", PLACE)
    failing = True

    def hear() -> None:
        if failing:
            raise ValueError("no")

    with heard_at_the_end(fleet, hear):
        with pytest.raises(ValueError, match="no"):
            fleet.migrate(1)
        (step,) = OperationStep.objects.using("default").filter(alias=fleet.shard(1).alias)
        assert step.operation == "Tell of the end"
        with pytest.raises(ValueError, match="no"):
            fleet.migrate(1)
        failing = False
        with monkeypatch.context() as patch:
            patch.setattr(ScriptExecutor, "_execute", None)
            fleet.migrate(1)
    assert fleet.applied(1).count(("fleet", "0002_place")) == 1
