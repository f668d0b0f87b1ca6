"""A server that has lost ids hands out nothing."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from django.db import OperationalError

from sharded_orm.conf import TicketOptions
from sharded_orm.ids.tickets.exceptions import TicketServerBehind, TicketServersUnavailable
from sharded_orm.ids.tickets.generator import TicketGenerator
from sharded_orm.ids.tickets.pool import TicketSessionPool
from sharded_orm.ids.tickets.server import TicketServer
from sharded_orm.ids.tickets.session import SequenceRow, TicketSession
from tests.integration.tickets.conftest import PAIR, in_order
from tests.integration.tickets.operations.spare import set_back
from tests.patience import PATIENCE
from tests.queries.conftest import DATABASES

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


def row_of(server: TicketServer, sequence: str) -> SequenceRow:
    deadline = time.monotonic() + PATIENCE
    with server.session(deadline) as lent:
        row = lent.ask(lambda session: session.read(sequence, deadline))
    assert row is not None
    return row


def down(server: TicketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no connection to ``server`` be opened."""
    opens = TicketSessionPool.open

    def refuse(self: TicketSessionPool, deadline: float) -> TicketSession:
        if self.alias == server.alias:
            raise OperationalError("it is down")
        return opens(self, deadline)

    monkeypatch.setattr(TicketSessionPool, "open", refuse)


def test_each_request_leaves_the_partner_s_mark(generator: TicketGenerator, sequence: str) -> None:
    one, two = generator.servers
    generator.take(sequence, 100)  # 1 to 199
    generator.next(sequence)  # 2
    assert row_of(two, sequence).predecessor_mark == 199
    generator.next(sequence)
    assert row_of(one, sequence).predecessor_mark == 2


def test_the_process_that_knows_refuses(generator: TicketGenerator, sequence: str) -> None:
    ids = [*generator.take(sequence, 100), *generator.take(sequence, 100)]
    set_back(generator.servers[0], sequence, 9)
    served = [generator.next(sequence) for _ in range(4)]
    assert {number % 2 for number in served} == {0}
    assert set(ids).isdisjoint(served)
    assert isinstance(generator.servers[0].cause(sequence), TicketServerBehind)


@pytest.mark.update_form
def test_a_batch_that_begins_below_the_mark_is_refused(
    generator: TicketGenerator, sequence: str
) -> None:
    generator.take(sequence, 100), generator.take(sequence, 100)
    set_back(generator.servers[0], sequence, 9)
    assert generator.take(sequence, 1000)[0] == 202
    assert isinstance(generator.servers[0].cause(sequence), TicketServerBehind)


@pytest.mark.update_form
def test_a_new_process_learns_the_mark_from_the_partner(
    generator: TicketGenerator, sequence: str
) -> None:
    generator.take(sequence, 100), generator.next(sequence)
    set_back(generator.servers[0], sequence, 9)
    new = TicketGenerator(PAIR, turns=in_order)
    assert new.next(sequence) == 4
    assert isinstance(new.servers[0].cause(sequence), TicketServerBehind)
    new.close()


@pytest.mark.parametrize(("policy", "serves"), [("proceed", True), ("refuse", False)])
def test_the_policy_while_the_partner_is_down(
    sequence: str, policy: str, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = TicketGenerator(PAIR, TicketOptions(partner_down=policy), turns=in_order)

    down(new.servers[1], monkeypatch)
    if serves:
        assert [new.next(sequence) for _ in range(3)] == [1, 3, 5]
    else:
        with pytest.raises(TicketServersUnavailable, match=r"PARTNER_DOWN.*it is down"):
            new.next(sequence)
    new.close()


def test_an_unchecked_server_is_checked_when_the_partner_is_back(
    generator: TicketGenerator,
    sequence: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    generator.take(sequence, 10_000), generator.next(sequence)
    set_back(generator.servers[0], sequence, 9)
    new = TicketGenerator(PAIR, TicketOptions(backoff=0.001), turns=in_order)

    with monkeypatch.context() as patch:
        down(new.servers[1], patch)
        # The documented limit of 'proceed': the server has handed out this id before.
        assert new.next(sequence) == 11
    for _ in range(1000):
        new.next(sequence)
    assert "but 19999 has left it before" in caplog.text
    new.close()


def test_answers_out_of_order_are_no_alarm(
    generator: TicketGenerator, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer with the smaller id arrives last: its mark was read before it was requested."""
    server = generator.servers[0]
    generator.take(sequence, 1), generator.take(sequence, 1)
    kind = type(_a_session(server))
    take, drawn, overtaken = kind.take, threading.Event(), threading.Event()

    def late(self: TicketSession, *args: Any) -> Any:
        ids = take(self, *args)
        if threading.current_thread() is slow:
            drawn.set()
            assert overtaken.wait(PATIENCE)
        return ids

    monkeypatch.setattr(kind, "take", late)
    got: list[int] = []
    slow = threading.Thread(target=lambda: got.extend(server.take(sequence, 1)))
    slow.start()
    assert drawn.wait(PATIENCE)
    later = server.take(sequence, 1)
    overtaken.set()
    slow.join(PATIENCE)
    assert got[0] < later[0]
    assert server.cause() is None and server.cause(sequence) is None
    assert server.high_water_mark(sequence) == later[0]


def _a_session(server: TicketServer) -> TicketSession:
    with server.session(time.monotonic() + PATIENCE) as lent:
        return lent.ask(lambda session: session)
