"""A row that is written asks the strategy of its group for its shard once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from django.db.models.signals import post_save, pre_save

from sharded_orm import runtime
from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.models.plans.saves import forget
from tests.photos.models import Board, Event, Photo, Save
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, TWO

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(databases=DATABASES),
]


class LookUps:
    """The keys whose shards were asked for, by whatever method of a strategy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._keys: list[Any] = []
        self._is_nested = False
        for group in ("photos", "events", "pins"):
            strategy = runtime.strategy(group)
            for name in ("locate", "place"):
                method = self._counted(getattr(strategy, name), lambda key: [key])
                monkeypatch.setattr(strategy, name, method)
            for name in ("locate_many", "place_many"):
                monkeypatch.setattr(strategy, name, self._counted(getattr(strategy, name), list))

    def of(self, write: Callable[[], Any]) -> list[Any]:
        self._keys.clear()
        write()
        return list(self._keys)

    def _counted(self, method: Any, keys_of: Callable[[Any], list[Any]]) -> Any:
        def call(argument: Any) -> Any:
            if self._is_nested:
                return method(argument)  # One method of the strategy calls another.
            self._keys += keys_of(argument)
            self._is_nested = True
            try:
                return method(argument)
            finally:
                self._is_nested = False

        return call


@pytest.fixture
def look_ups(placed: None, monkeypatch: pytest.MonkeyPatch) -> LookUps:
    return LookUps(monkeypatch)


@pytest.mark.parametrize(
    "write",
    [
        lambda: Photo(user_id=ONE).save(),
        lambda: Photo(user_id=ONE).save(using="photos"),
        lambda: Photo(user_id=ONE).save(using=SHARD[ONE]),
        lambda: Photo.objects.create(user_id=ONE),
        lambda: Photo.objects.using(SHARD[ONE]).create(user_id=ONE),
        lambda: Photo.objects.bulk_create([Photo(user_id=ONE)]),
    ],
)
def test_a_new_row_asks_once(look_ups: LookUps, write: Callable[[], Any]) -> None:
    assert look_ups.of(write) == [ONE]


def test_keys_that_are_computed_are_asked_for_once(look_ups: LookUps) -> None:
    assert look_ups.of(lambda: Event.objects.create(account="ada")) == ["ada"]


def test_a_row_that_is_changed_or_deleted_asks_once(look_ups: LookUps) -> None:
    row = Photo.objects.create(user_id=ONE)
    assert look_ups.of(row.save) == [ONE]
    assert look_ups.of(row.delete) == [ONE]


def test_a_save_of_a_shape_without_a_plan_asks_once(look_ups: LookUps) -> None:
    forget()
    row = Photo.objects.create(user_id=ONE)
    for stars in (1, 2, 3, None, None, None):  # None has a plan of its own, from the third save on.
        row.stars = stars
        assert look_ups.of(row.save) == [ONE]


def test_a_save_of_a_row_that_is_gone_asks_once(look_ups: LookUps) -> None:
    forget()
    row = Photo.objects.create(user_id=ONE)
    for _ in range(3):
        Photo.objects.filter(user_id=ONE, pk=row.pk).delete()
        assert look_ups.of(row.save) == [ONE]
        assert [look_ups.of(row.save) for _ in range(3)] == [[ONE]] * 3


def test_each_key_of_many_rows_is_asked_for_once(look_ups: LookUps) -> None:
    rows = [Photo(user_id=key) for key in (ONE, TWO, ONE, NEAR)]
    assert look_ups.of(lambda: Photo.objects.bulk_create(rows)) == [ONE, TWO, NEAR]
    rows = [Photo(user_id=key) for key in (ONE, NEAR)]
    pinned = Photo.objects.using(SHARD[ONE])
    assert look_ups.of(lambda: pinned.bulk_create(rows)) == [ONE, NEAR]


def test_a_row_whose_key_is_generated_asks_for_the_row_that_it_refers_to(look_ups: LookUps) -> None:
    board = Board.objects.create(name="b")
    assert look_ups.of(lambda: Save(board=board).save()) == [board.pk]
    assert look_ups.of(lambda: Save(board_id=board.pk).save()) == [board.pk]


def test_the_next_save_asks_again(look_ups: LookUps) -> None:
    row = Photo(user_id=ONE)
    row.save()
    assert look_ups.of(row.save) == [ONE]
    again = Photo(user_id=ONE)
    with pytest.raises(CrossShardRelation):
        again.save(using=SHARD[TWO])
    assert look_ups.of(again.save) == [ONE]


def test_a_key_that_changes_while_it_is_saved_is_asked_for(look_ups: LookUps) -> None:
    def change(sender: Any, instance: Photo, **kwargs: Any) -> None:
        instance.user_id = keys.pop()

    pre_save.connect(change, Photo)
    try:
        keys = [TWO, NEAR]
        row = Photo(user_id=ONE)
        assert look_ups.of(row.save) == [ONE, NEAR]
        with pytest.raises(CrossShardRelation, match="receiver of pre_save"):
            Photo(user_id=ONE).save()
    finally:
        pre_save.disconnect(change, Photo)
    assert (row._state.db, row.user_id) == (SHARD[NEAR], NEAR)


def test_copies_and_pickles_that_a_receiver_makes_keep_no_shard(look_ups: LookUps) -> None:
    made: list[Any] = []

    def record(sender: Any, instance: Photo, **kwargs: Any) -> None:
        made.extend((copy.copy(instance), copy.deepcopy(instance)))
        made.append(pickle.loads(pickle.dumps(instance)))

    post_save.connect(record, Photo)
    try:
        Photo(user_id=ONE).save()
    finally:
        post_save.disconnect(record, Photo)
    for row in made:
        assert look_ups.of(lambda row=row: row._refuse_other_shard(SHARD[ONE])) == [ONE]
        assert look_ups.of(row.save) == [ONE]
