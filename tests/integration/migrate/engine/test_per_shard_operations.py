"""Operations that run on each shard, interrupted in the middle, where no transaction of the whole
migration is rolled back.
"""

from __future__ import annotations

import pytest

from sharded_orm.exceptions import OperationError
from sharded_orm.operations.exceptions import OperationUnclear
from tests.integration.migrate.engine import failing
from tests.integration.migrate.engine.failing import Broken
from tests.integration.migrate.engine.fleets import Fleet, Migrations

pytestmark = pytest.mark.every_backend

INSERT = "migrations.RunPython(failing.insert, migrations.RunPython.noop, atomic={atomic})"
COLUMN = 'migrations.AddField("album", "place", models.CharField(max_length=9, null=True))'


@pytest.fixture(autouse=True)
def first(fleet: Fleet, migrations: Migrations) -> None:
    """Shard 1 has applied the first migration."""
    fleet.create(1)
    fleet.migrate_with_django(1, "fleet")


def names(fleet: Fleet) -> list[str]:
    return [name for (name,) in fleet.execute(1, "SELECT name FROM fleet_album ORDER BY id")]


def is_clean(fleet: Fleet) -> bool:
    """Whether no markers are left, and the last migration is recorded."""
    applied = fleet.applied(1)
    return ("fleet", "0002_rows") in applied and not any(name[:4] == "run " for _, name in applied)


def broken_off(fleet: Fleet, error: BaseException) -> None:
    failing.error = error
    with pytest.raises(type(error)):
        fleet.migrate(1)
    failing.error = None


# ##### Python #####


def test_in_a_transaction_it_is_rolled_back_and_run_again(
    fleet: Fleet, migrations: Migrations
) -> None:
    migrations.add("0002_rows", COLUMN, INSERT.format(atomic=True))
    broken_off(fleet, Broken())
    assert names(fleet) == []
    fleet.migrate(1)
    assert names(fleet) == ["before", "after"]
    assert is_clean(fleet)


