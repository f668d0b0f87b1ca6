"""Ticket ids: odd and even, unique under threads, never taken back, available with one server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connections, transaction
from django.test.testcases import _DatabaseFailure  # type: ignore[attr-defined]  # private

from sharded_orm.conf import TicketOptions
from sharded_orm.ids.tickets.exceptions import (
    InvalidTicketCount,
    SequenceExhausted,
    TicketServerMisconfigured,
    TicketServersUnavailable,
    UnknownSequence,
)
from sharded_orm.ids.tickets.generator import TicketGenerator
from sharded_orm.ids.tickets.server import TicketServer
from sharded_orm.ids.tickets.session import TicketSession
from sharded_orm.operations.tickets import begin
from tests.integration.tickets.conftest import PAIR, in_order
from tests.integration.tickets.operations.spare import administer, set_back
from tests.patience import PATIENCE
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


@contextmanager
def counted(server: TicketServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the requests that the sessions of a server answer."""
    requests: list[str] = []
    kind = type(_session_of(server))
    with monkeypatch.context() as patch:
        for name in ("take", "read", "keep_predecessor_mark", "execute"):
            patch.setattr(kind, name, _noted(getattr(kind, name), name, requests))
        yield requests


def _noted(method: Callable[..., Any], name: str, requests: list[str]) -> Callable[..., Any]:
    def noted(self: TicketSession, *args: Any) -> Any:
        requests.append(f"{self.alias}.{name}")
        return method(self, *args)

    return noted


def _session_of(server: TicketServer) -> TicketSession:
    with server.session(time.monotonic() + PATIENCE) as lent:
        return lent.ask(lambda session: session)


def test_two_servers_hand_out_odd_and_even_ids(generator: TicketGenerator, sequence: str) -> None:
    ids = [generator.next(sequence) for _ in range(6)]
    assert ids == [1, 2, 3, 4, 5, 6]
    assert [list(generator.take(sequence, 3)) for _ in range(2)] == [[7, 9, 11], [8, 10, 12]]
    assert generator.next(sequence) == 13


def test_sequences_count_by_themselves(generator: TicketGenerator, sequence: str) -> None:
    for server in generator.servers:
        begin(server, [f"{sequence}_other"])
    generator.take(sequence, 100)
    # From the first server, like the other sequence: they do not share a turn.
    assert generator.next(f"{sequence}_other") == 1


