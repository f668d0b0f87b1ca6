"""Reads by plans after ``using()``: of the named database alone, as without plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from sharded_orm import bound, fetch_together, runtime
from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.models.querysets import first_recordings
from sharded_orm.models.querysets.plans import without_plans
from tests.cached.models import CachedPhoto
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES, LATER, ONE, SHARD, TWO, UNPLACED, Clock, queries
from tests.queries.twins import World, comparable_value
from tests.relatives.sharded.models import Agent, Item

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

Read = Callable[[Any], Any]

READS: dict[str, Read] = {
    "a list": lambda rows: list(rows.filter(owner_id=ONE).order_by("pk")),
    "a list without a key": lambda rows: list(rows.filter(stars__gt=0).order_by("pk")),
    "all rows": lambda rows: list(rows.all()),
    "a page": lambda rows: list(rows.filter(pk__gt=100)[1:3]),
    "get": lambda rows: rows.get(owner_id=ONE, pk=101),
    "get without a key": lambda rows: rows.filter(pk__in=[101, 102]).get(),
    "exists": lambda rows: rows.filter(pk=101).exists(),
    "count": lambda rows: rows.filter(owner_id=ONE).count(),
    "the number of all rows": lambda rows: rows.count(),
    "first": lambda rows: rows.exclude(stars=1).first(),
    "values": lambda rows: list(rows.filter(stars=1).values("pk", "name").order_by("pk")),
    "the alias after the filter": lambda rows: list(rows.filter(stars=1).using(rows._db)),
    "select_related": lambda rows: [
        (row.pk, row.shelf) for row in rows.select_related("shelf").filter(owner_id=ONE)
    ],
    "an instance": lambda rows: list(rows.filter(owner=Agent(pk=ONE))),
    "prefetches": lambda rows: list(rows.filter(pk__lt=0).prefetch_related("children")),
}
ALIASES = [SHARD[ONE], SHARD[TWO]]


def outcome(read: Callable[[], Any]) -> tuple[Any, list[str]]:
    with CaptureQueriesContext(connections["photos"]) as sent:
        try:
            value = comparable_value(read())
        except Item.DoesNotExist as exc:
            value = str(exc)
    return value, [str(query["sql"]) for query in sent]


@pytest.mark.parametrize("name", READS)
def test_a_read_of_a_named_shard_compiles_nothing(
    name: str, items: World, request: pytest.FixtureRequest
) -> None:
    read = READS[name]
    expected = {}
    for alias in ALIASES:
        with without_plans():
            expected[alias] = outcome(lambda alias=alias: read(Item.objects.using(alias)))
    assert len({str(rows) for rows in expected.values()}) == 2 or name == "prefetches"
    for _ in range(2):
        for alias in ALIASES:
            assert outcome(lambda alias=alias: read(Item.objects.using(alias))) == expected[alias]
    request.getfixturevalue("nothing_is_compiled")
    for alias in ALIASES:
        assert outcome(lambda alias=alias: read(Item.objects.using(alias))) == expected[alias]
        assert len(expected[alias][1]) == 1


def test_one_plan_is_used_with_and_without_using(
    items: World, request: pytest.FixtureRequest
) -> None:
    for _ in range(2):
        assert Item.objects.get(owner_id=ONE, pk=101).pk == 101
    request.getfixturevalue("nothing_is_compiled")
    assert Item.objects.using(SHARD[ONE]).get(owner_id=ONE, pk=101).pk == 101
    assert Item.objects.using("photos").get(owner_id=ONE, pk=101).pk == 101
    assert Item.objects.using(SHARD[TWO]).using(None).get(owner_id=ONE, pk=101).pk == 101
    with pytest.raises(Item.DoesNotExist):
        Item.objects.using(SHARD[TWO]).get(owner_id=ONE, pk=101)


def test_the_alias_of_the_group_is_routed(items: World) -> None:
    for _ in range(4):
        assert {row.pk for row in Item.objects.using("photos").filter(owner_id=TWO)} == {102, 106}
        with pytest.raises(Exception, match=r"scatter\(\)"):
            list(Item.objects.using("photos").filter(stars=1))


def test_another_database_is_left_to_django(items: World) -> None:
    """The table is missing there, so Django's error comes each time."""
    for alias in ("nowhere", "photos_99999"):
        for _ in range(4):
            with pytest.raises(Exception, match=alias):
                list(Item.objects.using(alias).filter(owner_id=ONE))
    route = Item.objects.using("default").filter(owner_id=ONE).explain_routing()
    assert route.plan == "Django compiles queries of other databases"


def test_an_instance_of_another_shard(items: World) -> None:
    """Nothing is checked after using(): the column is compared on the named shard."""
    shelf = items.of("Shelf", 11)
    for _ in range(4):
        for alias in ALIASES:
            with without_plans():
                expected = outcome(lambda alias=alias: list(shelf_items(shelf, alias)))
            assert outcome(lambda alias=alias: list(shelf_items(shelf, alias))) == expected


def shelf_items(shelf: Any, alias: str) -> Any:
    return Item.objects.using(alias).filter(shelf=shelf).order_by("pk")


def test_a_manager_of_a_database_keeps_its_checks(items: World) -> None:
    """db_manager() names an alias without using(), so rows of other shards are refused."""
    manager: Any = Item.objects.db_manager(SHARD[TWO])
    for _ in range(4):
        with pytest.raises(CrossShardRelation):
            list(manager.filter(stars__in=Item.objects.filter(owner_id=ONE).values("stars")))
        assert {row.owner_id for row in manager.filter(owner_id=TWO)} == {TWO}


