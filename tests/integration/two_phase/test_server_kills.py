"""A server is killed at moments of a transaction in two phases, and started again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import Error, transaction

import sharded_orm
from sharded_orm.exceptions import CommitOutcomeUnknown
from tests.conftest import service_missing
from tests.integration.two_phase.bank import NUMBERS, START, Bank
from tests.integration.two_phase.conftest import VENDORS, settings_of
from tests.integration.two_phase.failpoint import failpoint
from tests.integration.two_phase.test_kills import MANY, all_moved, count_moments, recover
from tests.services import ServiceMissing
from tests.services.mariadb import MariaDBServer
from tests.services.postgresql import PostgreSQLServer
from tests.unit.backends.group.conftest import GROUP


@pytest.fixture(scope="module", params=VENDORS)
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server that keeps what it has acknowledged."""
    try:
        with (
            MariaDBServer(innodb_flush_log_at_trx_commit="1")
            if request.param == "mariadb"
            else PostgreSQLServer()
        ) as server:
            yield server
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture
def nodes(server: Any, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    other = "mariadb" if isinstance(server, MariaDBServer) else "postgresql"
    first = request.getfixturevalue(other)
    return settings_of([first, server.address])


def restart(server: Any) -> None:
    server.kill()
    server.start()


def kill_at(bank: Bank, server: Any, point: int, *numbers: int) -> Exception | bool | None:
    """Kill the second server at a moment. Return the error of the transfer; True if it had ended before."""
    with failpoint(point, server.kill) as counter:
        error: Exception | None = None
        try:
            bank.transfer(*numbers)
        except (Error, CommitOutcomeUnknown) as exc:
            error = exc
    bank.close()
    if counter.passed <= point:
        return True
    server.start()
    return error


@pytest.mark.long
@pytest.mark.parametrize("numbers", [(0, 8), (8, 0)], ids=["branch", "decider"])
def test_a_server_killed_at_every_moment(bank: Bank, server: Any, numbers: tuple[int, ...]) -> None:
    before = [START] * len(NUMBERS)
    for point in range(MANY):
        error = kill_at(bank, server, point, *numbers)
        if error is True:
            break
        recover(bank)
        balances = bank.balances()
        moved = all_moved(balances, before, *numbers)
        if not isinstance(error, CommitOutcomeUnknown):
            # What the program was told is what has happened.
            assert moved == (error is None), (point, error)
        before = balances
    else:
        raise AssertionError("the transfer has too many packets")
    assert point > 6


def test_the_decider_dies_during_its_commit(bank: Bank, server: Any) -> None:
    """Nobody knows whether the commit took effect. The branch waits until a recovery knows."""
    moments = count_moments(bank, 8, 0)
    before = bank.balances()
    # The last four moments are before and after the commit of the decider and that of the branch.
    error = kill_at(bank, server, moments - 4, 8, 0)
    assert isinstance(error, CommitOutcomeUnknown), error
    assert error.aliases == ("photos_00008", "photos_00000")
    recover(bank)
    assert not all_moved(bank.balances(), before, 8, 0)


def test_the_branch_dies_after_the_decision(
    bank: Bank, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The transaction is committed, and its hooks run. The branch follows when its server is back."""
    moments = count_moments(bank, 0, 8)
    called: list[int] = []
    with failpoint(moments - 2, server.kill):
        with sharded_orm.atomic(GROUP, two_phase=True):
            bank.add(0, 1)
            bank.add(8, -1)
            transaction.on_commit(lambda: called.append(1), using=GROUP)
    assert called == [1]
    assert "left to a recovery" in caplog.text
    with pytest.raises(
        CommandError, match=r"Node 'local_2' does not answer: .* Start it, or correct"
    ):
        call_command("transactions", "recover", group=GROUP, grace=0.0)
    server.start()
    bank.close()
    assert (bank.balance(0), bank.balance(8)) == (START + 3, START - 2)
    recover(bank)
    assert bank.balance(8) == START - 3


def test_a_prepared_branch_survives_a_restart(bank: Bank, server: Any) -> None:
    with pytest.raises(Error), sharded_orm.atomic(GROUP, two_phase=True):
        bank.add(0, 1)
        bank.add(8, -1)
        bank[8].prepare_branch()
        restart(server)
    bank.close()
    assert len(bank.prepared()) == 1
    recover(bank)
    assert bank.balances() == [START] * 4
