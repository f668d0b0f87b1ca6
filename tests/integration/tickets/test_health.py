"""Which servers are left alone after a failure, and which callers wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import SynchronousOnlyOperation
from django.db import OperationalError

from sharded_orm.conf import TicketOptions
from sharded_orm.ids.tickets import server as server_module
from sharded_orm.ids.tickets.exceptions import TicketServerBehind, TicketServersUnavailable
from sharded_orm.ids.tickets.generator import TicketGenerator
from sharded_orm.ids.tickets.pool import TicketSessionPool
from sharded_orm.ids.tickets.server import TicketServer
from sharded_orm.ids.tickets.session import TicketSession
from sharded_orm.operations.tickets import begin
from tests.integration.tickets.conftest import PAIR, in_order
from tests.integration.tickets.operations.spare import set_back
from tests.integration.tickets.test_marks import down
from tests.patience import PATIENCE
from tests.queries.conftest import DATABASES

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

LONG = 3600.0


@pytest.fixture
def patient(sequence: str) -> Iterator[TicketGenerator]:
    """A server that fails is left alone for longer than the test takes."""
    made = TicketGenerator(PAIR, TicketOptions(backoff=LONG), turns=in_order)
    yield made
    made.close()


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the aliases to which connections are opened."""
    aliases: list[str] = []
    opens = TicketSessionPool.open

    def note(self: TicketSessionPool, deadline: float) -> TicketSession:
        aliases.append(self.alias)
        return opens(self, deadline)

    with monkeypatch.context() as patch:
        patch.setattr(TicketSessionPool, "open", note)
        yield aliases


