"""Ticket ids: odd and even, unique under threads, never taken back, one server enough."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext

from sharded_orm.exceptions import TicketError, TicketServersUnavailable
from sharded_orm.ids.tickets import TicketGenerator
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

PAIR = ("tickets_1", "tickets_2")


@pytest.fixture
def generator() -> TicketGenerator:
    return TicketGenerator(PAIR)


def test_two_servers_hand_out_odd_and_even_ids(generator: TicketGenerator) -> None:
    ids = [generator.next("photos") for _ in range(6)]
    assert ids == [1, 2, 3, 4, 5, 6]
    assert [list(generator.take("photos", 3)) for _ in range(2)] == [[7, 9, 11], [8, 10, 12]]
    assert generator.next("comments") == 1


def test_any_number_of_ids_is_one_statement(generator: TicketGenerator) -> None:
    generator.take("photos", 1), generator.take("photos", 1)
    with CaptureQueriesContext(connections["tickets_1"]) as queries:
        ids = generator.take("photos", 100_000)
    assert len(ids) == len(set(ids)) == 100_000
    assert len(queries) == 1


def test_threads_never_get_the_same_id(generator: TicketGenerator) -> None:
    drawn: list[int] = []
    barrier = threading.Barrier(4)

    def draw() -> None:
        barrier.wait(30)
        mine = [generator.next("photos") for _ in range(50)]
        mine.extend(generator.take("photos", 50))
        drawn.extend(mine)
        connections.close_all()

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(drawn) == len(set(drawn)) == 400


def test_a_rollback_loses_ids_and_never_reuses_them() -> None:
    with pytest.raises(KeyError), transaction.atomic(using="photos"):
        lost = Photo.objects.create(user_id=1, title="x").pk
        raise KeyError
    assert Photo.objects.create(user_id=1, title="x").pk != lost


def test_one_server_serves_while_the_other_is_down(generator: TicketGenerator) -> None:
    for _ in PAIR:
        generator.next("photos")
    with connections["tickets_1"].execute_wrapper(_gone):
        assert [generator.next("photos") % 2 for _ in range(4)] == [0, 0, 0, 0]
        with (
            connections["tickets_2"].execute_wrapper(_gone),
            pytest.raises(TicketServersUnavailable, match=r"tickets_1.*tickets_2") as caught,
        ):
            generator.next("photos")
    assert set(caught.value.causes) == set(PAIR)
    assert {generator.next("photos") % 2 for _ in range(2)} == {0, 1}


def _gone(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    """Every statement fails as that of a lost server does."""
    raise OperationalError("the server is gone")


@pytest.mark.parametrize("count", [0, -1, 1.5, None])
def test_counts_that_are_none(generator: TicketGenerator, count: Any) -> None:
    with pytest.raises(TicketError, match="at least one"):
        generator.take("photos", count)


def test_no_server_is_configured() -> None:
    with pytest.raises(ImproperlyConfigured, match="TICKETS"):
        TicketGenerator(()).next("photos")


def test_exhaustion_is_an_error(generator: TicketGenerator) -> None:
    generator.take("photos", 1), generator.take("photos", 1)
    with connections["tickets_1"].cursor() as cursor:
        cursor.execute("UPDATE sharded_orm_ticket SET value = %s", [2**63 - 3])
    assert generator.next("photos") == 2**63 - 1
    assert generator.next("photos") == 4
    with pytest.raises(TicketError, match="exhausted"):
        generator.next("photos")
    assert generator.next("photos") == 6


def test_an_explicit_id_is_kept() -> None:
    assert Photo.objects.create(photo_id=77, user_id=1, title="x").pk == 77
    made = Photo.objects.bulk_create([Photo(photo_id=78, user_id=1), Photo(user_id=2)])
    assert made[0].pk == 78
    assert made[1].pk not in (None, 77, 78)


def test_a_server_in_the_wrong_place_hands_out_nothing(generator: TicketGenerator) -> None:
    generator.take("photos", 1), generator.take("photos", 1)
    with pytest.raises(TicketError, match="TICKETS"):
        TicketGenerator(PAIR[::-1]).take("photos", 1)


def test_a_name_that_the_table_would_cut_is_refused(generator: TicketGenerator) -> None:
    with pytest.raises(TicketError, match="100 characters"):
        generator.next("x" * 101)