def test_in_a_transaction_that_was_committed_it_is_not_run_again(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrations.add("0002_rows", COLUMN, INSERT.format(atomic=True))
    with monkeypatch.context() as patch:
        # The next entry of the journal, after the commit.
        patch.setattr("sharded_orm.operations.migrate.executor.ScriptExecutor._record", _break)
        with pytest.raises(Broken):
            fleet.migrate(1)
    fleet.migrate(1)
    assert names(fleet) == ["before", "after"]
    assert is_clean(fleet)


def _break(*args: object) -> None:
    raise Broken


@pytest.mark.parametrize("done", [True, False])
def test_without_a_transaction_a_person_has_to_look(
    fleet: Fleet, migrations: Migrations, done: bool
) -> None:
    migrations.add("0002_rows", COLUMN, INSERT.format(atomic=False))
    broken_off(fleet, Broken())
    for _ in range(2):
        with pytest.raises(OperationUnclear) as caught:
            fleet.migrate(1)
    assert "fleet.0002_rows: 'Raw Python operation' was interrupted on fleet_00001" in str(
        caught.value
    )
    assert "--settle fleet_00001=done" in str(caught.value)
    assert names(fleet) == ["before"]
    fleet.settle(1, done=done)
    fleet.migrate(1)
    assert names(fleet) == (["before"] if done else ["before", "before", "after"])
    assert is_clean(fleet)


@pytest.mark.parametrize("atomic", [True, False])
def test_an_error_is_no_interruption(fleet: Fleet, migrations: Migrations, atomic: bool) -> None:
    """As with Django, the operation runs again after its cause is fixed."""
    migrations.add("0002_rows", INSERT.format(atomic=atomic), COLUMN)
    broken_off(fleet, ValueError("no"))
    fleet.migrate(1)
    assert names(fleet) == (["before", "after"] if atomic else ["before", "before", "after"])
    assert is_clean(fleet)


PROCEDURE = "migrations.RunSQL('CREATE PROCEDURE widen() ALTER TABLE fleet_album ADD COLUMN extra integer NULL')"
HOW = ["alter", "alter_by_procedure", "alter_by_driver", "alter_by_cursor_of_driver"]


@pytest.mark.mysql_settings
@pytest.mark.parametrize("how", HOW)
def test_a_statement_in_it_that_commits(fleet: Fleet, migrations: Migrations, how: str) -> None:
    migrations.add("0001_procedure", PROCEDURE)
    migrations.add("0002_rows", INSERT.format(atomic=True).replace("insert", how))
    broken_off(fleet, Broken())
    with pytest.raises(OperationUnclear, match="a statement in it commits by itself"):
        fleet.migrate(1)
    fleet.settle(1, done=True)
    fleet.migrate(1)
    assert is_clean(fleet)


@pytest.mark.mysql_settings
@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("how", HOW[1:])
def test_schemas_that_change_in_hidden_ways_are_noticed(
    fleet: Fleet, migrations: Migrations, how: str, atomic: bool
) -> None:
    """Later operations begin at the schema that a procedure or the driver left."""
    migrations.add("0001_procedure", PROCEDURE)
    fleet.create(0)
    fleet.migrate(0, 1)
    migrations.add("0002_rows", INSERT.format(atomic=atomic).replace("insert", how), COLUMN)
    migrations.add("0003_column", COLUMN.replace("place", "country"))
    fleet.migrate(0)
    fleet.migrate_with_django(1)
    fleet.assert_same_schema(0, 1)


# ##### Raw SQL #####

RAW = """migrations.RunSQL([
    "INSERT INTO fleet_album (user_id, name) VALUES (1, 'one')",
    "ALTER TABLE fleet_album ADD COLUMN extra integer NULL",
    ("INSERT INTO fleet_album (user_id, name, extra) VALUES (%s, %s, 3)", [1, "two"]),
    "CREATE INDEX by_extra ON fleet_album (extra)",
])"""


def test_raw_sql_goes_on_with_the_statement_that_was_interrupted(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrations.add("0002_rows", COLUMN, RAW, INSERT.format(atomic=True))
    place = "sharded_orm.operations.migrate.per_shard_operation.PerShardOperation"
    from sharded_orm.operations.migrate.per_shard_operation import PerShardOperation

    execute = PerShardOperation._execute
    for before in (True, False, True, False, True, False, True, False):

        def broken(
            self: PerShardOperation, sql: str, params: object, before: bool = before
        ) -> None:
            if before:
                raise Broken
            execute(self, sql, params)
            raise Broken

        with monkeypatch.context() as patch:
            patch.setattr(f"{place}._execute", broken)
            with pytest.raises(Broken):
                fleet.migrate(1)
    fleet.migrate(1)
    assert names(fleet) == ["one", "two", "before", "after"]
    assert "by_extra" in str(fleet.schema(1).definitions)
    assert is_clean(fleet)


@pytest.mark.mysql_settings
@pytest.mark.parametrize(
    "sql",
    ["TRUNCATE TABLE fleet_album", "RENAME TABLE fleet_album TO x, x TO fleet_album"],
)
def test_raw_sql_that_leaves_no_trace(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    migrations.add("0002_rows", f"migrations.RunSQL({sql!r})")
    with monkeypatch.context() as patch:
        patch.setattr(
            "sharded_orm.operations.migrate.per_shard_operation.PerShardOperation._execute", _break
        )
        with pytest.raises(Broken):
            fleet.migrate(1)
    with pytest.raises(OperationUnclear, match="SHOW CREATE TABLE fleet_album"):
        fleet.migrate(1)
    fleet.settle(1, done=False)
    fleet.migrate(1)
    assert is_clean(fleet)


@pytest.mark.mysql_settings
def test_rows_of_a_table_without_transactions(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.execute(1, "ALTER TABLE fleet_album ENGINE=MyISAM")
    migrations.add("0002_rows", "migrations.RunSQL('UPDATE fleet_album SET user_id = user_id + 1')")
    with monkeypatch.context() as patch:
        patch.setattr(
            "sharded_orm.operations.migrate.per_shard_operation.PerShardOperation._execute", _break
        )
        with pytest.raises(Broken):
            fleet.migrate(1)
    with pytest.raises(OperationUnclear, match="takes nothing back"):
        fleet.migrate(1)


# ##### Deployments between two attempts #####


def test_the_function_is_mended_and_run(fleet: Fleet, migrations: Migrations) -> None:
    migrations.add("0002_rows", COLUMN, INSERT.format(atomic=True), COLUMN.replace("place", "p2"))
    broken_off(fleet, ValueError("no"))
    migrations.change("0002_rows", "failing.insert", "lambda apps, editor: None")
    fleet.migrate(1)
    assert names(fleet) == []
    assert is_clean(fleet)


def test_operations_that_were_done_have_changed(fleet: Fleet, migrations: Migrations) -> None:
    migrations.add("0002_rows", COLUMN, INSERT.format(atomic=True))
    broken_off(fleet, ValueError("no"))
    migrations.change("0002_rows", "max_length=9", "max_length=12")
    with pytest.raises(OperationError, match="are others now"):
        fleet.migrate(1)
    migrations.change("0002_rows", "max_length=12", "max_length=9")
    fleet.migrate(1)
    assert is_clean(fleet)


def test_the_first_operation_is_mended(fleet: Fleet, migrations: Migrations) -> None:
    """Nothing of the migration was done, so another operation may take its place."""
    migrations.add("0002_rows", INSERT.format(atomic=True), COLUMN)
    broken_off(fleet, ValueError("no"))
    migrations.change("0002_rows", INSERT.format(atomic=True), COLUMN.replace("place", "p2"))
    fleet.migrate(1)
    assert "p2" in fleet.schema(1).definitions["fleet_album"]
    assert is_clean(fleet)


def test_another_target_than_before(fleet: Fleet, migrations: Migrations) -> None:
    migrations.add("0002_rows", COLUMN, INSERT.format(atomic=True))
    broken_off(fleet, ValueError("no"))
    with pytest.raises(OperationError, match=r"in the middle of fleet\.0002_rows"):
        fleet.migrate(1, target=("fleet", "0001"))
    fleet.migrate(1)
    fleet.migrate(1, target=("fleet", "0001"))
    assert "place" not in fleet.schema(1).definitions["fleet_album"]
