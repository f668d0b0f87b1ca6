"""Errors at the end of a block that come from the program itself, and blocks that are left wrongly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import OperationalError, transaction

import sharded_orm
from sharded_orm.exceptions import CommitOutcomeUnknown, TwoPhaseMisused
from sharded_orm.two_phase.branch_watch import watch
from tests.integration.two_phase.bank import START, Bank
from tests.integration.two_phase.test_kills import recover
from tests.unit.backends.group.conftest import GROUP


@contextlib.contextmanager
def failing_transfer(bank: Bank, *errors: type[BaseException]) -> Iterator[None]:
    """A block in two phases that takes money from shard 8 for shard 0, and ends with an error.

    The caller's statements run at the end of the block.
    """
    with pytest.raises(errors), sharded_orm.atomic(GROUP, two_phase=True):
        bank.add(0, 1)
        bank.add(8, -1)
        yield


class Interruption:
    """Watches a transaction, and raises an error as soon as its commit is known to have succeeded."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def before_commit(self) -> None: ...
    def savepoint(self, sid: str) -> None: ...
    def savepoint_rolled_back(self, sid: str) -> None: ...

    def ended(self, committed: bool | None) -> None:
        if committed:
            raise self.error


@pytest.mark.parametrize("error", [TimeoutError(), OperationalError()], ids=["timeout", "database"])
@pytest.mark.parametrize("numbers", [(0,), (0, 8)], ids=["alone", "two"])
def test_an_error_after_the_decision_leaves_the_branches(
    bank: Bank, error: Exception, numbers: tuple[int, ...]
) -> None:
    decider: Any = bank[0]
    with pytest.raises(CommitOutcomeUnknown), sharded_orm.atomic(GROUP, two_phase=True):
        for number in numbers:
            bank.add(number, 1)
        decider.commit_watchers += (Interruption(error),)
    recover(bank)
    assert [bank.balance(number) for number in numbers] == [START + 1] * len(numbers)
    bank.transfer(0, 8)


@pytest.mark.parametrize("point", [1, 2])
def test_an_interrupted_branch_is_not_bound_in_the_next_block(bank: Bank, point: int) -> None:
    branch: Any = bank[8]
    leave = branch.leave_group_levels

    def interrupted(depth: int, *, commit: bool) -> None:
        if point == 2 or not commit:
            leave(depth, commit=commit)
        if commit:
            raise KeyboardInterrupt

    with failing_transfer(bank, KeyboardInterrupt):
        branch.leave_group_levels = interrupted
    del branch.leave_group_levels
    bank.close()
    recover(bank)
    assert bank.balances() == [START + 1, START, START - 1, START]
    with failing_transfer(bank, ZeroDivisionError):
        1 / 0  # noqa: B018
    assert bank.balances() == [START + 1, START, START - 1, START]


@pytest.mark.parametrize("is_sent", [False, True])
def test_an_interrupted_decision_is_as_one_whose_answer_is_lost(bank: Bank, is_sent: bool) -> None:
    """The branches stay prepared, and a recovery does with them what the decider has done."""
    decider: Any = bank[0]
    commit = decider._commit

    def interrupted() -> None:
        if is_sent:
            commit()
        raise KeyboardInterrupt

    # PostgreSQL refuses to switch autocommit on in an open transaction, and this error takes the
    # place of the interruption.
    with failing_transfer(bank, KeyboardInterrupt, CommitOutcomeUnknown):
        decider._commit = interrupted
    del decider._commit
    assert len(bank.prepared()) == 1
    recover(bank)
    assert not bank.prepared()
    change = 1 if is_sent else 0
    assert bank.balances() == [START + change, START, START - change, START]
    bank.transfer(0, 8)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OperationalError])
