"""Statements of schema operations, interrupted where no transaction holds the migration."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_orm.operations.exceptions import OperationUnclear, SchemaDiffers
from sharded_orm.operations.migrate.executor import ScriptExecutor
from tests.integration.migrate.engine.failing import Broken
from tests.integration.migrate.engine.fleets import Fleet, Migrations

pytestmark = pytest.mark.every_backend

SEVERAL = [
    'migrations.AddField("album", "place", models.CharField(max_length=9, null=True))',
    'migrations.AlterField("album", "place", models.CharField(max_length=9, default="here"))',
    'migrations.AddIndex("album", models.Index(fields=["place"], name="by_place"))',
    'migrations.CreateModel("Page", [("id", models.BigAutoField(primary_key=True)),'
    ' ("album", models.ForeignKey("fleet.album", models.CASCADE))])',
    'migrations.RenameField("album", "name", "label")',
]


class BreaksAt:
    """Raises an exception at the statement with this number, before or after it runs."""

    def __init__(self, number: int, *, before: bool) -> None:
        self.number = number
        self.before = before
        self.run: list[str] = []

    def within(self, patch: pytest.MonkeyPatch) -> BreaksAt:
        execute = ScriptExecutor._execute

        def broken(executor: ScriptExecutor, statement: Any) -> None:
            is_it = len(self.run) == self.number
            if is_it and self.before:
                raise Broken
            self.run.append(statement.sql)
            execute(executor, statement)
            if is_it:
                raise Broken

        patch.setattr(ScriptExecutor, "_execute", broken)
        return self


def broken_off(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, number: int, *, before: bool
) -> BreaksAt:
    with monkeypatch.context() as patch:
        breaks = BreaksAt(number, before=before).within(patch)
        with pytest.raises(Broken):
            fleet.migrate(1)
    return breaks


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_each_statement_is_run_once(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    migrations.add("0002_several", *SEVERAL)
    fleet.create(0, 1)
    for number in (0, 1):
        fleet.migrate_with_django(number, "fleet", "0001")
        fleet.execute(number, "INSERT INTO fleet_album (user_id, name) VALUES (1, 'x')")
    fleet.migrate_with_django(0)
    run: list[str] = []
    for attempt in range(60):
        # Every second time one more, as rolled-back statements run again.
        try:
            run += broken_off(fleet, monkeypatch, attempt % 2, before=before).run
        except pytest.fail.Exception:
            break
    fleet.assert_same(1, 0)
    assert fleet.execute(1, "SELECT label, place FROM fleet_album") == [("x", "here")]
    alters = [sql for sql in run if sql.startswith(("ALTER", "CREATE"))]
    assert len(alters) > 3
    # MODIFY has dropped the default: nobody can see whether this statement ran, so it may run
    # twice.
    repeated = {sql for sql in alters if alters.count(sql) > 1}
    assert all("DROP DEFAULT" in sql for sql in repeated)


def test_a_schema_that_is_neither_as_before_nor_as_after(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrations.add("0002_several", *SEVERAL)
    fleet.create(1)
    fleet.migrate_with_django(1, "fleet", "0001")
    broken_off(fleet, monkeypatch, 0, before=True)
    fleet.execute(1, "ALTER TABLE fleet_album ADD COLUMN by_hand integer NULL")
    with pytest.raises(OperationUnclear) as caught:
        fleet.migrate(1)
    message = str(caught.value)
    assert "'Add field place to album' was interrupted on fleet_00001" in message
    assert "neither as it was before the statement nor as it is after it" in message
    assert "ADD COLUMN" in message
    assert "fleet_album" in message.partition("Look with:")[2]
    fleet.execute(1, "ALTER TABLE fleet_album DROP COLUMN by_hand")
    fleet.migrate(1)
    assert ("fleet", "0002_several") in fleet.applied(1)


def test_a_shard_that_is_changed_meanwhile(
    fleet: Fleet, migrations: Migrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrations.add("0002_several", *SEVERAL)
    fleet.create(1)
    fleet.migrate_with_django(1, "fleet", "0001")
    execute = ScriptExecutor._execute

    def with_a_guest(executor: ScriptExecutor, statement: Any) -> None:
        execute(executor, statement)
        if "by_place" in statement.sql:
            execute(executor, type(statement)(("fleet", "x"), 0, "", "CREATE TABLE guest (id int)"))

    with monkeypatch.context() as patch:
        patch.setattr(ScriptExecutor, "_execute", with_a_guest)
        with pytest.raises(SchemaDiffers, match="table 'guest' is not expected"):
            fleet.migrate(1)
    with pytest.raises(SchemaDiffers, match="table 'guest' is not expected"):
        fleet.migrate(1)
    fleet.execute(1, "DROP TABLE guest")
    fleet.migrate(1)
