"""Recoveries: beside coordinators that are alive, beside each other, and beside other sites."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.db import (
    DatabaseError,
    IntegrityError,
    OperationalError,
    ProgrammingError,
    connections,
    transaction,
)

import sharded_orm
from sharded_orm.backends.pool import BoundedPool
from sharded_orm.backends.postgresql import branches
from sharded_orm.backends.two_phase.branch import BranchName, Fate, new_transaction
from sharded_orm.backends.two_phase.coordinator import Coordinator
from sharded_orm.exceptions import BranchesPrepared
from sharded_orm.two_phase import branch_watch, recovery
from sharded_orm.two_phase.recovery import Recovered
from tests.integration.two_phase.bank import START, Bank, in_child, kill_self
from tests.integration.two_phase.failpoint import failpoint
from tests.integration.two_phase.test_kills import count_moments, killed_at, recover
from tests.patience import PATIENCE
from tests.unit.backends.group.conftest import GROUP


def in_thread(work: Callable[[], Any]) -> Any:
    """Run ``work`` in a thread with connections of its own, and return the result."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE)
    return results[0]


def recovered(bank: Bank) -> list[Recovered]:
    return in_thread(lambda: recovery.recover(bank.model, grace=0))  # type: ignore[no-any-return]


def before_the_decision(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Call ``act`` when the branches are prepared and nothing is decided."""
    decide = Coordinator._decide

    def decide_later(self: Any, *members: Any) -> None:
        act()
        decide(self, *members)

    monkeypatch.setattr(Coordinator, "_decide", decide_later)


def orphan(bank: Bank, number: int, branch: BranchName) -> None:
    """Leave a prepared branch that takes one from an account."""
    wrapper = bank[number]
    wrapper.set_autocommit(False)
    wrapper.begin_branch(branch)
    bank.add(number, -1)
    wrapper.prepare_branch()
    wrapper.leave_branch()
    wrapper.set_autocommit(True)


def branch_on(bank: Bank, number: int, decider: str = "photos_00000") -> BranchName:
    return BranchName(new_transaction(decider), bank.model.schema_name(number))


def end_session_of(bank: Bank, number: int) -> None:
    """End the session of an open transaction on its server. On PostgreSQL, branches have none."""
    session = bank[number].connection.session
    if hasattr(session, "raw") and hasattr(session.raw, "thread_id"):
        session_id = session.raw.thread_id()

        def kill() -> None:
            with bank[number].cursor() as cursor:
                cursor.execute(f"KILL {session_id}")

        in_thread(kill)


def test_a_living_coordinator_is_waited_for(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Recovered] = []
    before_the_decision(monkeypatch, lambda: results.extend(recovered(bank)))
    bank.transfer(0, 8)
    assert [result.is_over for result in results] == [False]
    assert "still open" in results[0].outcome
    assert bank.balances() == [START + 1, START, START - 1, START]


def lose_the_branch(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator loses the session of a branch before it decides. A recovery finds the branch."""

    def act() -> None:
        end_session_of(bank, 8)
        recovered(bank)

    before_the_decision(monkeypatch, act)
    bank.transfer(0, 8)
    recover(bank)


def test_a_late_decision_finds_its_branches(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_the_branch(bank, monkeypatch)
    assert bank.balances() == [START + 1, START, START - 1, START]


def test_a_recovery_that_only_reads_the_decision_is_caught(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fate_of(self: Any, transaction: str, seconds: float) -> Fate:
        is_stored = transaction in bank.decisions(0)
        return Fate.COMMITTED if is_stored else Fate.ABORTED

    monkeypatch.setattr(type(bank[0]), "fate_of", fate_of)
    lose_the_branch(bank, monkeypatch)
    assert sum(bank.balances()) != 4 * START


def test_two_recoveries_at_once(bank: Bank) -> None:
    moments = count_moments(bank, 0, 8)
    # One process dies before the commit of the decider, the other one before that of the branch.
    assert killed_at(bank, moments - 4, 0, 8)
    assert killed_at(bank, moments - 2, 1, 9)
    assert len(bank.prepared()) == 2
    barrier = threading.Barrier(3)

    def work() -> list[Recovered]:
        barrier.wait()
        results = []
        deadline = time.monotonic() + PATIENCE
        while left := recovery.recover(bank.model, grace=0):
            results += left
            assert time.monotonic() < deadline
        return results

    threads = [threading.Thread(target=in_thread, args=(work,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert bank.prepared() == []
    assert bank.balances() == [START + 2, START + 1, START - 2, START - 1]


def test_branches_of_another_site_are_left_alone(bank: Bank) -> None:
    other = BranchName(new_transaction("photos_00000"), "of_another_site_008")
    orphan(bank, 8, other)
    try:
        assert recovery.recover(bank.model, grace=0) == []
        recovery.refuse_prepared(bank.model, bank.model.shards())
        assert bank.prepared() == [other]
    finally:
        bank[8].end_branch(other, commit=False)


def test_a_branch_whose_decider_is_unknown_is_left_and_named(bank: Bank) -> None:
    branch = branch_on(bank, 8, decider="albums_00007")
    orphan(bank, 8, branch)
    try:
        with pytest.raises(
            BranchesPrepared, match=r"'albums_00007'.*|transactions recover"
        ) as info:
            recovery.refuse_prepared(bank.model, bank.model.shards())
        assert branch.transaction in str(info.value) and "'photos_00008'" in str(info.value)
        # Shards that have nothing to do with it are free.
        recovery.refuse_prepared(bank.model, [bank[0].shard, bank[9].shard])
    finally:
        bank[8].end_branch(branch, commit=False)


def test_a_branch_that_has_changed_nothing(bank: Bank) -> None:
    """MariaDB lists it until it is ended, and then answers with an error."""

    def lock_only() -> None:
        with sharded_orm.atomic(GROUP, two_phase=True):
            bank.add(0, 1)
            bank.add(8, -1)
            with bank[9].cursor() as cursor:
                cursor.execute("SELECT balance FROM account FOR UPDATE")

    lock_only()
    assert bank.balances() == [START + 1, START, START - 1, START]

    def work() -> None:
        bank.close()
        with failpoint(moments - 4, kill_self):
            lock_only()

    with failpoint(-1, list) as counter:
        lock_only()
    moments = counter.passed
    bank.close()
    # The process dies when the decision is stored, and both branches are prepared.
    assert in_child(work) != 0
    assert len(bank.prepared()) == 2
    recover(bank)
    assert bank.balances() == [START + 3, START, START - 3, START]


def test_a_held_branch_is_left(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision is stored, and the coordinator is slow. MariaDB lets nobody else end its branch."""
    finish = Coordinator._finish
    results: list[Recovered] = []

    def finish_later(self: Any, *members: Any) -> None:
        results.extend(recovered(bank))
        finish(self, *members)

    monkeypatch.setattr(Coordinator, "_finish", finish_later)
    bank.transfer(0, 8)
    (result,) = results
    assert (result.outcome == "committed") or "still connected" in result.outcome
    assert bank.balances() == [START + 1, START, START - 1, START]
    assert bank.prepared() == []


def test_a_later_block_recovers_by_itself(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branch_watch, "INTERVAL", 0.0)
    monkeypatch.setattr(branch_watch, "GRACE", 0.3)
    bank.transfer(0, 8)
    orphan(bank, 9, branch_on(bank, 9))
    deadline = time.monotonic() + PATIENCE
    while bank.prepared():
        with sharded_orm.atomic(GROUP, two_phase=True):
            pass
        assert time.monotonic() < deadline
    assert bank.balance(9) == START


def test_old_decisions_are_deleted_that_no_branch_needs(bank: Bank) -> None:
    moments = count_moments(bank, 0, 8)
    bank.transfer(0, 8)
    assert killed_at(bank, moments - 2, 0, 9)
    (branch,) = bank.prepared()
    deciders = [bank[0].shard, bank[1].shard]
    with bank[0].cursor() as cursor:
        cursor.execute("UPDATE sharded_orm_decision SET decided_at = 1")
    bank.transfer(1, 8)
    assert len(bank.decisions(0)) == 4 and len(bank.decisions(1)) == 1
    assert recovery.forget_decisions(bank.model, deciders) == 3
    assert bank.decisions(0) == [branch.transaction] and len(bank.decisions(1)) == 1
    recover(bank)
    assert bank.balance(9) == START - 1
    assert recovery.forget_decisions(bank.model, deciders) == 1


def test_shards_that_are_not_migrated_are_named_with_the_remedy(bank: Bank) -> None:
    with bank[1].cursor() as cursor:
        cursor.execute("DROP TABLE sharded_orm_decision")
    with pytest.raises(ProgrammingError) as error:
        recovery.forget_decisions(bank.model, [bank[0].shard, bank[1].shard])
    assert "photos_00001' is one of the app" in error.value.__notes__[-1]
    assert "'manage.py migrate_shards'" in error.value.__notes__[-1]
    with pytest.raises(ProgrammingError) as error:
        bank[1].store_decision("0123456789abcdef.photos_00001")
    assert "'manage.py migrate_shards'" in error.value.__notes__[-1]


def test_only_a_missing_table_is_named_as_missing(bank: Bank) -> None:
    with bank[1].cursor() as cursor:
        cursor.execute("ALTER TABLE sharded_orm_decision RENAME COLUMN decided_at TO renamed")
    with pytest.raises(DatabaseError) as error:
        recovery.forget_decisions(bank.model, [bank[1].shard])
    assert "is one of the app" not in "".join(error.value.__notes__)


def test_a_block_of_a_new_process_names_the_branch_that_it_waits_for(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branch_watch, "GRACE", 0)
    branch = branch_on(bank, 8)
    orphan(bank, 8, branch)
    wait = {
        "mysql": ["SELECT balance FROM account WHERE id = 1 FOR UPDATE WAIT 1"],
        "postgresql": ["SET LOCAL lock_timeout = '10ms'", "SELECT balance FROM account FOR UPDATE"],
    }[bank[8].vendor]
    with pytest.raises(OperationalError) as caught, sharded_orm.atomic(GROUP, two_phase=True):
        bank.add(0, 1)
        with bank[8].cursor() as cursor:
            for statement in wait:
                cursor.execute(statement)
    (note,) = [note for note in caught.value.__notes__ if "transactions recover" in note]
    assert repr(branch.transaction) in note
    # The next block looks for the branch, and ends it.
    bank.transfer(0, 8)
    assert bank.balances() == [START + 1, START, START - 1, START]


def test_the_error_of_a_lock_waits_for_no_session(
    nodes: list[dict[str, Any]], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in nodes:
        node["POOL"] = {"MAX": 1, "TIMEOUT": 0.05}
    bank: Bank = request.getfixturevalue("bank")
    orphan(bank, 8, branch_on(bank, 8))
    with sharded_orm.atomic(GROUP, two_phase=True):
        bank.add(0, 0)
        with bank[8].cursor() as cursor:
            cursor.execute("SELECT 1")
            refused: list[object] = []
            take = BoundedPool._take_permit

            def look(self: Any, timeout: float) -> Any:
                permit = take(self, timeout)
                if permit is None:
                    refused.append(self)
                return permit

            monkeypatch.setattr(BoundedPool, "_take_permit", look)
            with pytest.raises(OperationalError):
                cursor.execute("SELECT balance FROM account WHERE id = 1 FOR UPDATE NOWAIT")
        assert refused == []
        bank.group.set_rollback(True)


def test_the_next_block_looks_for_no_branch_after_a_duplicate_row(bank: Bank) -> None:
    bank.transfer(0, 8)
    with pytest.raises(IntegrityError), sharded_orm.atomic(GROUP, two_phase=True):
        bank.add(0, 1)
        with bank[8].cursor() as cursor:
            cursor.execute("INSERT INTO account VALUES (1, 0)")
    assert branch_watch.watch._next


def test_waits_of_a_block_are_limited_on_postgresql(bank: Bank) -> None:
    if bank[0].vendor != "postgresql":
        pytest.skip("MariaDB limits each wait")

    def limits() -> list[str]:
        found = []
        with sharded_orm.atomic(GROUP, two_phase=True):
            for number in (0, 8):
                with bank[number].cursor() as cursor:
                    cursor.execute("SHOW lock_timeout")
                    found.append(cursor.fetchone()[0])
        return found

    assert limits() == ["50s", "50s"]
    with sharded_orm.atomic(GROUP, two_phase=True), bank[0].cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("50s",)
    with transaction.atomic(using=GROUP), bank[0].cursor() as cursor:
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("0",)
    with transaction.atomic(using=bank.alias(0)), bank[0].cursor() as cursor:
        # A limit of the project stays.
        cursor.execute("SET LOCAL lock_timeout = '7s'")
        cursor.execute(branches.WAIT_LIMIT.decode())
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("7s",)