@pytest.mark.update_form
def test_any_number_of_ids_is_one_request(
    generator: TicketGenerator, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator.next(sequence), generator.next(sequence)
    with counted(generator.servers[0], monkeypatch) as requests:
        one = generator.next(sequence)
        many = generator.take(sequence, 1_000_000)
    assert one == 3
    assert many[0], many[-1] == (4, 2_000_002)
    assert len(many) == 1_000_000
    assert [name for name in requests if not name.endswith("execute")] == [
        "tickets_1.take", "tickets_2.take",
    ]  # fmt: skip


def test_the_first_id_of_a_connection_is_three_requests(
    generator: TicketGenerator, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted(generator.servers[0], monkeypatch) as requests:
        generator.next(sequence)
    assert [name for name in requests if not name.endswith("execute")] == [
        "tickets_2.read", "tickets_1.read", "tickets_1.take",
    ]  # fmt: skip


def test_threads_never_get_the_same_id(generator: TicketGenerator, sequence: str) -> None:
    drawn: list[int] = []
    barrier = threading.Barrier(4)

    def draw() -> None:
        barrier.wait(PATIENCE)
        mine = [generator.next(sequence) for _ in range(50)]
        mine.extend(generator.take(sequence, 50))
        drawn.extend(mine)

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(drawn) == len(set(drawn)) == 400


def test_blocks_are_shared_by_threads_and_ask_once(
    sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = TicketGenerator(PAIR, TicketOptions(block_size=100), turns=in_order)
    generator.next(sequence)
    drawn: list[int] = []
    with counted(generator.servers[0], monkeypatch) as requests:
        threads = [
            threading.Thread(
                target=lambda: drawn.extend([generator.next(sequence) for _ in range(24)])
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert sorted(drawn) == list(range(3, 3 + 2 * 96, 2))
    assert requests == []
    generator.close()


def test_a_rollback_loses_ids_and_never_reuses_them() -> None:
    with pytest.raises(KeyError), transaction.atomic(using="photos"):
        lost = Photo.objects.create(user_id=1, title="x").pk
        raise KeyError
    assert Photo.objects.create(user_id=1, title="x").pk != lost


def test_the_caller_s_transaction_on_the_ticket_server_changes_nothing(
    generator: TicketGenerator, sequence: str
) -> None:
    with transaction.atomic(using="tickets_1"):
        assert generator.next(sequence) == 1
        transaction.set_rollback(True, using="tickets_1")
    assert [generator.next(sequence) for _ in range(2)] == [2, 3]


@pytest.mark.django_db(databases={"default", "tickets_1"})
def test_a_test_case_must_allow_both_servers(generator: TicketGenerator) -> None:
    with pytest.raises(AssertionError, match="'tickets_2'"):
        generator.take("photos", 1)


def test_a_test_case_must_allow_idle_sessions_too(
    generator: TicketGenerator, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in PAIR:
        generator.next(sequence)
    connection = connections["tickets_2"]
    failure = _DatabaseFailure(connection.connect, "'tickets_2' is not allowed")
    monkeypatch.setattr(connection, "connect", failure)
    with pytest.raises(AssertionError, match="'tickets_2' is not allowed"):
        for _ in PAIR:
            generator.next(sequence)


def test_one_server_serves_while_the_other_is_down(
    generator: TicketGenerator, sequence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    down: set[str] = set()
    kind = type(_session_of(generator.servers[0]))
    take = kind.take

    def gone(self: TicketSession, *args: Any) -> Any:
        if self.alias in down:
            raise OperationalError("the server is gone")
        return take(self, *args)

    monkeypatch.setattr(kind, "take", gone)
    for _ in PAIR:
        generator.next(sequence)
    down.add("tickets_1")
    assert [generator.next(sequence) % 2 for _ in range(4)] == [0, 0, 0, 0]
    assert str(generator.servers[0].cause()) == "the server is gone"
    down.add("tickets_2")
    with pytest.raises(TicketServersUnavailable, match=r"tickets_\d.*tickets_\d") as caught:
        generator.next(sequence)
    assert set(caught.value.causes) == set(PAIR)
    down.clear()
    # Servers are left alone for a millisecond here.
    assert {generator.next(sequence) % 2 for _ in range(1000)} == {0, 1}


@pytest.mark.parametrize("count", [0, -1, 1.5, None, True, 1_000_001])
def test_counts_that_are_none(generator: TicketGenerator, count: Any) -> None:
    with pytest.raises(InvalidTicketCount, match=f"take 1 to 1,000,000|{count!r}"):
        generator.take("photos", count)


def test_no_server_is_configured() -> None:
    with pytest.raises(ImproperlyConfigured, match="TICKETS"):
        TicketGenerator(()).next("photos")


def test_an_unknown_sequence_is_refused(generator: TicketGenerator) -> None:
    with pytest.raises(UnknownSequence, match=r"'nothing'.*tickets create nothing"):
        generator.next("nothing")


@pytest.mark.update_form
def test_a_server_that_lost_its_row_hands_out_nothing(
    generator: TicketGenerator, sequence: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert [generator.next(sequence) for _ in range(2)] == [1, 2]
    administer(generator.servers[0], "DELETE FROM sharded_orm_sequence WHERE name = %s", sequence)
    assert [generator.next(sequence) for _ in range(4)] == [4, 6, 8, 10]
    assert caplog.text.count(f"'tickets_1' has no sequence '{sequence}'") == 1


@pytest.mark.update_form
def test_exhaustion_is_an_error(generator: TicketGenerator, sequence: str) -> None:
    generator.next(sequence), generator.next(sequence)
    set_back(generator.servers[0], sequence, 2**63 - 3)
    assert generator.next(sequence) == 2**63 - 1
    # The other server still has numbers.
    assert [generator.next(sequence) for _ in range(3)] == [4, 6, 8]
    set_back(generator.servers[1], sequence, 2**63 - 4)
    with pytest.raises(SequenceExhausted, match=r"fewer than 2 numbers"):
        generator.take(sequence, 2)
    assert generator.next(sequence) == 2**63 - 2
    with pytest.raises(SequenceExhausted, match=sequence):
        generator.next(sequence)


def test_an_explicit_id_is_kept() -> None:
    assert Photo.objects.create(photo_id=-77, user_id=1, title="x").pk == -77
    made = Photo.objects.bulk_create([Photo(photo_id=-78, user_id=1), Photo(user_id=2)])
    assert made[0].pk == -78
    assert made[1].pk > 0


@pytest.mark.parametrize(
    "aliases",
    [
        pytest.param(PAIR[::-1], id="wrong order"),
        pytest.param(PAIR[:1], id="one left out"),
        pytest.param((*PAIR, "tickets_1"), id="three with two offsets"),
        pytest.param(("tickets_1", "tickets_1"), id="one server twice"),
    ],
)
def test_a_server_in_the_wrong_place_hands_out_nothing(
    sequence: str, aliases: tuple[str, ...]
) -> None:
    wrong = TicketGenerator(aliases, turns=in_order)
    for _ in range(3):
        with pytest.raises(TicketServerMisconfigured, match="TICKETS"):
            wrong.next(sequence)
    wrong.close()


def test_a_row_that_changes_its_place_is_noticed_by_the_statement_itself(
    generator: TicketGenerator, sequence: str
) -> None:
    generator.next(sequence), generator.next(sequence)
    for server in generator.servers:
        administer(
            server, "UPDATE sharded_orm_sequence SET position = 3 - position WHERE name = %s", sequence
        )  # fmt: skip
    with pytest.raises(TicketServerMisconfigured, match=r"server 2 of 2"):
        generator.next(sequence)
