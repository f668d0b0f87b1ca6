"""Many shards: in threads, from one recording, and inspected with few queries."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connections
from django.db.models.signals import post_migrate, pre_migrate
from django.test.utils import CaptureQueriesContext

from sharded_orm.models import OperationScript
from sharded_orm.operations.exceptions import InvalidMigrationTarget, OperationStopped
from sharded_orm.operations.migrate import MigrateOptions, Migrator
from sharded_orm.operations.runs import journal
from tests.integration.migrate.engine.fleets import NEVER, Fleet, Migrations
from tests.patience import PATIENCE

pytestmark = pytest.mark.every_backend


def in_threads(work: Callable[[int], Any], numbers: list[int]) -> None:
    def one(number: int) -> None:
        try:
            work(number)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(numbers)) as threads:
        for done in [threads.submit(one, number) for number in numbers]:
            done.result()


def test_shards_at_once_share_what_was_recorded(fleet: Fleet) -> None:
    numbers = [0, 1, 2, 4, 5, 6]
    fleet.create(3, *numbers)
    fleet.migrate_with_django(3)
    with fleet.run() as run:
        migrator = Migrator(fleet.group, MigrateOptions(), journal.Scripts())
        run.create_steps(fleet.shard(number).alias for number in numbers)

        def work(number: int) -> None:
            step = run.step(fleet.shard(number).alias)
            migrator.migrate(fleet.shard(number), step, stopping=NEVER)

        in_threads(work, numbers)
        # To 0024; of 0026; both parts of the mixed 0028; of the apps that come after it.
        assert OperationScript.objects.using("default").filter(run=run.id).count() == 5
    for number in numbers:
        fleet.assert_same(number, 3)


def test_a_survey_asks_each_node_once(fleet: Fleet) -> None:
    fleet.create(0, 1, 2, 4, 5)
    for number in (0, 4, 5):
        fleet.migrate_with_django(number)
    fleet.migrate_with_django(5, "fleet", "0027")
    migrator = Migrator(fleet.group, MigrateOptions(), journal.Scripts())
    shards = list(fleet.group.shards())
    survey = migrator.applied_state(shards)
    assert survey.current == 2
    assert [shard.number for shard in survey.behind] == [1, 2, 5]
    assert [shard.number for shard in survey.missing] == [3, 6, 7]
    assert survey.unreachable == {}
    assert sorted(survey.count.values()) == [1, 2, 5]
    assert survey.count[""] == 5
    assert [("fleet", "0028_photo_mood", False)] in survey.plans.values()


@pytest.mark.mysql_settings
def test_what_one_more_column_costs(packets: list[str], fleet: Fleet) -> None:
    """Beside its statements: a lock, three reads of the state, and two entries of the journal."""
    fleet.create(0, 1)
    for number in (0, 1):
        fleet.migrate_with_django(number, "fleet", "0022")
    # Packets are counted on sessions that are opened from now on.
    fleet.connection(0).node_pool.dispose()
    fleet.migrate(0, 1, target=("fleet", "0023"))
    first, second = [number for number, packet in enumerate(packets) if "'done'" in packet][:2]
    sent = [packet for packet in packets[first + 1 : second + 1] if "SET SESSION" not in packet]
    expected = [
        r"USE .*; SELECT GET_LOCK",
        r"SELECT default_.*; SHOW FULL TABLES; .*routines",
        r"SHOW CREATE TABLE .*; SHOW CREATE TABLE",
        r"SELECT `app`, `name` FROM `django_migrations`",
        r"(USE .*; )?UPDATE `sharded_orm_step` .*'running'",
        r"ALTER TABLE .* ADD COLUMN",
        r"(USE .*; )?ALTER TABLE .* DROP DEFAULT",
        r"USE [^;]*; SHOW FULL TABLES; SHOW CREATE TABLE `fleet_photo`$",
        r"INSERT INTO `django_migrations`",
        r"DO RELEASE_LOCK",
        r"(USE .*; )?UPDATE `sharded_orm_step` .*'done'",
    ]
    assert len(sent) == len(expected), "\n".join(sent)
    for packet, pattern in zip(sent, expected, strict=True):
        assert re.match(pattern, packet, re.DOTALL), (pattern, packet)


def test_a_current_shard_costs_nothing(fleet: Fleet) -> None:
    fleet.create(0, 1, 2)
    for number in (0, 1, 2):
        fleet.migrate_with_django(number)
    migrator = Migrator(fleet.group, MigrateOptions(), journal.Scripts())
    asked = [connections[fleet.shard(number).alias] for number in (0, 1, 2)]
    with CaptureQueriesContext(asked[0]), CaptureQueriesContext(asked[1]) as one:
        with CaptureQueriesContext(asked[2]) as two:
            assert (
                migrator.applied_state([fleet.shard(number) for number in (0, 1, 2)]).current == 3
            )
        # The first shard in this state is queried for it; the others need no query.
        assert len(one) == len(two) == 0


def test_only_shards_with_a_plan_are_signalled(fleet: Fleet) -> None:
    fleet.create(1)
    events: list[tuple[str, Any]] = []

    def hear(sender: Any, using: str, plan: Any, apps: Any, signal: Any, **kwargs: Any) -> None:
        if sender.label == "fleet" and using == "fleet_00001":
            state = {model._meta.model_name for model in apps.get_models()}
            events.append(
                ("pre" if signal is pre_migrate else "post", (len(plan), "photo" in state))
            )

    for signal in (pre_migrate, post_migrate):
        signal.connect(hear)
    try:
        fleet.migrate(1)
    finally:
        for signal in (pre_migrate, post_migrate):
            signal.disconnect(hear)
    (pre, post) = events
    assert pre[0] == "pre" and post[0] == "post"
    assert pre[1][0] == post[1][0] > 28
    assert (pre[1][1], post[1][1]) == (False, True)


def test_ids_of_new_tables_begin_at_those_of_the_shard(fleet: Fleet) -> None:
    """The template has no counters; ``post_migrate`` sets them."""
    from tests.fleet.models import Receipt

    fleet.create(2)
    fleet.migrate(2)
    made = Receipt.objects.using(fleet.shard(2).alias)
    field: Any = Receipt._meta.pk
    fleet.execute(2, "INSERT INTO fleet_receipt (user_id) VALUES (1)")
    assert made.get().pk in field.counted_on(fleet.shard(2))


RECEIPT = """migrations.CreateModel("Receipt", [
    ("id", PackedIDField(primary_key=True, type_id=3)), ("user_id", models.BigIntegerField()){more}
])"""


@pytest.mark.mysql_settings
@pytest.mark.parametrize("more", ["", ', ("x", models.IntegerField(null=True))'])
def test_ids_of_tables_that_are_made_anew(fleet: Fleet, migrations: Migrations, more: str) -> None:
    """The columns that were read of a table do not apply to a new table of the same name."""
    fleet.create(1)
    fleet.migrate_with_django(1, "fleet")
    target = ("fleet", None)
    migrations.add("0002_receipt", RECEIPT.format(more=""))
    fleet.migrate(1, target=target)
    migrations.add("0003_again", 'migrations.DeleteModel("Receipt")', RECEIPT.format(more=more))
    fleet.migrate(1, target=target)
    ((_, definition),) = fleet.execute(1, "SHOW CREATE TABLE fleet_receipt")
    assert "AUTO_INCREMENT=" in definition


@pytest.mark.mysql_settings
def test_shards_whose_schemas_have_other_defaults(fleet: Fleet, migrations: Migrations) -> None:
    """One after the other, on a session that was in the template of the other one."""
    fleet.create(4, 5)
    schema = fleet.connection(5).settings_dict["NAME"]
    fleet.execute(5, f"ALTER DATABASE `{schema}` COLLATE utf8mb4_unicode_ci")
    for number in (4, 5):
        fleet.migrate_with_django(number, "fleet")
    place = 'migrations.AddField("album", "place", models.CharField(max_length=9, null=True))'
    migrations.add("0002_place", place)
    fleet.connection(4).node_pool.dispose()
    fleet.migrate(4, 5, target=("fleet", None))
    for number in (4, 5):
        assert ("fleet", "0002_place") in fleet.applied(number)


def test_it_stops_between_two_things_and_goes_on(fleet: Fleet) -> None:
    fleet.create(0, 1)
    for number in (0, 1):
        fleet.migrate_with_django(number, "fleet", "0020")
    fleet.migrate_with_django(0)
    for answers in range(1, 6):
        left = iter([False] * (answers * 3) + [True] * 1000)
        try:
            fleet.migrate(1, stopping=lambda left=left: next(left))
        except OperationStopped:
            continue
    fleet.migrate(1)
    fleet.assert_same(1, 0)


@pytest.mark.mysql_settings
def test_it_waits_for_a_session_that_still_migrates_the_shard(fleet: Fleet) -> None:
    """For example the session of a killed process whose last statement is still running."""
    fleet.create(1)
    alias = fleet.shard(1).alias
    waits = threading.Event()

    def stopping() -> bool:
        waits.set()
        return False

    other = connections[alias].copy()
    assert other.lock_schema(0)
    with ThreadPoolExecutor(1) as threads:

        def work() -> None:
            try:
                fleet.migrate(1, stopping=stopping)
            finally:
                connections.close_all()

        done = threads.submit(work)
        assert waits.wait(PATIENCE)
        waits.clear()
        assert waits.wait(PATIENCE)
        assert fleet.schema(1).is_empty
        other.close()
        done.result(PATIENCE)
    assert ("fleet", "0028_photo_mood") in fleet.applied(1)


def test_a_target_that_does_not_exist_is_told_before_a_shard_is_made(fleet: Fleet) -> None:
    migrator = Migrator(fleet.group, MigrateOptions(("fleet", "0099")), journal.Scripts())
    with pytest.raises(InvalidMigrationTarget):
        migrator.applied_state(list(fleet.group.shards()))
