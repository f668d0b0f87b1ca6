"""Sequences are created only where it is safe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.test import override_settings

from sharded_orm import runtime
from sharded_orm.ids.tickets.exceptions import (
    InvalidSequence,
    SequenceExhausted,
    SequenceNotChecked,
    TicketServerMisconfigured,
)
from sharded_orm.ids.tickets.generator import TicketGenerator
from sharded_orm.ids.tickets.server import TicketServer
from sharded_orm.ids.tickets.session import LAST_ID
from sharded_orm.operations.tickets import (
    advance,
    begin,
    create,
    declared_sequences,
    missing_sequences,
    status,
    verify,
)
from sharded_orm.operations.tickets.creation import MARGIN
from sharded_orm.routing.placement_lease import PlacementLease
from tests.integration.tickets.conftest import PAIR
from tests.integration.tickets.operations.spare import (
    THIRD,
    a_shard_down,
    administer,
    down,
    generator_of,
    lose,
    old_table,
    redirected,
    run,
    spare_servers,
)
from tests.photos.models import Album, Photo
from tests.queries.conftest import DATABASES, ONE, TWO

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


def next_ids(found: Any) -> list[int]:
    return [one.next_id for one in found]


def test_all_sequences_of_models_are_begun_and_then_left_alone(
    generator: TicketGenerator, servers: list[TicketServer]
) -> None:
    made = create(servers=servers)
    assert {one.name for one in made} == set(declared_sequences()) >= {"photos", "photos_app_album"}
    assert {(one.next_id, one.alias, one.made) for one in made} == {
        (1, "tickets_1", True),
        (2, "tickets_2", True),
    }
    assert [generator.next("photos") for _ in range(3)] == [1, 2, 3]
    again = create(servers=servers)
    assert not any(one.made for one in again)
    assert next_ids(one for one in again if one.name == "photos") == [5, 4]


def test_a_sequence_begins_above_the_ids_of_all_shards(servers: list[TicketServer]) -> None:
    Photo.objects.create(photo_id=5000, user_id=ONE, title="x")
    Photo.objects.create(photo_id=7001, user_id=TWO, title="x")
    assert next_ids(create(["photos"], servers=servers)) == [7003, 7002]


def test_a_manager_that_hides_rows_hides_no_ids(
    servers: list[TicketServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    Photo.objects.create(photo_id=5000, user_id=ONE, title="x")
    monkeypatch.setattr(
        type(Photo.objects), "get_queryset", lambda self: pytest.fail("the manager was asked")
    )
    assert next_ids(create(["photos"], servers=servers)) == [5001, 5002]


def test_a_start_may_be_chosen(servers: list[TicketServer]) -> None:
    assert next_ids(create(["photos"], start=1000, servers=servers)) == [1001, 1000]
    assert next_ids(create(["other"], start=7, servers=servers)) == [7, 8]


def test_a_start_below_existing_ids_is_refused(servers: list[TicketServer]) -> None:
    Photo.objects.create(photo_id=7001, user_id=TWO, title="x")
    for start in (1, 7001):
        with pytest.raises(InvalidSequence, match=rf"start at {start}: id 7001 .* 7002 or more"):
            create(["photos"], start=start, servers=servers)
    with pytest.raises(InvalidSequence):
        create(["photos_app_album", "photos"], start=1, servers=servers)
    # The refused call has created nothing.
    assert "photos_app_album" in missing_sequences(servers[0])
    assert next_ids(create(["photos"], start=7002, servers=servers)) == [7003, 7002]


def test_ids_of_a_table_that_is_being_moved_count(servers: list[TicketServer]) -> None:
    # Its key had another name.
    with old_table("photos_app_album", 3, 900):
        with pytest.raises(InvalidSequence, match=r"id 900 .*'photos_app_album' of 'default'"):
            create(["photos_app_album"], start=500, servers=servers)
        assert next_ids(create(["photos_app_album"], servers=servers)) == [901, 902]


def test_without_looking_a_start_is_needed(servers: list[TicketServer]) -> None:
    Photo.objects.create(photo_id=7001, user_id=TWO, title="x")
    with pytest.raises(InvalidSequence, match="--start N"):
        create(["photos"], check=False, servers=servers)
    assert next_ids(create(["photos"], start=11, check=False, servers=servers)) == [11, 12]


def test_a_shard_that_is_down_is_not_taken_for_empty(servers: list[TicketServer]) -> None:
    with a_shard_down() as alias:
        with pytest.raises(SequenceNotChecked, match=rf"(?s)'photos'.*'{alias[:-5]}.*--no-check"):
            create(["photos"], servers=servers)
        assert next_ids(create(["photos"], start=99, check=False, servers=servers)) == [99, 100]
        (one, two) = verify(["photos"], servers=servers)
        assert "is not known" in str(one.problem) and "is not known" in str(two.problem)
        (one, two) = advance(["photos"], servers=servers)
        assert one.before == one.after and "is not known" in str(one.problem)
        (one, two) = advance(["photos"], to=500, check=False, servers=servers)
        assert (one.after, two.after) == (501, 500)


def test_a_directory_without_tables_is_to_be_migrated(
    servers: list[TicketServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    Photo.objects.create(photo_id=7001, user_id=TWO, title="x")
    alias = runtime.config().directory
    # As in a process that has just begun, and knows of no moves yet.
    strategy: Any = runtime.strategy("photos")
    monkeypatch.setattr(strategy, "lease", PlacementLease(strategy.store, 5.0))
    run(alias, "ALTER TABLE sharded_orm_key_move RENAME TO kept_key_move")
    try:
        with pytest.raises(SequenceNotChecked, match=r"lacks its tables: run 'manage.py migrate"):
            create(["photos"], servers=servers)
    finally:
        run(alias, "ALTER TABLE kept_key_move RENAME TO sharded_orm_key_move")


def test_the_rest_of_a_pair_begins_beside_the_first(servers: list[TicketServer]) -> None:
    """A run that was interrupted before anybody drew an id."""
    begin(servers[0], ["photos"])
    made = create(["photos"], servers=servers)
    assert [(one.next_id, one.made) for one in made] == [(1, False), (2, True)]
    begin(servers[0], ["other"], after=999)
    assert next_ids(create(["other"], start=1000, servers=servers)) == [1001, 1000]


def test_a_server_that_is_replaced_begins_above_its_partner(
    generator: TicketGenerator, servers: list[TicketServer]
) -> None:
    create(["other"], servers=servers)
    generator.take("other", 400), generator.take("other", 10)
    lose(servers[1], "other")
    made = create(["other"], servers=servers)
    assert [one.made for one in made] == [False, True]
    assert made[1].next_id == 800 + MARGIN


def test_a_server_that_is_replaced_begins_above_its_own_mark(
    generator: TicketGenerator, servers: list[TicketServer]
) -> None:
    """It served alone for long; the partner has recorded its mark."""
    create(["other"], servers=servers)
    generator.take("other", 5000), generator.take("other", 1)
    generator.close()
    lose(servers[0], "other")
    assert create(["other"], servers=servers)[0].next_id == 9999 + MARGIN + 2


def test_a_server_that_is_replaced_begins_above_the_rows(
    generator: TicketGenerator, servers: list[TicketServer]
) -> None:
    begin(servers[1], ["photos"])
    Photo.objects.create(photo_id=70_001, user_id=TWO, title="x")
    assert create(["photos"], servers=servers)[0].next_id > 70_001


@pytest.mark.parametrize("index", [0, 1])
def test_nothing_is_begun_while_a_server_is_down(
    generator: TicketGenerator, servers: list[TicketServer], index: int
) -> None:
    with down(generator, index):
        with pytest.raises(SequenceNotChecked, match=rf"'tickets_{index + 1}' does not answer"):
            create(servers=servers)
    assert missing_sequences(servers[1 - index]) == list(declared_sequences())


@pytest.mark.parametrize("begun", [False, True], ids=["empty", "in use"])
def test_one_database_under_two_aliases(servers: list[TicketServer], begun: bool) -> None:
    one, two = PAIR
    with redirected(two, **connections.settings[one]):
        if begun:
            begin(servers[0], ["other"])
        for name in ("other", "another"):
            with pytest.raises(
                TicketServerMisconfigured, match=rf"'{two}'.*'{one}': both aliases are the same"
            ):
                create([name], servers=servers)
        assert any("both aliases are the same" in problem for problem in status(servers).problems)


def test_three_servers_with_two_offsets(servers: list[TicketServer]) -> None:
    create(["other"], servers=servers)
    one, two = PAIR
    aliases = (one, two, THIRD)
    with redirected(THIRD, **connections.settings[two]), generator_of(aliases) as wrong:
        with pytest.raises(TicketServerMisconfigured, match=r"server 1 of 3.*server 1 of 2"):
            create(["other"], servers=wrong.servers)
        with pytest.raises(TicketServerMisconfigured, match=rf"'{THIRD}'.*'{two}': both aliases"):
            create(["another"], servers=wrong.servers)
        problems = [one.problem for one in verify(["other"], servers=wrong.servers)]
        assert "number of TICKETS change" in str(problems[0])
        assert THIRD in str(problems[1]) and two in str(problems[2])
        moved = advance(["other"], servers=wrong.servers)
        assert all(one.problem and one.after == one.before for one in moved)


def test_a_third_server_needs_new_sequences(
    generator: TicketGenerator, servers: list[TicketServer], tmp_path: Path
) -> None:
    create(["other"], servers=servers)
    generator.take("other", 100), generator.take("other", 100)
    with spare_servers(tmp_path, THIRD), generator_of((*PAIR, THIRD)) as three:
        create(["other_of_three"], start=1000, servers=three.servers)
        assert sorted(three.next("other_of_three") for _ in range(4)) == [1000, 1001, 1002, 1003]
        assert any("number of TICKETS" in problem for problem in status(three.servers).problems)
        for server in servers:
            administer(server, "DELETE FROM sharded_orm_sequence WHERE step = %s", 2)
        assert not any("number of TICKETS" in problem for problem in status(three.servers).problems)


def test_servers_in_another_order(servers: list[TicketServer]) -> None:
    create(["other"], servers=servers)
    with generator_of(PAIR[::-1]) as wrong:
        with pytest.raises(TicketServerMisconfigured, match="order or number of TICKETS change"):
            create(["other"], servers=wrong.servers)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x" * 101, "101 characters, and 100 are possible"),
        ("", "printable text"),
        (" photos", "without blanks"),
        ("pho\ntos", "printable text"),
        ("pho`tos", "without backquotes"),
    ],
)
def test_names_that_are_none(servers: list[TicketServer], name: str, said: str) -> None:
    with pytest.raises(InvalidSequence, match=said):
        create([name], servers=servers)


@pytest.mark.update_form
def test_a_name_may_be_long_and_strange(generator: TicketGenerator) -> None:
    name = '%s "ö" ' + "x" * 92 + "'"
    create([name], servers=generator.servers)
    assert [generator.next(name) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("start", [0, -1, LAST_ID + 1])
def test_starts_that_are_none(servers: list[TicketServer], start: int) -> None:
    with pytest.raises(InvalidSequence, match=str(start)):
        create(["other"], start=start, servers=servers)


def test_the_last_numbers(generator: TicketGenerator) -> None:
    create(["other"], start=LAST_ID, servers=generator.servers)
    assert generator.next("other") == LAST_ID
    with pytest.raises(SequenceExhausted):
        generator.next("other")
    lose(generator.servers[1], "other")
    with pytest.raises(
        InvalidSequence, match=rf"'other' cannot begin above \d+: ids end at {LAST_ID}"
    ):
        create(["other"], servers=generator.servers)


@pytest.mark.update_form
def test_forms(generator: TicketGenerator) -> None:
    with pytest.raises(InvalidSequence, match=r"form 'sequence'; it has \['update'"):
        create(["other"], form="sequence", servers=generator.servers)
    vendor = connections["tickets_1"].vendor
    if vendor != "mysql":
        with pytest.raises(InvalidSequence, match=r"form 'replace'"):
            create(["other"], form="replace", servers=generator.servers)
        return
    made = create(["other"], form="replace", servers=generator.servers)
    assert {one.form for one in made} == {"replace"}
    drawn = [generator.next("other") for _ in range(4)]
    assert sorted(one.next_id for one in made) == drawn[:2]
    # A server that is replaced continues from the other's mark.
    lose(generator.servers[1], "other")
    assert {one.form for one in create(["other"], servers=generator.servers)} == {"replace"}
    with pytest.raises(InvalidSequence, match="too long for form 'replace'"):
        create(["x" * 60], form="replace", servers=generator.servers)


def test_no_server_is_configured() -> None:
    with override_settings(SHARDED_ORM={}):
        for operation in (create, status, verify, advance):
            with pytest.raises(ImproperlyConfigured, match="names no ticket server"):
                operation()  # type: ignore[operator]


def test_albums_and_photos_have_sequences_of_their_own() -> None:
    fields = declared_sequences()
    assert [field.model for field in fields["photos"]] == [Photo]
    assert [field.model for field in fields["photos_app_album"]] == [Album]