def test_a_recovery_is_told_of_branches_if_the_decider_cannot_be_closed(
    bank: Bank, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    decider: Any = bank[0]
    close, note = decider.close, watch.note
    left: list[bool] = []

    def recorded(shards: Any, is_left: bool) -> None:
        left.append(is_left)
        note(shards, is_left)

    def interrupted() -> None:
        del decider._commit
        raise KeyboardInterrupt

    def interrupted_close() -> None:
        del decider.close
        close()
        raise error

    monkeypatch.setattr(watch, "note", recorded)
    # An error of close() must not take the place of CommitOutcomeUnknown. An interruption may.
    with failing_transfer(bank, KeyboardInterrupt, CommitOutcomeUnknown):
        decider._commit, decider.close = interrupted, interrupted_close
    # On MariaDB, the session stays open, because autocommit is on after the interruption.
    decider.__dict__.pop("close", None)
    assert left == [True]
    recover(bank)
    assert bank.balances() == [START] * 4


def test_a_block_on_a_shard_that_is_still_open(bank: Bank) -> None:
    inner = transaction.atomic(bank[8].alias)
    with (
        pytest.raises(TwoPhaseMisused, match="still open"),
        sharded_orm.atomic(GROUP, two_phase=True),
    ):
        bank.add(0, 1)
        inner.__enter__()
        bank.add(8, -1)
    inner.__exit__(None, None, None)
    assert bank.balances() == [START] * 4


def test_a_statement_that_was_not_sent_is_no_write(bank: Bank) -> None:
    with sharded_orm.atomic(GROUP, two_phase=True):
        bank.add(0, 1)
        bank.add(9, -1)
        with pytest.raises(Exception), bank[8].cursor() as cursor:  # noqa: B017, PT011
            cursor.execute("UPDATE account SET balance = %s, id = %s", [1])
        bank[8].needs_rollback = False
    assert bank.balances() == [START + 1, START, START, START - 1]


def test_autocommit_after_an_interrupted_end_commits_nothing(bank: Bank) -> None:
    wrapper: Any = bank[8]
    rollback = wrapper._rollback

    def interrupted() -> None:
        raise KeyboardInterrupt

    # PostgreSQL refuses to switch autocommit on, and this error takes the place of the interruption.
    with failing_transfer(bank, KeyboardInterrupt, ZeroDivisionError):
        wrapper._rollback = interrupted
        1 / 0  # noqa: B018
    wrapper._rollback = rollback
    bank.close()
    assert bank.balances() == [START] * 4


def test_a_session_with_state(bank: Bank) -> None:
    with bank[8].cursor() as cursor:
        sql = "SET @mark = 1" if bank[8].vendor == "mysql" else "SET statement_timeout = 99999"
        cursor.execute(sql)
    with pytest.raises(TwoPhaseMisused, match="state of its own"):
        bank.transfer(0, 8)
    bank[8].close()
    assert bank.balances() == [START] * 4


@pytest.mark.parametrize("ends", [True, False], ids=["commit", "refusal"])
def test_a_function_that_writes(bank: Bank, ends: bool) -> None:
    update = "UPDATE account SET balance = 0"
    with bank[8].cursor() as cursor:
        cursor.execute(
            f"CREATE FUNCTION take() RETURNS void LANGUAGE sql AS '{update}'"
            if bank[8].vendor == "postgresql"
            else f"CREATE FUNCTION take() RETURNS int BEGIN {update}; RETURN 1; END"
        )
    bank[8].close()
    with contextlib.suppress(RuntimeError), sharded_orm.atomic(GROUP, two_phase=True):
        bank.add(0, 1)
        bank.add(9, -1)
        with bank[8].cursor() as cursor:
            cursor.execute("SELECT take()")
        assert not bank[8].reads_as_autocommit()
        if not ends:
            raise RuntimeError
    assert bank.balance(8) == (0 if ends else START)


def test_a_node_without_autocommit(bank: Bank) -> None:
    bank.close()
    wrapper = bank[8]
    wrapper.settings_dict["AUTOCOMMIT"] = False
    try:
        with pytest.raises(TwoPhaseMisused, match="autocommit"):
            bank.transfer(0, 8)
    finally:
        wrapper.close()
        wrapper.settings_dict["AUTOCOMMIT"] = True
    assert bank.balances() == [START] * 4