@pytest.mark.update_form
def test_a_server_that_failed_is_left_alone(
    patient: TicketGenerator, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        down(patient.servers[0], patch)
        assert [patient.next(sequence) for _ in range(2)] == [2, 4]
    with opened(monkeypatch) as aliases:
        assert [patient.next(sequence) for _ in range(4)] == [6, 8, 10, 12]
    assert aliases == []


def test_a_server_that_is_left_alone_serves_when_nobody_else_does(
    patient: TicketGenerator, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = patient.servers
    with monkeypatch.context() as patch:
        down(one, patch)
        assert patient.next(sequence) == 2
    two.close()
    with monkeypatch.context() as patch:
        down(two, patch)
        assert [patient.next(sequence) for _ in range(2)] == [1, 3]
    assert one.cause() is None


def test_callers_share_the_luck_of_the_one_that_tries(
    patient: TicketGenerator, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If both are down, of threads that come together only one waits for each server."""
    aliases: list[str] = []
    failed: list[Exception] = []

    def refuse(self: TicketSessionPool, deadline: float) -> TicketSession:
        aliases.append(self.alias)
        raise OperationalError("it is down")

    monkeypatch.setattr(TicketSessionPool, "open", refuse)
    with pytest.raises(TicketServersUnavailable):
        patient.next(sequence)
    assert sorted(aliases) == sorted(PAIR)
    aliases.clear()

    # A caller shares the failures met after it came. So all must have come before the first one
    # asks.
    everybody, waited = threading.Barrier(8), threading.local()
    probe = TicketServer.probe

    def probe_together(self: TicketServer, name: str, count: int, started: float) -> Sequence[int]:
        if not hasattr(waited, "for_all"):
            waited.for_all = everybody.wait(PATIENCE)
        return probe(self, name, count, started)

    monkeypatch.setattr(TicketServer, "probe", probe_together)

    def draw() -> None:
        try:
            patient.next(sequence)
        except TicketServersUnavailable as exc:
            failed.append(exc)

    threads = [threading.Thread(target=draw) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(failed) == 8
    assert sorted(aliases) == sorted(PAIR)


@pytest.mark.update_form
def test_one_sequence_that_is_behind_does_not_stop_the_others(
    patient: TicketGenerator, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = f"{sequence}_other"
    for server in patient.servers:
        begin(server, [other])
    patient.take(sequence, 100), patient.next(sequence)
    set_back(patient.servers[0], sequence, 9)
    assert [patient.next(sequence) % 2 for _ in range(4)] == [0] * 4
    assert isinstance(patient.servers[0].cause(sequence), TicketServerBehind)
    assert patient.servers[0].cause() is None
    with opened(monkeypatch) as aliases:
        assert {patient.next(other) % 2 for _ in range(4)} == {0, 1}
    assert aliases == []


@pytest.mark.update_form
def test_refusing_without_the_partner_does_not_blame_the_server(
    sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = TicketGenerator(
        PAIR, TicketOptions(backoff=LONG, partner_down="refuse"), turns=in_order
    )
    for _ in range(2):
        strict.next(sequence)
    other = f"{sequence}_other"
    for server in strict.servers:
        begin(server, [other])
    one, two = strict.servers
    two.close()
    with monkeypatch.context() as patch:
        down(two, patch)
        # The checked server goes on; the unchecked one is refused, again and again.
        assert [strict.next(sequence) for _ in range(2)] == [3, 5]
        for _ in range(2):
            with pytest.raises(TicketServersUnavailable, match="PARTNER_DOWN is 'refuse'"):
                strict.next(other)
        assert strict.next(sequence) == 7
    assert one.cause() is None
    strict.close()


def test_refusing_processes_recover_when_both_servers_have_failed(
    sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each needs the other's mark, and each is left alone: a caller that tries one asks both."""
    strict = TicketGenerator(
        PAIR, TicketOptions(backoff=LONG, partner_down="refuse"), turns=in_order
    )
    with monkeypatch.context() as patch:
        for server in strict.servers:
            down(server, patch)
        with pytest.raises(TicketServersUnavailable):
            strict.next(sequence)
    assert {strict.next(sequence) % 2 for _ in range(4)} == {0, 1}
    strict.close()


@pytest.mark.update_form
def test_waiting_for_the_partner_leaves_the_server_its_time(
    sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partner hangs, and the server's idle connection is dead: a new one has time to open."""
    generator = TicketGenerator(PAIR, turns=in_order)
    server = generator.servers[0]
    generator.next(sequence), generator.next(sequence)
    left: list[float] = []
    opens, learn, take = (
        TicketSessionPool.open,
        TicketServer._learn_high_water_mark,
        TicketSession.read,
    )

    def slowly(self: TicketServer, state: Any, name: str, *, new_connection: bool) -> bool:
        # As if the partner had been silent for its whole share.
        clock.append(self.patience)
        return learn(self, state, name, new_connection=new_connection)

    def note(self: TicketSessionPool, deadline: float) -> TicketSession:
        left.append(deadline - now())
        return opens(self, deadline)

    def dead(self: TicketSession, *args: Any) -> Any:
        monkeypatch.setattr(TicketSession, "read", take)
        raise OperationalError("the connection is dead")

    clock: list[float] = []
    real = time.monotonic

    def now() -> float:
        return real() + sum(clock)

    with server.session(real() + 30) as lent:
        lent.ask(lambda session: session.checked.clear())
    monkeypatch.setattr(time, "monotonic", now)
    monkeypatch.setattr(TicketServer, "_learn_high_water_mark", slowly)
    monkeypatch.setattr(TicketSessionPool, "open", note)
    generator.servers[1].close()
    monkeypatch.setattr(server, "partner", None)
    monkeypatch.setattr(TicketSession, "read", dead)
    assert server.take(sequence, 1)[0] == 3
    assert left and left[-1] > server.patience / 2
    generator.close()


@pytest.mark.update_form
def test_a_connection_is_checked_again(
    generator: TicketGenerator, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were restored under open connections, in a process that draws rarely."""
    idle, busy = TicketGenerator(PAIR, turns=in_order), generator
    assert idle.next(sequence) == 1
    busy.take(sequence, 1000), busy.next(sequence)
    set_back(busy.servers[0], sequence, 9)
    monkeypatch.setattr(server_module, "_SECONDS_CHECKED", 0.0)
    for server in idle.servers:
        server.close()
    idle.next(sequence)
    assert {idle.next(sequence) % 2 for _ in range(4)} == {0}
    idle.close()


def test_a_process_that_stood_still_is_served(
    generator: TicketGenerator, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is up before any server was asked, so no server is to blame."""
    generator.next(sequence), generator.next(sequence)
    take = TicketServer._take

    def late(self: Any, state: Any, lent: Any, session: Any, name: str, count: int) -> Any:
        lent.deadline = time.monotonic() - 60
        return take(self, state, lent, session, name, count)

    monkeypatch.setattr(TicketServer, "_take", late)
    assert [generator.next(sequence) for _ in range(4)] == [3, 4, 5, 6]
    assert all(server.cause() is None for server in generator.servers)


def test_a_partner_that_connects_slowly_is_waited_for(
    sequence: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its share of the time is its own."""
    generator = TicketGenerator(PAIR, turns=in_order)
    opens, left = TicketSessionPool.open, []

    def note(self: TicketSessionPool, deadline: float) -> TicketSession:
        left.append(deadline - time.monotonic())
        return opens(self, deadline)

    monkeypatch.setattr(TicketSessionPool, "open", note)
    generator.next(sequence)
    patience = generator.servers[0].patience
    assert [round(seconds, 1) for seconds in left] == [patience, patience]
    assert caplog.text == ""
    generator.close()


def test_an_error_out_of_nowhere_leaves_no_answer_behind(
    generator: TicketGenerator, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler may raise while the answer is on its way."""
    server = generator.servers[0]
    generator.next(sequence), generator.next(sequence)
    taken: list[Any] = []
    kind: Any = None

    def interrupted(self: Any, *args: Any) -> Any:
        taken.append(kind_take(self, *args))
        raise RuntimeError("soft time limit")

    with server.session(time.monotonic() + PATIENCE) as lent:
        kind = lent.ask(type)
    kind_take = kind.take
    with monkeypatch.context() as patch:
        patch.setattr(kind, "take", interrupted)
        with pytest.raises(RuntimeError):
            generator.next(sequence)
    assert server._state.pool.pop() is None
    assert server.take(sequence, 1)[0] > taken[0][0]


def test_not_in_an_event_loop(generator: TicketGenerator) -> None:
    async def draw() -> None:
        generator.take("photos", 1)

    with pytest.raises(SynchronousOnlyOperation):
        async_to_sync(draw)()
