"""Prefetches for rows of several shards whose queryset computes something over all its rows.

On several shards, a prefetch sends one statement to each shard. One database has one statement for
all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.contenttypes.prefetch import GenericPrefetch
from django.db import connections
from django.db.models import (
    Avg,
    Count,
    Exists,
    F,
    Func,
    IntegerField,
    OuterRef,
    Prefetch,
    Q,
    Subquery,
    Sum,
    Window,
    aprefetch_related_objects,
    prefetch_related_objects,
)
from django.db.models.expressions import RawSQL
from django.db.models.functions import Rank, RowNumber
from django.test.utils import CaptureQueriesContext

from sharded_orm.exceptions import ScatterNotSupported
from sharded_orm.models.sharding.options import group_of
from tests.queries.conftest import DATABASES, NEAR, ONE, TWO
from tests.queries.twins import World, all_rows

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(databases=DATABASES),
]

KEYS = (ONE, TWO, NEAR)


def number(*partition: Any, order: Any = "pk") -> Window:
    return Window(RowNumber(), partition_by=list(partition) or None, order_by=order)


def place(partition: str) -> Window:
    """The same as number(), but rows that a join doubles share a number. Their order is open."""
    return Window(Count("*"), partition_by=[partition], order_by="pk")


def listed(rows: Any) -> list[Any]:
    return list(rows)


def iterated(rows: Any) -> list[Any]:
    # One chunk, because Django computes a window for each chunk on its own.
    return list(rows.iterator(chunk_size=100))


@async_to_sync
async def listed_later(rows: Any) -> list[Any]:
    return [row async for row in rows]


@async_to_sync
async def iterated_later(rows: Any) -> list[Any]:
    return [row async for row in rows.aiterator(chunk_size=100)]


def in_bulk(rows: Any) -> list[Any]:
    return [row for _, row in sorted(rows.in_bulk().items())]


READS = [listed, iterated, listed_later, iterated_later, in_bulk]


#: Querysets of items whose values one database computes over the items of all shelves.
OVER_ALL: dict[str, Callable[[World], Any]] = {
    "window": lambda world: items(world).annotate(k=number()),
    "window over a column": lambda world: items(world).annotate(k=number("stars")),
    "window over an expression": lambda world: items(world).annotate(k=number(F("shelf") % 2)),
    "window over a global row": lambda world: items(world).annotate(k=number("city")),
    "window over rows without a parent": lambda world: items(world).annotate(k=number("parent")),
    "window of aggregates": lambda world: items(world).annotate(k=Window(Sum("stars"))),
    "in an expression": lambda world: items(world).annotate(k=number() + 1),
    "filter": lambda world: items(world).annotate(k=number()).filter(k__lt=4),
    "alias": lambda world: items(world).alias(k=number()).filter(k__lt=4),
    "order": lambda world: items(world).order_by(Window(Rank(), order_by="stars"), "pk"),
    "order by name": lambda world: items(world).alias(k=number()).order_by("-k"),
    "two windows": lambda world: items(world).annotate(k=number("shelf"), other=number()),
    "and slice": lambda world: items(world).annotate(k=number()).order_by("pk")[:1],
    "union": lambda world: items(world).filter(stars=1).union(items(world).filter(stars=2)),
}
#: The same for querysets whose values one database computes for each row, each shelf or each key.
PER_ROW: dict[str, Callable[[World], Any]] = {
    "all": lambda world: items(world),
    "window over the parent": lambda world: items(world).annotate(k=number("shelf")),
    "window over the parent and more": lambda world: items(world).annotate(
        k=number("stars", "shelf_id")
    ),
    "window over the key": lambda world: items(world).annotate(k=number("owner")),
    "window over itself": lambda world: items(world).annotate(k=number("pk")),
    "window over a row of the parent": lambda world: items(world).annotate(k=number("shelf__pk")),
    "filter on such a window": lambda world: items(world).annotate(k=number("shelf")).filter(k=1),
    "order by such a window": lambda world: items(world).order_by(number("shelf", order="-pk")),
    "slice": lambda world: items(world).order_by("-pk")[:1],
    "slice with a start": lambda world: items(world).order_by("pk")[1:2],
    "slice and window": lambda world: items(world).annotate(k=number("shelf")).order_by("-pk")[:1],
    "count": lambda world: items(world).annotate(k=Count("children")),
    "count and filter": lambda world: items(world).annotate(k=Count("labels")).filter(k__gt=0),
    "aggregates": lambda world: items(world).annotate(k=Avg("shelf__items__stars")),
    "distinct": lambda world: items(world).filter(Q(labels__gt=0) | Q(stars__gt=0)).distinct(),
    "exists": lambda world: items(world).annotate(
        k=Exists(world.models.Item.objects.filter(parent=OuterRef("pk")))
    ),
    "subquery": lambda world: items(world).annotate(
        k=Subquery(
            world.models.Item.objects.filter(shelf=OuterRef("shelf"))
            .order_by("-pk")
            .values("pk")[:1]
        )
    ),
}


def items(world: World) -> Any:
    return world.models.Item.objects.order_by("pk")


def shelves(world: World, *lookups: Any) -> Any:
    rows = world.models.Shelf.objects.filter(owner__in=KEYS).order_by("pk")
    return rows.prefetch_related(*lookups)


def related(rows: Any, name: str = "kept") -> list[Any]:
    return [[(row.pk, getattr(row, "k", None)) for row in getattr(parent, name)] for parent in rows]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("queryset", PER_ROW.values(), ids=PER_ROW)
def test_right(worlds: tuple[World, World], queryset: Any, read: Any) -> None:
    expected, got = (
        related(read(shelves(world, Prefetch("items", queryset(world), "kept"))))
        for world in worlds
    )
    assert got == expected
    assert any(expected)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("queryset", OVER_ALL.values(), ids=OVER_ALL)
def test_refused(items: World, queryset: Any, read: Any) -> None:
    rows = shelves(items, Prefetch("items", queryset(items), "kept"))
    with (
        CaptureQueriesContext(connections["photos"]) as sent,
        pytest.raises(ScatterNotSupported) as error,
    ):  # type: ignore[arg-type]  # a group's
        read(rows)
    assert "Remedy: " in str(error.value) and "prefetch for rows of one shard" in str(error.value)
    assert not sent.captured_queries


@pytest.mark.parametrize("queryset", OVER_ALL.values(), ids=OVER_ALL)
def test_rows_of_one_shard_are_as_in_one_database(
    worlds: tuple[World, World], queryset: Any
) -> None:
    if queryset is OVER_ALL["union"]:
        return  # Its parts say on no shard which rows they are about.
    expected, got = (
        related(
            world.models.Shelf.objects.filter(owner__in=[ONE, NEAR])
            .order_by("pk")
            .prefetch_related(Prefetch("items", queryset(world), "kept"))
        )
        for world in worlds
    )
    assert got == expected


# -- Other relations, and other ways to prefetch ---------------------------------------------


def rows_of(world: World, model: str) -> Any:
    return all_rows(getattr(world.models, model), world)


def values(world: World, model: str, path: str, queryset: Any) -> list[Any]:
    """Return the related rows of all rows of ``model``, with the values that were computed."""
    lookup = Prefetch(path, queryset, "kept")
    return comparable(rows_of(world, model).order_by("pk").prefetch_related(lookup), path)


def comparable(rows: Any, path: str) -> list[Any]:
    instances = list(rows)
    for name in path.split("__")[:-1]:
        following: list[Any] = []
        for instance in instances:
            one = getattr(instance, name)
            following += one.all() if hasattr(one, "all") else [one] if one else []
        instances = following
    kept = [getattr(instance, "kept", None) for instance in instances]
    lists = [rows if isinstance(rows, list) else [rows] for rows in kept]
    return [[(row and row.pk, getattr(row, "k", None)) for row in rows] for rows in lists]


#: A model, a path from its rows, the model at its end, and partitions: of which rows of one shard
#: only are in each, and of which one may have rows of several.
PATHS: list[tuple[str, str, str, list[str], list[str]]] = [
    ("Shelf", "items", "Item", ["shelf", "owner", "pk"], ["city", "stars", "parent", "seller"]),
    ("Item", "children", "Item", ["parent", "owner_id"], ["shelf", "city", "parent__parent"]),
    ("Item", "labels", "Label", ["items", "owner", "pk"], ["stars", "items__shelf"]),
    ("Label", "items", "Item", ["labels", "pk"], ["shelf", "name"]),
    ("Item", "friends", "Item", ["owner"], ["parent", "friends"]),
    ("Item", "cover", "Cover", ["item", "pk"], ["name"]),
    ("Item", "shelf", "Shelf", ["pk", "owner"], ["stars", "name"]),
    ("Item", "parent", "Item", ["pk", "owner"], ["parent", "shelf"]),
    ("Item", "notes", "Note", ["object_id", "owner"], ["content_type", "name"]),
    ("Item", "seller", "Agent", ["pk", "name"], []),
    ("Item", "shelf__owner", "Agent", ["pk"], ["name"]),
    ("Item", "shelf__items", "Item", ["shelf"], ["parent"]),
    ("Shelf", "items__labels", "Label", ["items"], ["stars"]),
    ("Shelf", "items__notes", "Note", ["object_id"], ["name"]),
    ("Shelf", "items__city", "City", ["pk"], ["name"]),
]
CELLS = [
    pytest.param(*path[:3], partition, is_right, id=f"{path[0]} {path[1]} by {partition}")
    for path in PATHS
    for is_right, partitions in ((True, path[3]), (False, path[4]))
    for partition in partitions
]


@pytest.mark.parametrize(("model", "path", "target", "partition", "is_right"), CELLS)
def test_relations(
    worlds: tuple[World, World],
    model: str,
    path: str,
    target: str,
    partition: str,
    is_right: bool,
) -> None:
    def read(world: World) -> list[Any]:
        annotated = getattr(world.models, target).objects.annotate(k=place(partition))
        return values(world, model, path, annotated.order_by("pk"))

    plain, sharded = worlds
    if is_right:
        assert read(sharded) == read(plain)
        return
    with (
        CaptureQueriesContext(connections["photos"]) as sent,  # type: ignore[arg-type]  # a group's
        pytest.raises(ScatterNotSupported, match="partition_by"),
    ):
        read(sharded)
    assert not sent.captured_queries


@pytest.mark.parametrize(("model", "path", "target", "partition", "is_right"), CELLS)
def test_by_hand(
    worlds: tuple[World, World],
    model: str,
    path: str,
    target: str,
    partition: str,
    is_right: bool,
) -> None:
    def read(world: World, *, later: bool = False) -> list[Any]:
        annotated = getattr(world.models, target).objects.annotate(k=place(partition))
        lookup = Prefetch(path, annotated.order_by("pk"), "kept")
        rows = list(rows_of(world, model).order_by("pk"))
        prefetch = async_to_sync(aprefetch_related_objects) if later else prefetch_related_objects
        prefetch(rows, lookup)
        return comparable(rows, path)

    plain, sharded = worlds
    leaves = group_of(getattr(sharded.models, target)) is None
    for later in (False, True):
        if is_right or leaves:  # Django sends one query for all global rows.
            assert read(sharded, later=later) == read(plain)
        else:
            with pytest.raises(ScatterNotSupported, match="partition_by"):
                read(sharded, later=later)


def test_prefetches_of_a_prefetch(worlds: tuple[World, World]) -> None:
    for partition, is_right in (("items", True), ("stars", False)):
        results = []
        for world in worlds:
            labels = world.models.Label.objects.order_by("pk").annotate(k=number(partition))
            nested = items(world).prefetch_related(Prefetch("labels", labels, "kept"))
            rows = shelves(world, Prefetch("items", nested))
            if world.aliases is not None and not is_right:
                with pytest.raises(ScatterNotSupported):
                    list(rows)
                return
            results.append(comparable(rows, "items__kept"))
        assert results[0] == results[1]


def test_rows_of_global_rows(worlds: tuple[World, World]) -> None:
    """The items of agents are on several shards, and so are their labels."""
    for partition, is_right in (("items", True), ("stars", False)):
        results = []
        for world in worlds:
            labels = world.models.Label.objects.order_by("pk").annotate(k=number(partition))
            lookups = [
                Prefetch("bought", items_of_all(world)),
                Prefetch("bought__labels", labels, "kept"),
            ]
            agents = world.models.Agent.objects.order_by("pk").prefetch_related(*lookups)
            if world.aliases is not None and not is_right:
                with pytest.raises(ScatterNotSupported):
                    list(agents)
                return
            results.append(comparable(agents, "bought__labels"))
        assert results[0] == results[1]


def items_of_all(world: World) -> Any:
    return all_rows(world.models.Item, world).order_by("pk")


def test_a_path_that_leaves_the_group(items: World) -> None:
    """The rows behind it are read once for each shard of the rows before it."""
    bought = all_rows(items.models.Item, items).annotate(k=number("shelf"))
    rows = rows_of(items, "Item").prefetch_related(Prefetch("shelf__owner__items", bought, "kept"))
    with pytest.raises(ScatterNotSupported):
        list(rows)


def test_generic_foreign_keys(worlds: tuple[World, World]) -> None:
    for partition, is_right in (("pk", True), ("owner", True), ("stars", False)):
        results = []
        for world in worlds:
            models = world.models
            querysets = [
                items(world).annotate(k=number(partition)),
                models.Agent.objects.all(),
            ]
            notes = rows_of(world, "Note").order_by("pk")
            rows = notes.prefetch_related(GenericPrefetch("content_object", querysets))
            if world.aliases is not None and not is_right:
                with pytest.raises(ScatterNotSupported):
                    list(rows)
                return
            objects = [row.content_object for row in rows]
            results.append([one and (one.pk, getattr(one, "k", None)) for one in objects])
        assert results[0] == results[1]


def test_managers_that_compute_over_all_rows(items: World, monkeypatch: pytest.MonkeyPatch) -> None:
    manager: Any = type(items.models.Item._default_manager)
    plain = manager.get_queryset

    def ranked(self: Any) -> Any:
        rows = plain(self)
        return rows.annotate(k=number()) if self.model is items.models.Item else rows

    monkeypatch.setattr(manager, "get_queryset", ranked)
    with pytest.raises(ScatterNotSupported):
        list(shelves(items, "items"))
    rows = list(shelves(items))
    with pytest.raises(ScatterNotSupported):
        prefetch_related_objects(rows, "items")
    assert len(shelves(items, "items").filter(owner=ONE)[0].items.all()) == 2


@pytest.mark.parametrize(
    "text",
    [
        RawSQL("ROW_NUMBER() OVER (ORDER BY stars)", (), IntegerField()),
        RawSQL("row_number() over(order by stars)", (), IntegerField()),
        Func(template="ROW_NUMBER() OVER (ORDER BY stars)", output_field=IntegerField()),
    ],
)
def test_sql_text(items: World, text: Any) -> None:
    annotated = items.models.Item.objects.annotate(k=text)
    with pytest.raises(ScatterNotSupported, match="OVER"):
        list(shelves(items, Prefetch("items", annotated)))
    extra = items.models.Item.objects.extra(select={"k": "ROW_NUMBER() OVER (ORDER BY stars)"})
    with pytest.raises(ScatterNotSupported, match="OVER"):
        list(shelves(items, Prefetch("items", extra)))
    with pytest.raises(ScatterNotSupported):
        list(rows_of(items, "Item").annotate(k=text))


def test_sql_text_about_one_row(worlds: tuple[World, World]) -> None:
    def doubled(world: World) -> Any:
        return items(world).annotate(k=RawSQL("stars + stars", (), IntegerField()))

    expected, got = (
        related(shelves(world, Prefetch("items", doubled(world), "kept"))) for world in worlds
    )
    assert got == expected


def test_distinct_on_fields(worlds: tuple[World, World]) -> None:
    if not connections["photos"].features.can_distinct_on_fields:
        return

    def read(world: World, *names: str) -> list[Any]:
        rows = world.models.Item.objects.order_by(*names, "-pk").distinct(*names)
        return related(shelves(world, Prefetch("items", rows, "kept")))

    plain, sharded = worlds
    for names in (("shelf",), ("stars", "shelf_id"), ("owner_id",), ("pk",)):
        assert read(sharded, *names) == read(plain, *names)
    for names in (("stars",), ("parent",), ("city_id",)):
        with pytest.raises(ScatterNotSupported, match="add the related row or the shard key"):
            read(sharded, *names)
