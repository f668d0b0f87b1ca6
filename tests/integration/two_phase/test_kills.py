"""A process, or a server, is killed before and after every packet of a transaction in two phases."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from itertools import combinations
from random import Random
from typing import Any

import pytest
from django.db import Error

from sharded_orm.backends.two_phase import old_decisions
from sharded_orm.backends.two_phase.coordinator import Coordinator
from sharded_orm.two_phase import branch_watch, recovery
from tests.integration.two_phase.bank import NUMBERS, START, Bank, in_child, kill_self, start
from tests.integration.two_phase.failpoint import failpoint
from tests.patience import PATIENCE

#: More moments than a transfer has.
MANY = 60
#: Rounds of the storm, with three processes each.
ROUNDS = 250


def recover(bank: Bank) -> None:
    """Recover until nothing is left: a server may need a moment to notice that a client has gone."""
    deadline = time.monotonic() + PATIENCE
    while any(not result.is_over for result in recovery.recover(bank.model, grace=0)):
        assert time.monotonic() < deadline
    assert bank.prepared() == []


def count_moments(bank: Bank, *numbers: int) -> int:
    """Do a transfer, and return the number of its moments; see :func:`failpoint`."""
    bank.transfer(*numbers)  # A process asks each server some questions only once.
    with failpoint(-1, list) as counter:
        bank.transfer(*numbers)
    return counter.passed


def killed_at(bank: Bank, point: int, *numbers: int) -> bool:
    """Run a transfer in a process that dies at a moment. Return False if it has ended before."""

    def work() -> None:
        bank.close()
        with failpoint(point, kill_self):
            bank.transfer(*numbers)

    bank.close()
    return in_child(work) != 0


def interrupt() -> None:
    raise KeyboardInterrupt


def sweep(bank: Bank, *numbers: int) -> list[list[int]]:
    """Kill a transfer at each moment, and recover. Return the balances afterwards, one list for each."""
    results = []
    for point in range(MANY):
        if not killed_at(bank, point, *numbers):
            return results
        recover(bank)
        results.append(bank.balances())
    raise AssertionError("the transfer has too many packets")


def all_moved(balances: list[int], before: list[int], *numbers: int) -> bool:
    """Whether a transfer has been done. Fails if it has been done in part."""
    after = list(before)
    after[NUMBERS.index(numbers[0])] += len(numbers) - 1
    for number in numbers[1:]:
        after[NUMBERS.index(number)] -= 1
    assert balances in (before, after)
    return balances == after


def test_no_moment_depends_on_the_time(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests count the moments of one transfer, and kill another one at a moment from its end."""
    counts = set()
    for seconds in (PATIENCE, 0.0):
        monkeypatch.setattr(branch_watch, "INTERVAL", seconds)
        monkeypatch.setattr(old_decisions, "KEPT_FOR", seconds)
        branch_watch.watch.__init__()  # type: ignore[misc]  # It forgets when it has to search next.
        counts.add(count_moments(bank, 0, 8))
    assert len(counts) == 1


def test_a_process_killed_at_every_moment(bank: Bank) -> None:
    """Three shards: two of them on one server, in two branches."""
    numbers = (0, 8, 9)
    before = [START] * len(NUMBERS)
    outcomes = []
    for balances in sweep(bank, *numbers):
        outcomes.append(all_moved(balances, before, *numbers))
        before = balances
    # The early deaths undo the transfer, the late ones do not.
    assert outcomes == sorted(outcomes) and set(outcomes) == {False, True}


@pytest.mark.long
def test_an_interruption_at_every_moment(bank: Bank) -> None:
    """The process lives on, and its next transaction is a new one."""
    before, numbers = [START] * len(NUMBERS), (0, 8)
    bank.transfer(*numbers)  # A process asks each server some questions only once.
    before = bank.balances()
    for point in range(MANY):
        with failpoint(point, interrupt) as counter:
            # The end of a connection may come after the interruption, and hide it.
            with suppress(KeyboardInterrupt, Error):
                bank.transfer(*numbers)
        if counter.passed <= point:
            break
        bank.close()  # As at the end of a request.
        recover(bank)
        balances = bank.balances()
        all_moved(balances, before, *numbers)
        before = balances
    assert 10 < point < MANY - 1


@pytest.mark.long
def test_a_storm_of_kills(bank: Bank) -> None:
    """Three processes at a time die anywhere in transfers that wait for each other's rows."""
    random = Random(7)
    # Each process does two transfers. A fifth of the processes live on, whatever a server's moments are.
    ends = {
        numbers: count_moments(bank, *numbers) * 2 * 5 // 4
        for count in (2, 3)
        for numbers in combinations(NUMBERS, count)
    }
    killed = 0
    for _ in range(ROUNDS):
        pids = set()
        for _ in range(3):
            # In one order, because no server sees that transactions wait for each other on two servers.
            numbers = tuple(sorted(random.sample(NUMBERS, random.choice((2, 2, 3)))))
            point = random.randrange(ends[numbers])

            def work(numbers: tuple[int, ...] = numbers, point: int = point) -> None:
                bank.close()
                with failpoint(point, kill_self):
                    bank.transfer(*numbers)
                    bank.transfer(*numbers, amount=-2)

            bank.close()
            pids.add(start(work))
        while pids:
            # A branch that waits for its recovery makes other processes wait for its rows.
            recovery.recover(bank.model, grace=0)
            for pid in list(pids):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    pids.remove(pid)
                    killed += os.WIFSIGNALED(status)
        recover(bank)
        assert sum(bank.balances()) == START * len(NUMBERS)
    assert killed >= 500


def test_a_decision_that_is_committed_too_early_is_caught(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(self: Any, members: Any) -> None:
        decider, *branches = members
        decider.store_decision(self._transaction)
        self._decide(decider, branches)
        for member in branches:
            member.is_bound = False
            member.prepare_branch()
        self._finish(decider, branches)

    monkeypatch.setattr(Coordinator, "commit", commit)
    totals = {sum(balances) for balances in sweep(bank, 0, 8)}
    assert totals != {START * len(NUMBERS)}