def test_a_related_manager_on_a_named_shard(items: World, request: pytest.FixtureRequest) -> None:
    agent = Agent.objects.get(pk=ONE)
    for _ in range(4):
        assert {row.pk for row in agent.items.using(SHARD[ONE])} == {101, 104, 105, 107}
        assert all(row.owner is agent for row in agent.items.using(SHARD[ONE]))
        assert not agent.items.using(SHARD[TWO]).exists()
    request.getfixturevalue("nothing_is_compiled")
    assert {row.pk for row in agent.items.using(SHARD[ONE])} == {101, 104, 105, 107}


def test_a_bound_key_filters_a_named_shard(items: World) -> None:
    for _ in range(4):
        outside = Item.objects.using(SHARD[ONE]).filter(stars__gte=0)
        with bound(owner_id=ONE):
            assert {row.owner_id for row in outside} == {ONE}
            assert not Item.objects.using(SHARD[TWO]).filter(stars__gte=0).exists()


def test_update_and_delete_of_a_named_shard(rows: list[Photo]) -> None:
    for _ in range(4):
        assert Photo.objects.using(SHARD[TWO]).filter(user_id=ONE).update(stars=9) == 0
        assert Photo.objects.using(SHARD[ONE]).filter(user_id=ONE).update(stars=9) == 2
    assert Photo.objects.using(SHARD[TWO]).filter(user_id=ONE).delete()[0] == 0


@pytest.mark.django_db(transaction=True, databases=DATABASES)
def test_cached_rows_are_read_on_the_shard_of_their_key(
    photos: list[CachedPhoto], request: pytest.FixtureRequest
) -> None:
    """On the shard of the key, the entries are those of reads without using()."""
    here, there = CachedPhoto.objects.using(SHARD[ONE]), CachedPhoto.objects.using(SHARD[TWO])
    pk = next(photo.pk for photo in photos if photo.user_id == ONE)
    for _ in range(3):
        expected = list(CachedPhoto.objects.filter(user_id=ONE))
        assert list(here.filter(user_id=ONE)) == expected
        assert here.get(user_id=ONE, pk=pk).pk == pk
    for _ in range(3):
        assert queries(lambda: list(here.filter(user_id=ONE))) == 0
        assert queries(lambda: here.get(user_id=ONE, pk=pk)) == 0
        assert queries(lambda: fetch_together(here.filter(user_id=ONE))) == 0
        # The rows of the key are elsewhere, so nothing is cached.
        assert queries(lambda: list(there.filter(user_id=ONE)), SHARD[TWO]) == 1
        assert queries(lambda: there.filter(user_id=ONE).exists(), SHARD[TWO]) == 1
        assert not list(there.filter(user_id=ONE))
        fetched = there.filter(user_id=ONE)
        fetch_together(fetched)
        assert list(fetched) == []
        assert list(CachedPhoto.objects.filter(user_id=ONE)) == expected
    # Without a key, the rows are not cached, but a plan reads them.
    assert {photo.user_id for photo in here.filter(stars__gte=0)} == {ONE}
    request.getfixturevalue("nothing_is_compiled")
    assert len(list(here.filter(user_id=ONE))) == len(expected)
    assert queries(lambda: list(here.uncached().filter(user_id=ONE))) == 1


def look_ups(read: Callable[[], Any]) -> int:
    """Return how often ``read`` queries the directory, if this process knows the shard of no key."""
    runtime.strategy("photos").forget()  # type: ignore[attr-defined]
    with CaptureQueriesContext(connections["directory"]) as sent:
        read()
    return len(sent)


LOOKED_UP: dict[str, Read] = {
    "a cached list": lambda rows: list(rows.filter(user_id=ONE)),
    "of another shard": lambda rows: list(rows.using(SHARD[TWO]).filter(user_id=ONE)),
    "of no shard": lambda rows: list(rows.filter(user_id=UNPLACED)),
    "uncached": lambda rows: list(rows.uncached().filter(user_id=ONE)),
    "values": lambda rows: list(rows.filter(user_id=ONE).values("pk")),
    "together": lambda rows: fetch_together(rows.filter(user_id=ONE)),
    "together on another shard": lambda rows: fetch_together(
        rows.using(SHARD[TWO]).filter(user_id=ONE)
    ),
    "together, uncached": lambda rows: fetch_together(rows.uncached().filter(user_id=ONE)),
    "together, without a cache": lambda rows: fetch_together(
        Photo.objects.using(SHARD[ONE]).filter(user_id=ONE)
    ),
}


@pytest.mark.django_db(transaction=True, databases=DATABASES)
@pytest.mark.parametrize("name", LOOKED_UP)
def test_a_key_is_looked_up_only_for_the_cache(name: str, photos: list[CachedPhoto]) -> None:
    def read() -> Any:
        return LOOKED_UP[name](CachedPhoto.objects.using(SHARD[ONE]))

    with without_plans():
        expected = look_ups(read)
    assert max(look_ups(read) for _ in range(4)) <= expected


@pytest.mark.django_db(transaction=True, databases=DATABASES)
def test_a_plan_that_another_thread_makes_meanwhile(
    photos: list[CachedPhoto], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cached on another shard than that of the key."""
    topology = runtime.topology

    def topology_after_other_reads() -> Any:
        monkeypatch.setattr(runtime, "topology", topology)
        for _ in range(2):
            assert list(CachedPhoto.objects.filter(user_id=ONE))
        return topology()

    def rows() -> Any:
        return CachedPhoto.objects.using(SHARD[TWO]).filter(user_id=ONE)

    def read() -> None:
        found = rows()
        monkeypatch.setattr(runtime, "topology", topology_after_other_reads)
        assert not list(found)

    for _ in range(4):
        first_recordings.forget()
        assert not list(rows())
        assert queries(read, SHARD[TWO]) == 1
        clock.ahead += LATER
