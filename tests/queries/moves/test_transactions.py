"""A transaction in which a key switches raises KeyMoved at the next use of the key, and succeeds if it
is run again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

import sharded_orm
from sharded_orm import runtime
from sharded_orm.exceptions import KeyMoved
from sharded_orm.models.tables.directory import DatabaseDirectory
from tests.photos.models import Album, Photo
from tests.queries.conftest import DATABASES
from tests.queries.moves.conftest import KEY
from tests.queries.moves.hand_move import SOURCE, TARGET, HandMove, alias, elsewhere

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

OTHER = KEY + 5


def switched(move: HandMove) -> None:
    """Switch the key, by connections of another thread.

    The old rows stay: on SQLite, a transaction that reads a file locks it.
    """
    elsewhere(lambda: (move.publish(), move.switch_directory()))()


def photos() -> Any:
    return Photo.objects.filter(user_id=KEY)


USES: dict[str, Callable[[], Any]] = {
    "list": lambda: list(photos()),
    "get": lambda: Photo.objects.get(user_id=KEY),
    "exists": lambda: photos().exists(),
    "several keys": lambda: list(Photo.objects.filter(user_id__in=[KEY, OTHER])),
    "scatter": lambda: Photo.objects.scatter().count(),
    "scattered iterator": lambda: list(Photo.objects.scatter().iterator()),
    "create": lambda: Photo.objects.create(user_id=KEY, title="new"),
    "bulk_create": lambda: Photo.objects.bulk_create([Photo(user_id=KEY, title="new")]),
    "get_or_create": lambda: Photo.objects.get_or_create(user_id=KEY, title="new"),
    "update": lambda: photos().update(stars=2),
    "delete": lambda: photos().delete(),
    "scattered update": lambda: Photo.objects.scatter().update(stars=2),
    "scattered delete": lambda: Photo.objects.scatter().filter(stars=1).delete(),
    "nested block": lambda: sharded_orm.atomic(Photo, user_id=KEY),
}
BLOCKS: dict[str, Callable[[], Any]] = {
    "group": lambda: transaction.atomic("photos"),
    "shard": lambda: transaction.atomic(alias(SOURCE)),
    "key": lambda: sharded_orm.atomic(Photo, user_id=KEY),
}
SAVEPOINTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "block": nullcontext,
    "savepoint of the group": lambda: transaction.atomic("photos"),
    "savepoint of the shard": lambda: transaction.atomic(alias(SOURCE)),
}

every_use = pytest.mark.parametrize("name", USES)
every_block = pytest.mark.parametrize("block", BLOCKS)


@every_block
@every_use
def test_a_key_that_has_switched_is_refused_at_its_next_use(
    move: HandMove, name: str, block: str
) -> None:
    move.announce()
    with pytest.raises(KeyMoved), BLOCKS[block]():
        assert photos().count() == 1
        switched(move)
        USES[name]()
    # It may be run again.
    with BLOCKS[block]():
        assert photos().count() == 1
        USES[name]()


@pytest.mark.parametrize("inner", SAVEPOINTS)
def test_what_was_used_in_a_savepoint_is_remembered(move: HandMove, inner: str) -> None:
    move.announce()
    with pytest.raises(KeyMoved), transaction.atomic("photos"):
        with SAVEPOINTS[inner]():
            assert photos().count() == 1
        switched(move)
        with SAVEPOINTS[inner]():
            photos().count()
    assert photos().count() == 1


def test_a_refused_key_stays_refused_until_the_transaction_ends(move: HandMove) -> None:
    move.announce()
    with transaction.atomic("photos"):
        assert photos().count() == 1
        switched(move)
        for _ in range(2):
            with pytest.raises(KeyMoved), transaction.atomic("photos"):
                photos().count()
    assert photos().count() == 1


def test_a_bound_key(move: HandMove) -> None:
    move.announce()
    with sharded_orm.bound(user_id=KEY):
        with pytest.raises(KeyMoved), transaction.atomic("photos"):
            assert Photo.objects.count() == 1
            switched(move)
            Photo.objects.count()
        assert Photo.objects.count() == 1


def test_another_key_of_the_transaction_is_not_refused(move: HandMove) -> None:
    strategy: Any = runtime.strategy("photos")
    strategy.store.place("photos", {str(OTHER): SOURCE})
    Photo.objects.create(user_id=OTHER, title="other")
    move.announce()
    with transaction.atomic("photos"):
        assert Photo.objects.filter(user_id=OTHER).count() == 1
        switched(move)
        assert Photo.objects.filter(user_id=OTHER).count() == 1


def raw_read(shard: int) -> None:
    with connections[alias(shard)].cursor() as cursor:
        cursor.execute(f"SELECT COUNT(*) FROM {Photo._meta.db_table}")
        cursor.fetchall()


@pytest.mark.parametrize("settled", [False, True])
@every_use
def test_a_snapshot_of_the_target_that_is_older_than_the_switch_is_refused(
    move: HandMove, name: str, settled: bool
) -> None:
    """Raw SQL has taken the snapshot; the key is used for the first time."""
    if connections[alias(TARGET)].vendor == "sqlite":
        pytest.skip("a transaction that has read a file locks it against the publication")
    move.announce()

    def rest() -> None:
        move.switch()
        if settled:
            move.settle()

    with pytest.raises(KeyMoved), transaction.atomic(alias(TARGET)):
        raw_read(TARGET)
        elsewhere(rest)()
        USES[name]()
    with transaction.atomic(alias(TARGET)):
        raw_read(TARGET)
        USES[name]()


def test_a_key_that_switched_before_the_transaction_is_not_refused(move: HandMove) -> None:
    """The process has asked for moves before the switch only."""
    move.announce()
    elsewhere(move.switch)()
    with transaction.atomic(alias(TARGET)):
        raw_read(TARGET)
        assert photos().count() == 1
    with transaction.atomic("photos"):
        assert [photo.title for photo in photos()] == ["p"]
        assert Photo.objects.scatter().count() == 1


def test_a_key_that_moved_long_ago_is_not_refused_in_a_long_transaction(
    move: HandMove, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sharded_orm.routing import placement_lease

    move.whole()
    HandMove(KEY, move.tables, TARGET, SOURCE).announce()
    ahead, clock = [0.0], placement_lease.now
    monkeypatch.setattr(placement_lease, "now", lambda: clock() + ahead[0])
    with transaction.atomic("photos"):
        raw_read(TARGET)
        ahead[0] += 60.0
        assert photos().count() == 1


def test_a_scatter_in_a_transaction_is_refused_after_any_switch(move: HandMove) -> None:
    if connections[alias(TARGET)].vendor == "sqlite":
        pytest.skip("a transaction that has read a file locks it against the publication")
    move.announce()
    with pytest.raises(KeyMoved), transaction.atomic("photos"):
        assert Photo.objects.scatter().count() == 1
        switched(move)
        Photo.objects.scatter().count()
    with transaction.atomic("photos"):
        assert Photo.objects.scatter().count() == 1


@pytest.mark.parametrize("step", ["publish", "switch_directory"])
def test_a_scatter_in_a_transaction_sees_each_row_once(move: HandMove, step: str) -> None:
    move.announce()
    move.publish()
    if step == "switch_directory":
        move.switch_directory()
    runtime.placement_lease().renew()
    with transaction.atomic("photos"):
        for shard in (SOURCE, TARGET):
            raw_read(shard)
        assert Photo.objects.scatter().count() == 1
        if step == "switch_directory":
            elsewhere(move.settle)()
        assert Photo.objects.scatter().count() == 1
        assert Album.objects.scatter().count() == 1


def test_a_block_on_the_former_shard_of_a_key_is_not_entered(move: HandMove) -> None:
    photo = photos().get()
    blocks = [sharded_orm.atomic(Photo, user_id=KEY), sharded_orm.atomic(photo)]
    move.whole()
    for block in blocks:
        with pytest.raises(KeyMoved), block:
            raise AssertionError("entered")
        assert not connections[alias(SOURCE)].in_atomic_block


def test_a_decorated_function_runs_on_the_shard_that_the_key_has_now(move: HandMove) -> None:
    @sharded_orm.atomic(Photo, user_id=KEY)
    def shards() -> list[bool]:
        return [connections[alias(shard)].in_atomic_block for shard in (SOURCE, TARGET)]

    assert shards() == [True, False]
    move.whole()
    assert shards() == [False, True]


def test_what_a_transaction_has_used_is_forgotten_at_its_end(move: HandMove) -> None:
    move.announce()
    for block in BLOCKS.values():
        with block():
            photos().count()
        assert connections["photos"].transaction_memory == {}
    with pytest.raises(ValueError, match="of the project"), transaction.atomic("photos"):
        photos().count()
        raise ValueError("of the project")
    assert connections["photos"].transaction_memory == {}
    transaction.set_autocommit(False, "photos")
    try:
        photos().count()
        transaction.commit("photos")
        switched(move)
        assert photos().count() == 1
        transaction.rollback("photos")
    finally:
        transaction.set_autocommit(True, "photos")


def test_transactions_cost_no_query_while_no_key_is_in_flight(
    move: HandMove, monkeypatch: pytest.MonkeyPatch
) -> None:
    move.whole()
    asked: list[Any] = []
    ask = DatabaseDirectory.moves

    def counted(self: Any, since: int | None = None) -> Any:
        asked.append(since)
        return ask(self, since)

    monkeypatch.setattr(DatabaseDirectory, "moves", counted)
    photos().count()
    with CaptureQueriesContext(connections["directory"]) as directory:
        for block in BLOCKS.values():
            with block():
                photos().count()
                Photo.objects.create(user_id=KEY, title="new")
                Photo.objects.scatter().count()
    assert (asked, len(directory)) == ([], 0)
