"""A query of all shards asks for its group once, however many shards there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from django.db import connections

from sharded_orm import runtime
from sharded_orm.models.querysets import route
from sharded_orm.signals import scattered
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES, ONE, SHARD, TWO, UNPLACED

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(databases=DATABASES),
]


class Counted:
    """Counts the calls of a function and goes on with it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.calls = 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        return self._function(*args)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Counted]:
    def counted(name: str) -> Counted:
        function = Counted(getattr(runtime, name))
        monkeypatch.setattr(runtime, name, function)
        return function

    return counted


def test_a_scatter_asks_for_its_group_once(db_all: None, count: Callable[[str], Counted]) -> None:
    shards = runtime.group("photos").count
    assert shards > 2
    runtime.strategy("photos")  # Made at its first use, which asks for the group as well.
    groups, numbers = count("group"), count("shard")
    assert len(Photo.objects.scatter()._destination()) == shards
    assert (groups.calls, numbers.calls) == (1, 0)


def test_the_route_of_a_signal_asks_once_for_each_of_its_lists(
    db_all: None, count: Callable[[str], Counted]
) -> None:
    routes: list[route.Route] = []

    def record(sender: Any, route: route.Route, **kwargs: Any) -> None:
        routes.append(route)

    scattered.connect(record)
    try:
        Photo.objects.scatter()._destination()
    finally:
        scattered.disconnect(record)
    groups, numbers = count("group"), count("shard")
    assert len(routes[0].aliases) == len(routes[0].shards)
    assert routes[0].nodes
    assert (groups.calls, numbers.calls) == (2, 0)


def test_a_list_of_keys_is_located_once_to_find_its_shards_and_once_to_share_it_out(
    placed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    located = Counted(route._locate)
    monkeypatch.setattr(route, "_locate", located)
    where = Photo.objects.filter(user_id__in=[ONE, TWO, UNPLACED])._destination()
    assert [target.query.where.children[0].rhs for target in where] == [[ONE], [TWO]]
    assert located.calls == 2


@pytest.fixture
def growth(placed: None) -> Iterator[Callable[..., Any]]:
    """A wrapper of statements: the group has no shard for TWO before the first statement ends."""
    grown = runtime.topology()
    photos = grown.groups["photos"]
    small = replace(photos, ranges=photos.ranges[:1])
    assert small.count <= runtime.locate("photos", TWO).number  # type: ignore[union-attr]
    runtime.swap(replace(grown, groups={**grown.groups, "photos": small}))

    def grow(execute: Callable[..., Any], *args: Any) -> Any:
        result = execute(*args)
        runtime.swap(grown)
        return result

    yield grow
    runtime.swap(grown)


def test_a_shard_that_is_added_while_the_directory_is_asked_is_known(
    growth: Callable[..., Any],
) -> None:
    with connections[runtime.config().directory].execute_wrapper(growth):
        where = Photo.objects.filter(user_id__in=[ONE, TWO])._destination()
    assert [target.shard.alias for target in where] == [SHARD[ONE], SHARD[TWO]]
