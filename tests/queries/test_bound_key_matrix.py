"""Every method of querysets under a bound key: as if each call named the key, or refused.

ONE and NEAR are on one shard, so a query that is routed but not filtered would reach rows of both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from django.db import connections
from django.db.models import Count, Exists, F, OuterRef, Q, QuerySet, Subquery

from sharded_orm import bound
from sharded_orm.exceptions import BoundKeyMismatch
from tests.queries.calls import CALLS, NOT_OF_ROWS, WRITING, Case
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD
from tests.queries.test_relation_matrix import RELATIONS, cells
from tests.queries.twins import ALIASES, Asynchronous, Outcome, World, comparable_value, outcome
from tests.relatives.sharded import models
from tests.relatives.sharded.models import Item

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]

Labelling: Any = Item.labels.through
Friendship: Any = Item.friends.through


@pytest.fixture
def world(placed: None) -> World:
    world = World(models, ALIASES)
    world.fill()
    return world


def run(world: World, call: Callable[[], Any], *, is_bound: bool, writes: bool = True) -> Outcome:
    def under_key(_: World) -> Any:
        with bound(owner=ONE) if is_bound else nullcontext():
            return comparable_value(call())

    return outcome(world, under_key, writes=writes)


# -- The methods that Django has -----------------------------------------------------------

#: Calls that name another key, or rows of it. They are refused, and nothing is written.
OF_ANOTHER_KEY = {
    "filter (instance of the key)",
    "filter (keys)",
    "filter (or)",
    "get (several)",
    "create (for another key)",
    "get_or_create (for another key)",
    "update_or_create (for another key)",
    "bulk_create",
    "bulk_update",
}
#: The same, for methods of related managers.
ROWS_OF_ANOTHER_KEY = {"add (of another shard", "remove (both", "remove (of another shard"}
#: Calls that differ, because only one of the two has a key: raw SQL is not filtered by the bound
#: key, and related managers are compared without a key in their writing calls.
OWN_WAY = {
    "raw",
    "create (without a key)",
    "get_or_create (by the primary key)",
    "update_or_create (by the primary key)",
}


def test_every_method_of_django_is_called() -> None:
    """Add a method of a later version of Django to ``calls.py``."""
    names = {name for name in dir(QuerySet) if callable(getattr(QuerySet, name)) and name[0] != "_"}
    assert names <= {*CALLS, *NOT_OF_ROWS, *(f"a{name}" for name in CALLS)}


@pytest.mark.parametrize(
    ("name", "later"),
    [
        ("no relation", False),
        pytest.param("no relation", True, marks=pytest.mark.mysql_settings),
        ("to a global model", False),
        ("its other side", False),
    ],
)
def test_as_if_each_call_named_the_key(world: World, name: str, later: bool) -> None:
    relation = RELATIONS[name]
    is_filtered_by_hand = relation.source is None or relation.field == "city"
    before = world.rows()
    refused, wrong = set(), []
    for method, cell, call in cells(relation.rows(world), later=later):
        writes = method in WRITING
        by_hand = is_filtered_by_hand and (
            relation.source is None or not writes or method in ("update", "delete")
        )

        def called(
            *, is_bound: bool, method: str = method, call: Any = call, by_hand: bool = by_hand
        ) -> Any:
            rows = relation.rows(world)
            rows = rows.filter(owner=ONE) if by_hand and not is_bound else rows
            return call(Asynchronous(rows, method) if later else rows, Case(world, relation))

        got, expected = (
            run(world, lambda b=b: called(is_bound=b), is_bound=b, writes=writes)
            for b in (True, False)
        )
        if isinstance(got.error, BoundKeyMismatch):
            refused.add(cell)
            if writes and got.rows != before:
                wrong.append(f"{cell}: refused, and rows were written")
        elif cell in OWN_WAY:
            assert (
                got.comparable() == expected.comparable() or expected.is_refusal or got.is_refusal
            )
        elif got.comparable() != expected.comparable() or got.rows != expected.rows:
            wrong.append(f"{cell}: {got.comparable()!r}; not {expected.comparable()!r}")
    assert not wrong, "\n".join(wrong)
    of_querysets = {cell for cell in refused if cell.split()[0] not in ("add", "remove")}
    assert of_querysets <= OF_ANOTHER_KEY
    assert all(cell.startswith(tuple(ROWS_OF_ANOTHER_KEY)) for cell in refused - of_querysets)
    if relation.source is None and not later:
        assert refused == OF_ANOTHER_KEY


# -- More calls ----------------------------------------------------------------------------


def new(pk: int, own: dict[str, Any], **values: Any) -> Item:
    return Item(id=pk, name=f"new {pk}", seller_id=NEAR, **{**own, **values})


def upsert() -> dict[str, Any]:
    """Arguments of ``bulk_create()`` that change the name of a row that is there."""
    needs_target = connections[SHARD[ONE]].features.supports_update_conflicts_with_target
    unique = {"unique_fields": ["id"]} if needs_target else {}
    return {"update_conflicts": True, "update_fields": ["name"], **unique}


#: Calls with rows of ONE, and with the values that make a new row one of ONE: nothing under the
#: bound key.
MORE: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "bulk_create": lambda rows, own: rows.bulk_create([new(900, own), new(901, own)]),
    "bulk_create, ignoring": lambda rows, own: rows.bulk_create(
        [new(900, own), new(101, own), new(103, own)], ignore_conflicts=True
    ),
    "bulk_create, updating": lambda rows, own: rows.bulk_create(
        [new(900, own), new(101, own)], **upsert()
    ),
    "get_or_create": lambda rows, own: rows.get_or_create(id=900, seller_id=NEAR, **own),
    "get_or_create of a row": lambda rows, own: rows.get_or_create(id=101, **own),
    "update_or_create": lambda rows, own: rows.update_or_create({"name": "x"}, id=101, **own),
    "in_bulk": lambda rows, own: rows.in_bulk([101, 103, 104]),
    "dates": lambda rows, own: list(rows.dates("posted_at", "day")),
    "datetimes": lambda rows, own: list(rows.datetimes("posted_at", "day", order="DESC")),
    "earliest": lambda rows, own: rows.earliest("posted_at", "pk"),
    "latest": lambda rows, own: rows.latest("posted_at", "pk"),
    "union": lambda rows, own: sorted(
        rows.filter(stars=1).union(rows.exclude(stars=1), all=True).values_list("pk", flat=True)
    ),
    "intersection": lambda rows, own: list(rows.intersection(rows.filter(stars=1))),
    "difference": lambda rows, own: list(rows.difference(rows.filter(stars=1)).order_by("pk")),
    "distinct values": lambda rows, own: list(rows.order_by("stars").values("stars").distinct()),
    "groups": lambda rows, own: list(
        rows.order_by("stars").values("stars").annotate(n=Count("pk"))
    ),
    "exists": lambda rows, own: rows.filter(pk=103).exists(),
    "in a subquery": lambda rows, own: list(rows.filter(pk__in=rows.filter(stars=1).values("pk"))),
    "exists inside": lambda rows, own: list(
        rows.filter(Exists(rows.filter(stars=OuterRef("stars"), pk__gt=OuterRef("pk"))))
    ),
    "subquery": lambda rows, own: list(
        rows.order_by("pk")
        .annotate(top=Subquery(rows.order_by("-pk").values("pk")[:1]))
        .values_list("pk", "top")
    ),
    "children": lambda rows, own: list(rows.filter(Q(children__stars=1) | Q(labels=21)).distinct()),
    "update": lambda rows, own: rows.filter(pk__gte=101).update(stars=F("stars") + 1),
    "delete": lambda rows, own: rows.filter(pk=107).delete(),
    "delete of another's": lambda rows, own: rows.filter(pk=103).delete(),
}


@pytest.mark.parametrize("call", MORE.values(), ids=MORE)
def test_more_calls(world: World, call: Callable[[Any, dict[str, Any]], Any]) -> None:
    got = run(world, lambda: call(Item.objects, {}), is_bound=True)
    own = {"owner_id": ONE}
    expected = run(world, lambda: call(Item.objects.filter(**own), own), is_bound=False)
    assert (got.comparable(), got.rows) == (expected.comparable(), expected.rows)
    assert got.error is None


def test_an_insert_does_not_change_a_row_of_another_key(world: World) -> None:
    before = world.rows()
    got = run(
        world,
        lambda: Item.objects.bulk_create([new(900, {}), new(103, {})], **upsert()),
        is_bound=True,
    )
    assert isinstance(got.error, BoundKeyMismatch)
    assert "103" in str(got.error) and "unbound()" in str(got.error)
    assert got.rows == before


# -- Automatic many-to-many tables ---------------------------------------------------------

#: Calls with the rows of a table that relate rows of ONE.
OF_THROUGH: dict[str, Callable[[Any], Any]] = {
    "all": lambda rows: list(rows.order_by("pk")),
    "using": lambda rows: list(rows.using(SHARD[ONE]).order_by("pk")),
    "get": lambda rows: rows.get(item_id=101, label_id=24),
    "get of another's": lambda rows: rows.get(item_id=103),
    "get_or_create of a row": lambda rows: rows.using(SHARD[ONE]).get_or_create(
        item_id=101, label_id=24
    ),
    "values": lambda rows: sorted(rows.values_list("item_id", "label_id")),
    "count": lambda rows: rows.count(),
    "exists": lambda rows: rows.filter(item_id=103).exists(),
    "aggregate": lambda rows: rows.aggregate(n=Count("pk")),
    "iterator": lambda rows: sorted(row.pk for row in rows.iterator()),
    "in_bulk": lambda rows: rows.in_bulk(),
    "first": lambda rows: rows.order_by("-pk").first(),
    "union": lambda rows: sorted(
        rows.values_list("pk").union(rows.filter(label_id=21).values_list("pk"))
    ),
    "subquery": lambda rows: sorted(
        Item.objects.filter(pk__in=rows.values("item"), owner=ONE).values_list("pk")
    ),
    "update": lambda rows: rows.filter(label_id=24).update(label_id=25),
    "update of another's": lambda rows: rows.filter(item_id=103).update(label_id=21),
    "delete": lambda rows: rows.all().delete(),
    "delete of a shard": lambda rows: rows.using(SHARD[ONE]).all().delete(),
    "delete of one": lambda rows: rows.filter(item=101).delete(),
    "delete of another's": lambda rows: rows.filter(item=103).delete(),
}


@pytest.mark.parametrize("call", OF_THROUGH.values(), ids=OF_THROUGH)
def test_rows_of_an_automatic_table(world: World, call: Callable[[Any], Any]) -> None:
    got = run(world, lambda: call(Labelling.objects), is_bound=True)
    by_key = Labelling.objects.filter(item__owner=ONE)
    expected = run(world, lambda: call(by_key), is_bound=False)
    assert (got.comparable(), got.rows) == (expected.comparable(), expected.rows)
    assert not got.is_refusal


def test_a_table_that_relates_rows_of_one_model(world: World) -> None:
    theirs = world.of("Item", 103)
    theirs.friends.add(theirs)
    with bound(owner=ONE):
        pairs = Friendship.objects.values_list("from_item", "to_item")
        assert sorted(pairs) == [(101, 104), (104, 101)]
        assert Friendship.objects.scatter().count() == 3


def test_new_rows_of_an_automatic_table(world: World) -> None:
    item, label = world.of("Item", 105), world.of("Label", 24)
    theirs, their_label = world.of("Item", 103), world.of("Label", 23)
    of_shard = Labelling.objects.using(SHARD[ONE])
    before = world.rows()
    with bound(owner=ONE):
        for refused in (
            lambda: Labelling.objects.create(item=theirs, label=their_label),
            lambda: Labelling(item=theirs, label=their_label).save(),
            lambda: Labelling.objects.bulk_create([Labelling(item=theirs, label=their_label)]),
            lambda: of_shard.create(item_id=103, label_id=23),
            lambda: of_shard.create(item=item, label_id=23),
            lambda: of_shard.bulk_create([Labelling(item=item, label_id=23)]),
            lambda: of_shard.bulk_create([Labelling(item_id=105, label_id=21)]),
            lambda: of_shard.bulk_create([Labelling(item_id=105, label_id=23)]),
            lambda: of_shard.get_or_create(item_id=103, label_id=25),
        ):
            with pytest.raises(BoundKeyMismatch):
                refused()
        assert world.rows() == before
        assert Labelling.objects.create(item=item, label=label)._state.db == SHARD[ONE]
        Labelling.objects.bulk_create([Labelling(item=item, label=world.of("Label", 25))])
        item.labels.add(21)
        assert sorted(item.labels.values_list("pk", flat=True)) == [21, 24, 25]
        row = Labelling.objects.get(item=item, label=label)
        row.save()
        row.delete()
        item.labels.remove(25)
        assert [each.pk for each in item.labels.all()] == [21]
        item.labels.set([24, 25])
        item.labels.clear()
        assert not item.labels.exists()
