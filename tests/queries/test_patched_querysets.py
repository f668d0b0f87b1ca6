"""Packages that replace methods of Django's QuerySet, and querysets of projects: both see what they
would see without plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest
from django.db.models import QuerySet

from sharded_orm.models.querysets import first_recordings
from sharded_orm.models.querysets.plans import without_plans
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from tests.queries.conftest import DATABASES, ONE
from tests.queries.twins import World
from tests.relatives.sharded.models import Item
from tests.transparent_methods import TransparentMethod

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]


@pytest.fixture
def planned(items: World) -> None:
    """The reads of these tests have plans."""
    for _ in range(4):
        read()
        Item.objects.filter(owner_id=ONE).first()


@pytest.fixture
def first_use() -> Iterator[None]:
    """The process has made no queryset yet."""
    first_recordings.forget()
    yield
    first_recordings.forget()


def read() -> list[int]:
    return sorted(row.pk for row in Item.objects.filter(owner_id=ONE))


def counted(name: str, monkeypatch: pytest.MonkeyPatch, of: Any = QuerySet) -> list[Any]:
    """The querysets on which a method of Django's QuerySet was called, from now on."""
    original, seen = getattr(of, name), []

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(of, name, method)
    return seen


def counted_transparently(
    name: str, monkeypatch: pytest.MonkeyPatch, of: Any = QuerySet
) -> list[Any]:
    seen: list[Any] = []
    monkeypatch.setattr(of, name, TransparentMethod(getattr(of, name), seen.append))
    return seen


COUNTED = pytest.mark.parametrize("counted", [counted, counted_transparently])


