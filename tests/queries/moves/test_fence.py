"""A write that a trigger of a fence refuses raises KeyFenced, however the write was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connections, transaction
from django.db.models import F

import sharded_orm
from sharded_orm import runtime
from sharded_orm.backends.write_hooks import route_check
from sharded_orm.exceptions import KeyFenced, KeyMoved
from sharded_orm.models.moves import repetition
from sharded_orm.routing.placement_uses import PlacementUses, current_uses, recorded_uses
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES
from tests.queries.moves.conftest import KEY
from tests.queries.moves.hand_move import (
    SOURCE,
    TARGET,
    HandMove,
    alias,
    close_fence,
    open_fence,
    refusal,
)

CONFIG = runtime.config

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]


@pytest.fixture
def fence(move: HandMove) -> Iterator[None]:
    """Triggers that refuse every write to the table of photos on the shard SOURCE."""
    close_fence(SOURCE, Photo._meta.db_table)
    yield
    open_fence(SOURCE, Photo._meta.db_table)


def raw_sql() -> None:
    with connections[alias(SOURCE)].cursor() as cursor:
        cursor.execute(f"UPDATE {Photo._meta.db_table} SET stars = 9 WHERE user_id = %s", [KEY])


WRITES: dict[str, Callable[[], Any]] = {
    "save": lambda: Photo.objects.get(user_id=KEY).save(),
    "create": lambda: Photo.objects.create(user_id=KEY, title="new"),
    "bulk_create": lambda: Photo.objects.bulk_create([Photo(user_id=KEY, title="new")]),
    "ignore_conflicts": lambda: Photo.objects.bulk_create(
        [Photo(user_id=KEY, title="new")], ignore_conflicts=True
    ),
    "update": lambda: Photo.objects.filter(user_id=KEY).update(stars=9),
    "delete": lambda: Photo.objects.filter(user_id=KEY).delete(),
    "delete a row": lambda: Photo.objects.get(user_id=KEY).delete(),
    "raw SQL": raw_sql,
}


REPEATED = [
    name for name in WRITES if "raw" not in name and "bulk" not in name and "ign" not in name
]


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(runtime.config(), move_wait=0.1)
    monkeypatch.setattr(runtime, "config", lambda: config)


@pytest.mark.parametrize("name", REPEATED)
def test_a_refused_write_waits_for_the_switch_and_runs_on_the_new_shard(
    move: HandMove, fence: None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    move.announce()
    monkeypatch.setattr(runtime, "config", CONFIG)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            open_fence(SOURCE, Photo._meta.db_table, "DELETE")  # The mover itself may delete.
            move.switch()

    monkeypatch.setattr(repetition.time, "sleep", pause)
    WRITES[name]()
    assert len(pauses) == 3
    assert not Photo.objects.using(alias(SOURCE)).filter(user_id=KEY).exists()
    rows = Photo.objects.using(alias(TARGET)).filter(user_id=KEY).values_list("title", "stars")
    assert sorted(rows, key=str) == {
        "save": [("p", 1)],
        "create": [("new", None), ("p", 1)],
        "update": [("p", 9)],
    }.get(name, [])


# A deletion has a transaction of its own, in which the move of this test must not take part.
@pytest.mark.parametrize("name", ["save", "create", "update"])
def test_a_write_of_a_paused_process_is_not_sent_to_the_old_shard(
    move: HandMove, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is paused after its look-up, and its session is opened after the whole move."""
    photo = Photo.objects.get(user_id=KEY)
    check, calls = repetition.refuse_former_route, []

    def paused() -> None:
        if not calls:
            calls.append(1)
            uses = current_uses()
            lease = runtime.placement_lease()
            with recorded_uses(PlacementUses()):
                move.whole()
            assert uses is not None and lease.valid()
        check()

    monkeypatch.setattr(route_check, "_check", paused)
    WRITES[name]()
    del photo
    assert calls
    assert not Photo.objects.using(alias(SOURCE)).filter(user_id=KEY).exists()
    rows = Photo.objects.using(alias(TARGET)).filter(user_id=KEY).values_list("title", "stars")
    assert sorted(rows, key=str) == {
        "save": [("p", 1)],
        "create": [("new", None), ("p", 1)],
        "update": [("p", 9)],
    }.get(name, [])


def test_a_write_that_was_made_in_part_is_not_repeated(
    move: HandMove, fence: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy: Any = runtime.strategy("photos")
    strategy.store.place("photos", {str(KEY + 5): 1})
    Photo.objects.create(user_id=KEY + 5, title="first", stars=1)
    with pytest.raises(KeyFenced) as caught:
        Photo.objects.filter(user_id__in=[KEY, KEY + 5]).update(stars=F("stars") + 1)
    assert caught.value.is_in_part
    assert Photo.objects.get(user_id=KEY + 5).stars == 2


@pytest.mark.parametrize("name", WRITES)
def test_a_refused_write(fence: None, name: str) -> None:
    with pytest.raises(KeyFenced, match=r"'photos_00003' has refused a write") as caught:
        WRITES[name]()
    assert isinstance(caught.value, OperationalError) and isinstance(caught.value, KeyMoved)
    assert list(Photo.objects.filter(user_id=KEY).values_list("title", "stars")) == [("p", 1)]


@pytest.mark.parametrize("name", WRITES)
def test_inside_a_transaction_the_whole_transaction_fails(fence: None, name: str) -> None:
    with pytest.raises(KeyFenced):
        with sharded_orm.atomic(Photo, user_id=KEY):
            WRITES[name]()
    assert not connections[alias(SOURCE)].in_atomic_block
    with pytest.raises(transaction.TransactionManagementError):
        with transaction.atomic(alias(SOURCE)):
            with pytest.raises(KeyFenced):
                WRITES["update"]()
            transaction.set_rollback(True, alias(SOURCE))
            Photo.objects.filter(user_id=KEY).count()
    assert list(Photo.objects.filter(user_id=KEY).values_list("title", "stars")) == [("p", 1)]


def test_another_error_with_the_same_code_is_not_taken_for_it(move: HandMove) -> None:
    connection = connections[alias(SOURCE)]
    sql = {
        "sqlite": "INSERT INTO no_such_table VALUES (1)",
        "mysql": refusal(connection, "of the project"),
        "postgresql": f"DO $$ BEGIN {refusal(connection, 'of the project')}; END $$",
    }[connection.vendor]
    with pytest.raises(DatabaseError) as caught, connection.cursor() as cursor:
        cursor.execute(sql)
    assert not isinstance(caught.value, KeyMoved)
