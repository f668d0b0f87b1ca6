"""Blocks with ``two_phase=True``: nesting, savepoints, errors, and how they are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, OperationalError, transaction

import sharded_orm
from sharded_orm.backends.two_phase import coordinator, old_decisions
from sharded_orm.exceptions import TwoPhaseMisused, TwoPhaseUnavailable
from tests.conftest import service_missing
from tests.integration.group.deadlocks import ROWS, deadlock
from tests.integration.two_phase.bank import START, Bank
from tests.integration.two_phase.conftest import settings_of
from tests.photos.models import Photo
from tests.services import ServiceMissing
from tests.services.postgresql import PostgreSQLServer
from tests.unit.backends.group.conftest import GROUP, Shards, shards
from tests.unit.backends.group.conftest import folder as folder

sqlite_shards = shards


def test_one_shard_commits_plainly(bank: Bank) -> None:
    with sharded_orm.atomic(GROUP, two_phase=True):
        bank.add(8, 1)
    with sharded_orm.atomic(GROUP, two_phase=True):
        bank.add(0, 1)
        assert bank[8].cursor() is not None
        with bank[9].cursor() as cursor:
            cursor.execute("SELECT balance FROM account")
            assert cursor.fetchone() == (START,)
    assert bank.balances() == [START + 1, START, START + 1, START]
    assert bank.decisions(0) == bank.decisions(8) == []


def test_each_shard_tells_that_it_is_in_two_phases(bank: Bank) -> None:
    with sharded_orm.atomic(GROUP, two_phase=True):
        bank.add(0, 1)
        bank.add(8, -1)
        assert bank[0].in_two_phase and bank[8].in_two_phase
    with transaction.atomic(using=GROUP):
        bank.add(8, 1)
        assert not bank[8].in_two_phase


def test_a_shard_that_was_only_read_is_not_prepared(bank: Bank) -> None:
    with sharded_orm.atomic(GROUP, two_phase=True):
        with bank[0].cursor() as cursor:
            cursor.execute("SELECT balance FROM account")
        bank.add(8, 1)
        bank.add(9, -1)
    assert bank.balances() == [START, START, START + 1, START - 1]
    # Nevertheless the first shard decides, because the branches bear its name.
    assert len(bank.decisions(0)) == 1


def test_savepoints_in_branches(bank: Bank) -> None:
    with sharded_orm.atomic(GROUP, two_phase=True):
        bank.add(0, 1)
        bank.add(8, -1)
        with pytest.raises(ZeroDivisionError), transaction.atomic(using=GROUP):
            bank.add(8, -100)
            1 / 0  # noqa: B018
        with pytest.raises(DatabaseError), transaction.atomic(using=bank.alias(8)):
            bank.add(8, -100)
            with bank[8].cursor() as cursor:
                cursor.execute("INSERT INTO account VALUES (1, 0)")
        with sharded_orm.atomic(GROUP, two_phase=True):
            bank.add(8, -1)
    assert bank.balances() == [START + 1, START, START - 2, START]
    assert len(bank.decisions(0)) == 1


def test_a_branch_that_cannot_be_prepared_undoes_all(bank: Bank) -> None:
    with pytest.raises(DatabaseError), sharded_orm.atomic(GROUP, two_phase=True):
        bank.add(0, 1)
        bank.add(8, -1)
        bank.add(9, -1)
        bank[9].connection.session.close()
    bank.close()
    assert bank.balances() == [START] * 4
    assert bank.prepared() == []
    bank.transfer(9, 0)


def test_a_swallowed_error_of_a_statement_commits_nothing(bank: Bank) -> None:
    with pytest.raises(transaction.TransactionManagementError):
        with sharded_orm.atomic(GROUP, two_phase=True):
            bank.add(0, 1)
            bank.add(8, -1)
            try:
                with transaction.atomic(using=bank.alias(8), savepoint=False):
                    raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            bank.add(8, -1)
    assert bank.balances() == [START] * 4


def test_hooks_run_after_the_last_commit(bank: Bank) -> None:
    seen: list[int] = []
    with sharded_orm.atomic(GROUP, two_phase=True):
        bank.add(0, 1)
        transaction.on_commit(lambda: seen.append(bank.balance(8)), using=bank.alias(0))
        bank.add(8, -1)
    assert seen == [START - 1]


def test_as_a_decorator(bank: Bank) -> None:
    @sharded_orm.atomic(GROUP, two_phase=True)
    def move(count: int) -> None:
        if count:
            move(count - 1)
        bank.add(0, 1)
        bank.add(8, -1)

    move(2)
    move(0)
    assert bank.balances() == [START + 4, START, START - 4, START]


def test_decisions_that_are_over_are_deleted_by_the_next_one(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(old_decisions, "KEPT_FOR", 0.0)
    for _ in range(3):
        bank.transfer(0, 8)
    assert len(bank.decisions(0)) == 1


def test_in_a_test_case_nothing_is_committed(bank: Bank) -> None:
    block: Any = transaction.atomic(using=GROUP)
    block._from_testcase = True
    with block:
        bank.transfer(0, 8)
        transaction.set_rollback(True, using=GROUP)
    assert bank.balances() == [START] * 4


@pytest.mark.parametrize("nodes", ["mariadb"], indirect=True)
@pytest.mark.parametrize("victim", [0, 8])
def test_a_deadlock_that_the_program_ignores(bank: Bank, victim: int) -> None:
    """The transaction of the decider is an ordinary one, so later statements could be committed alone."""
    with bank[victim].cursor() as cursor:
        cursor.execute("CREATE TABLE thing (value integer UNIQUE)")
        cursor.executemany("INSERT INTO thing VALUES (%s)", [(value,) for value in ROWS])
    with pytest.raises(transaction.TransactionManagementError, match="block of its own"):
        with sharded_orm.atomic(GROUP, two_phase=True):
            bank.add(0, 1)
            bank.add(8, -1)
            with bank[victim].cursor() as cursor:
                cursor.execute("UPDATE thing SET value = 99 WHERE value = 100")
                with deadlock(bank, victim) as sql:
                    with pytest.raises(OperationalError) as caught:
                        cursor.execute(sql)
                    assert caught.value.args[0] == 1213
    assert bank.balances() == [START] * 4
    bank.transfer(0, 8)
    assert bank.prepared() == []


# ##### Refusals #####


def test_an_open_ordinary_block(bank: Bank) -> None:
    for alias in (GROUP, bank.alias(8)):
        with pytest.raises(TwoPhaseMisused, match="open transaction of group 'photos'"):
            with transaction.atomic(using=alias):
                bank.add(8, 1)
                with sharded_orm.atomic(GROUP, two_phase=True):
                    raise AssertionError("entered")
    assert bank.balances() == [START] * 4
    bank.transfer(0, 8)


def test_too_many_shards(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "MAX_SHARDS", 2)
    with sharded_orm.atomic(GROUP, two_phase=True):
        bank.add(0, 1)
        bank.add(8, 1)
        with pytest.raises(TwoPhaseMisused, match="can use 2 shards, and 'photos_00009'"):
            bank.add(9, 1)
        with pytest.raises(transaction.TransactionManagementError):
            bank.add(9, 1)
    assert bank.balances() == [START] * 4


def test_statements_that_a_branch_cannot_have(bank: Bank) -> None:
    statements = ["COMMIT", "ROLLBACK"]
    if "mysql" in type(bank[0]).__module__:
        statements += ["CREATE TABLE other (id integer)", "SET @mark = 1"]
    else:
        statements += ["PREPARE TRANSACTION 'mine'", "SET statement_timeout = 1000"]
    for number in (0, 8):
        for sql in statements:
            with pytest.raises(TwoPhaseMisused, match=r"commits implicitly|state"):
                with sharded_orm.atomic(GROUP, two_phase=True):
                    bank.add(0, 1)
                    bank.add(8, -1)
                    with bank[number].cursor() as cursor:
                        cursor.execute(sql)
            assert bank.balances() == [START] * 4
    bank.transfer(0, 8)


def test_the_app_is_missing(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.apps import apps

    monkeypatch.delitem(apps.app_configs, "sharded_orm_two_phase")
    with pytest.raises(TwoPhaseUnavailable, match=r"'sharded_orm\.contrib\.two_phase'"):
        bank.transfer(0, 8)


def test_the_table_is_missing(bank: Bank) -> None:
    with bank[0].cursor() as cursor:
        cursor.execute("DROP TABLE sharded_orm_decision")
    with pytest.raises(DatabaseError) as info:
        bank.transfer(0, 8)
    assert "manage.py migrate_shards" in str(info.value.__notes__)
    assert bank.balances() == [START] * 4


def test_sqlite(sqlite_shards: Shards, app: None) -> None:
    with pytest.raises(TwoPhaseUnavailable, match="SQLite cannot prepare a transaction"):
        with sharded_orm.atomic(GROUP, two_phase=True):
            raise AssertionError("entered")
    with pytest.raises(CommandError, match="SQLite cannot prepare a transaction"):
        call_command("transactions", "recover", group=GROUP)


def test_rows_of_two_groups_and_several_rows_without_two_phase() -> None:
    with pytest.raises(TwoPhaseMisused, match="of one group"):
        sharded_orm.atomic(Photo(user_id=1), "albums", two_phase=True)
    with pytest.raises(TwoPhaseMisused, match="of one group"):
        sharded_orm.atomic(two_phase=True)
    with pytest.raises(TwoPhaseMisused, match=r"it takes one row.*need two_phase=True"):
        sharded_orm.atomic(Photo(user_id=1), Photo(user_id=2))


class TestServerThatPreparesNothing:
    @pytest.fixture
    def server(self) -> Iterator[PostgreSQLServer]:
        try:
            with PostgreSQLServer(max_prepared_transactions="0") as server:
                yield server
        except ServiceMissing as exc:
            service_missing(exc)

    @pytest.fixture
    def nodes(self, postgresql: Any, server: PostgreSQLServer) -> list[dict[str, Any]]:
        return settings_of([postgresql, server.address])

    def test_it_is_refused_before_anything_is_sent(self, bank: Bank) -> None:
        with sharded_orm.atomic(GROUP, two_phase=True):
            bank.add(0, 1)
            with pytest.raises(TwoPhaseUnavailable, match="max_prepared_transactions is 0"):
                bank.add(8, -1)
            assert bank[8].connection.session is None
        assert bank.balances() == [START] * 4


class TestPooler:
    @pytest.fixture
    def nodes(self, pgbouncer_nodes: Any) -> list[dict[str, Any]]:
        return settings_of(pgbouncer_nodes)

    def test_all_shards_commit(self, bank: Bank) -> None:
        bank.transfer(0, 8, 9)
        assert bank.balances() == [START + 2, START, START - 1, START - 1]
        assert bank.prepared() == []
