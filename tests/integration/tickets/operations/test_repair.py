"""Servers that have lost ids are found and advanced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections

from sharded_orm.ids.tickets.exceptions import InvalidSequence, TicketServerBehind, UnknownSequence
from sharded_orm.ids.tickets.generator import TicketGenerator
from sharded_orm.ids.tickets.server import TicketServer
from sharded_orm.ids.tickets.session import LAST_ID
from sharded_orm.operations.tickets import advance, begin, create, declared_sequences, verify
from tests.integration.tickets.operations.spare import (
    down,
    old_table,
    set_back,
)
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES, ONE, TWO

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


def next_ids(found: Any) -> list[int]:
    return [one.next_id for one in found]


def test_servers_that_forgot_nothing(
    generator: TicketGenerator, servers: list[TicketServer]
) -> None:
    create(servers=servers)
    for _ in range(4):
        Photo.objects.create(photo_id=generator.next("photos"), user_id=ONE, title="x")
    found = verify(servers=servers)
    assert {one.name for one in found} == set(declared_sequences())
    assert not any(one.problem for one in found)


def test_an_id_above_the_position_is_found(
    generator: TicketGenerator, servers: list[TicketServer]
) -> None:
    create(servers=servers)
    for number, user in ((5, ONE), (12, TWO), (31, TWO)):
        Photo.objects.create(photo_id=number, user_id=user, title="x")
    one, two = verify(["photos"], servers=servers)
    # Each server is blamed for its own numbers only.
    assert (one.offending, two.offending) == (31, 12)
    assert "'photos' on 'tickets_1' is at 0, but id 31 exists, in table 'photos_app_photo'" in str(
        one.problem
    )
    assert "tickets advance photos'" in str(one.problem)
    set_back(servers[0], "photos", 31)
    one, two = verify(["photos"], servers=servers)
    assert (one.problem, two.offending) == (None, 12)


def test_only_the_ids_above_the_position_are_read(
    servers: list[TicketServer], django_assert_num_queries: Any
) -> None:
    create(["photos"], start=1000, servers=servers)
    with django_assert_num_queries(
        32 if connections["photos"].vendor == "sqlite" else 4, using="photos"
    ) as caught:
        verify(["photos"], servers=servers)
    assert all("> 999" in q["sql"] or "> 998" in q["sql"] for q in caught.captured_queries)


def test_ids_in_the_global_database_are_compared(servers: list[TicketServer]) -> None:
    create(["photos_app_album"], servers=servers)
    with old_table("photos_app_album", 901, 950):
        one, two = verify(["photos_app_album"], servers=servers)
        assert (one.offending, two.offending) == (901, 950)
        assert one.where == "table 'photos_app_album' of 'default'"


def test_ids_that_leave_meanwhile_are_no_alarm(
    generator: TicketGenerator, servers: list[TicketServer]
) -> None:
    create(["photos"], servers=servers)

    def draw(done: int, total: int, name: str) -> None:
        for _ in range(4 if done < total else 0):
            generator.next("photos")
            Photo.objects.create(photo_id=generator.next("photos"), user_id=ONE, title="x")

    found = verify(["photos"], servers=servers, progress=draw)
    assert [(one.problem, one.offending) for one in found] == [(None, None)] * 2
    moved = advance(["photos"], servers=servers, progress=draw, margin=0)
    assert not any(one.problem for one in moved)


@pytest.mark.update_form
def test_a_sequence_that_no_model_draws_from_is_compared_with_the_mark(
    generator: TicketGenerator, servers: list[TicketServer]
) -> None:
    create(["other"], servers=servers)
    for _ in range(4):
        generator.take("other", 100)
    generator.close()
    assert not any(one.problem for one in verify(["other"], servers=servers))
    set_back(servers[0], "other", 99)
    one, two = verify(["other"], servers=servers)
    assert (one.position, one.mark, two.problem) == (99, 399, None)
    assert "partner knows that 399 has left it" in str(one.problem)


def test_a_restored_server_is_found_and_repaired(
    generator: TicketGenerator, servers: list[TicketServer]
) -> None:
    create(servers=servers)
    drawn = set()
    for _ in range(8):
        drawn.add(Photo.objects.create(photo_id=generator.next("photos"), user_id=ONE).pk)
    generator.close()
    set_back(servers[0], "photos", 1)
    with pytest.raises(TicketServerBehind):
        servers[0].take("photos", 1)
    before = advance(["photos"], servers=servers, dry_run=True)
    assert [(one.before, one.after) for one in before] == [(1, 10_007), (8, 10_008)]
    assert verify(["photos"], servers=servers)[0].offending == 7

    moved = advance(["photos"], servers=servers)
    assert moved == before
    assert not any(one.problem for one in verify(["photos"], servers=servers))
    for _ in range(8):
        drawn.add(generator.next("photos"))
    assert len(drawn) == 16


def test_advance_never_goes_back_and_may_be_repeated(servers: list[TicketServer]) -> None:
    create(["other"], servers=servers)
    for to, after in ((101, [101, 102]), (101, [101, 102]), (7, [101, 102]), (102, [103, 102])):
        moved = advance(["other"], to=to, servers=servers)
        assert [one.after for one in moved] == after
        assert not any(one.problem for one in moved)
    assert [one.after for one in advance(["other"], margin=0, servers=servers)] == [103, 102]
    assert [one.after for one in advance(["other"], margin=1, servers=servers)] == [105, 104]
    only = advance(["other"], margin=10, only="tickets_2", servers=servers)
    assert [(one.alias, one.after) for one in only] == [("tickets_2", 114)]


def test_advance_all(servers: list[TicketServer]) -> None:
    create(servers=servers)
    create(["other"], servers=servers)
    moved = advance(servers=servers, margin=100)
    assert {one.name for one in moved} == {"other", *declared_sequences()}
    assert {one.after for one in moved} == {101, 100}


def test_a_server_that_is_down_does_not_keep_the_others_back(
    generator: TicketGenerator, servers: list[TicketServer]
) -> None:
    create(["photos"], servers=servers)
    with down(generator, 1):
        one, two = advance(["photos"], servers=servers)
        # The second knows how far the first was.
        assert one.after == one.before
        assert "'tickets_2', which keeps the mark of 'tickets_1'" in str(one.problem)
        assert two.after is None and "'tickets_2' does not answer" in str(two.problem)
        one, two = advance(["photos"], servers=servers, to=10_001, check=False)
        assert (one.after, one.problem) == (10_001, None)
        one, two = verify(["photos"], servers=servers)
        assert one.problem is None and "'tickets_2' does not answer" in str(two.problem)


def test_a_server_without_the_sequence(servers: list[TicketServer]) -> None:
    begin(servers[0], ["photos"])
    one, two = verify(["photos"], servers=servers)
    assert one.problem is None
    assert "'tickets_2' has no sequence 'photos': run" in str(two.problem)
    one, two = advance(["photos"], servers=servers)
    assert "'tickets_2', which keeps the mark of 'tickets_1', has no" in str(one.problem)
    assert "'tickets_2' has no sequence 'photos': run" in str(two.problem)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"margin": -1}, r"margin of -1: it never goes back"),
        ({"to": 0}, r"moved to 0; ids are numbers from 1"),
        ({"to": LAST_ID + 1}, rf"moved to {LAST_ID + 1}"),
        ({"check": False}, r"--to N"),
    ],
)
def test_moves_that_are_none(servers: list[TicketServer], wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSequence, match=said):
        advance(["photos"], servers=servers, **wrong)


def test_a_move_that_would_leave_it_behind(servers: list[TicketServer]) -> None:
    create(["photos"], servers=servers)
    Photo.objects.create(photo_id=51, user_id=ONE, title="x")
    one, two = advance(["photos"], to=50, servers=servers)
    assert "cannot be moved to 50: 51 has left it" in str(one.problem)
    assert (one.after, two.after, two.problem) == (-1, 50, None)


def test_a_move_beyond_the_last_id(servers: list[TicketServer]) -> None:
    create(["other"], servers=servers)
    advance(["other"], to=LAST_ID - 10, servers=servers)
    for one in advance(["other"], servers=servers):
        assert "ids end at" in str(one.problem)
        assert one.before == one.after


@pytest.mark.parametrize("operation", [verify, advance])
def test_an_unknown_sequence(operation: Callable[..., Any], servers: list[TicketServer]) -> None:
    with pytest.raises(UnknownSequence, match=r"'photo'.*Did you mean 'photos'\?"):
        operation(["photo"], servers=servers)