@COUNTED
@pytest.mark.parametrize("name", ["__init__", "__iter__", "_fetch_all"])
def test_a_replaced_method_is_called_at_each_read(
    name: str, counted: Any, planned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = read()
    seen = counted(name, monkeypatch)
    for times in (1, 2, 3):
        assert read() == rows
        assert len(seen) >= times
    del seen[:]
    assert Item.objects.filter(owner_id=ONE).first() is not None
    assert seen


def test_a_replaced_method_is_called_for_rows_that_were_read_before(
    planned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Item.objects.filter(owner_id=ONE)
    assert len(rows) == len(read())
    seen = counted("_fetch_all", monkeypatch)
    assert list(rows)
    assert seen and all(queryset is rows for queryset in seen)


@COUNTED
@pytest.mark.parametrize("name", ["__init__", "__iter__", "_fetch_all", "filter"])
def test_a_method_that_was_replaced_before_the_first_use_is_called(
    name: str, counted: Any, items: World, first_use: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counted(name, monkeypatch)
    for _ in range(5):
        del seen[:]
        assert read()
        assert seen


NEW_IDS = itertools.count(900)

#: A read or a write for each public method of Django's QuerySet that a plan skips, or that is not
#: always called.
READS: dict[str, Callable[[Any], Any]] = {
    "filter": lambda rows: list(rows.filter(stars=1)),
    "exclude": lambda rows: list(rows.exclude(stars=1)),
    "order_by": lambda rows: list(rows.order_by("-pk")),
    "values": lambda rows: list(rows.values("pk")),
    "values_list": lambda rows: list(rows.values_list("pk")),
    "only": lambda rows: list(rows.only("name")),
    "defer": lambda rows: list(rows.defer("name")),
    "select_related": lambda rows: list(rows.select_related("shelf")),
    "prefetch_related": lambda rows: list(rows.prefetch_related("shelf")),
    "__getitem__": lambda rows: list(rows[:2]),
    "get": lambda rows: rows.get(pk=101),
    "first": lambda rows: rows.first(),
    "ordered": lambda rows: rows.first(),
    "exists": lambda rows: rows.exists(),
    "count": lambda rows: rows.count(),
    "update": lambda rows: rows.update(stars=1),
    "create": lambda rows: rows.create(id=next(NEW_IDS), owner_id=ONE, seller_id=ONE).stars,
}


@COUNTED
@pytest.mark.parametrize("name", READS)
def test_a_public_method_that_is_replaced_later_is_called(
    name: str, counted: Any, items: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> Any:
        return READS[name](Item.objects.filter(owner_id=ONE))

    expected = read()
    for _ in range(3):
        assert read() == expected
    if name == "ordered":
        seen: list[Any] = []
        is_ordered = QuerySet.ordered.fget  # type: ignore[attr-defined]  # a property
        monkeypatch.setattr(
            QuerySet, name, property(lambda self: seen.append(self) or is_ordered(self))
        )
    else:
        seen = counted(name, monkeypatch)
    for _ in range(3):
        del seen[:]
        assert read() == expected
        assert seen


@COUNTED
@pytest.mark.parametrize("name", ["filter", "order_by", "__len__"])
@pytest.mark.parametrize("of", [QuerySet, ShardedQuerySet])
def test_get_calls_the_replaced_methods_that_it_calls_in_django(
    of: Any, name: str, counted: Any, items: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        row = Item.objects.get(owner_id=ONE, pk=101)
    seen = counted(name, monkeypatch, of)
    with without_plans():
        assert Item.objects.get(owner_id=ONE, pk=101) == row
    assert seen
    for _ in range(4):
        del seen[:]
        assert Item.objects.get(owner_id=ONE, pk=101) == row
        assert seen


def test_attributes_that_a_replaced_method_sets_are_those_of_one_queryset(
    planned: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = QuerySet.__init__

    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.read_by = []

    monkeypatch.setattr(QuerySet, "__init__", method)
    first_recordings.forget()
    rows: list[Any] = [Item.objects.all() for _ in range(4)]
    assert len({id(queryset.read_by) for queryset in rows}) == len(rows)
    monkeypatch.undo()
    assert not hasattr(Item.objects.all(), "read_by")


def test_a_queryset_class_that_sets_attributes_in_its_own_way(items: World) -> None:
    names: list[str] = []

    class Observed(ShardedQuerySet[Any]):
        def __setattr__(self, name: str, value: Any) -> None:
            names.append(name)
            super().__setattr__(name, value)

    Observed(Item)
    expected = names[:]
    for _ in range(3):
        del names[:]
        Observed(Item)
        assert names == expected


def test_a_queryset_class_with_a_property_for_an_attribute(items: World) -> None:
    values: list[Any] = []

    class Observed(ShardedQuerySet[Any]):
        @property
        def _prefetch_done(self) -> Any:
            return self.__dict__["done"]

        @_prefetch_done.setter
        def _prefetch_done(self, value: Any) -> None:
            values.append(value)
            self.__dict__["done"] = value

    for _ in range(4):
        del values[:]
        assert Observed(Item)._prefetch_done is False
        assert values == [False]


def test_querysets_of_one_class_share_no_list(items: World) -> None:
    class Observed(ShardedQuerySet[Any]):
        @property
        def _sticky_filter(self) -> Any:
            return False

        @_sticky_filter.setter
        def _sticky_filter(self, value: Any) -> None:
            self.__dict__["seen"] = []

    rows = [Observed(Item) for _ in range(4)]
    assert len({id(queryset.__dict__["seen"]) for queryset in rows}) == len(rows)


def test_two_threads_that_make_the_first_queryset_get_the_same_shape(items: World) -> None:
    class Slow(ShardedQuerySet[Any]):
        other: Any = None

        @classmethod
        def _first_shape(cls, model: Any) -> Any:
            if cls.other is None:
                cls.other = False
                # What another thread does meanwhile.
                cls.other = cls(model)
            return super()._first_shape(model)

    rows = [Slow(Item) for _ in range(3)]
    assert {id(queryset._recording.shape) for queryset in rows} == {id(Slow.other._recording.shape)}


def test_no_queryset_after_a_reset_has_a_shape_of_the_old_settings(
    items: World, first_use: None
) -> None:
    class Slow(ShardedQuerySet[Any]):
        is_reset = False

        @classmethod
        def _first_shape(cls, model: Any) -> Any:
            shape = super()._first_shape(model)
            if not cls.is_reset:
                cls.is_reset = True
                # Another thread resets the settings meanwhile.
                first_recordings.forget()
            return shape

    old = Slow(Item)._recording
    assert old is not None
    rows = [Slow(Item)._recording for _ in range(3)]
    assert all(recording and recording.shape is not old.shape for recording in rows)
    assert len({id(recording.shape) for recording in rows if recording}) == 1
