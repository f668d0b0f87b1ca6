"""Every method of querysets under a bound key: as if each call named the key, or refused.

ONE and NEAR are on one shard, so a query that is routed but not filtered would reach rows of both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from django.db import connections, models
from django.db.models import Count, Exists, F, OuterRef, Q, QuerySet, Subquery, Value, functions
from django.test.utils import CaptureQueriesContext, isolate_apps

from sharded_orm import bound, runtime
from sharded_orm.exceptions import BoundKeyMismatch
from sharded_orm.models.querysets.update_conflicts import refuse_upserts_without_key
from sharded_orm.models.sharding.bound_key import BoundKey
from sharded_orm.models.sharding.options import shard_options
from tests.photos.models import OnPhotos, Tag, Vote
from tests.queries.calls import CALLS, NOT_OF_ROWS, WRITING, Case
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, UNPLACED
from tests.queries.test_relation_matrix import RELATIONS, cells
from tests.queries.twins import ALIASES, Asynchronous, Outcome, World, comparable_value, outcome
from tests.relatives.sharded import models as sharded_models
from tests.relatives.sharded.models import Item

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]

Labelling: Any = Item.labels.through
Friendship: Any = Item.friends.through


@pytest.fixture
def world(placed: None) -> World:
    world = World(sharded_models, ALIASES)
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


#: Calls with rows of ONE, and with the values that make a new row one of ONE: nothing under the
#: bound key.
MORE: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "bulk_create": lambda rows, own: rows.bulk_create([new(900, own), new(901, own)]),
    "bulk_create, ignoring": lambda rows, own: rows.bulk_create(
        [new(900, own), new(101, own), new(103, own)], ignore_conflicts=True
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


# -- Upserts ---------------------------------------------------------------------------------


def upsert(field: str, *unique: str) -> dict[str, Any]:
    """Arguments of ``bulk_create()`` that change ``field`` of a row that is there."""
    needs_target = connections["photos"].features.supports_update_conflicts_with_target
    target = {"unique_fields": list(unique)} if needs_target else {}
    return {"update_conflicts": True, "update_fields": [field], **target}


def test_an_upsert_by_a_constraint_with_the_key(placed: None) -> None:
    Vote.objects.bulk_create(
        [Vote(user_id=key, number=1, value=value) for key, value in ((ONE, 1), (NEAR, 3))]
    )
    Tag.objects.create(user_id=ONE, name="sea")
    with bound(user_id=ONE):
        new_votes = [Vote(number=number, value=9) for number in (1, 2)]
        Vote.objects.bulk_create(new_votes, **upsert("value", "user_id", "number"))
        # Ids that are still to be generated are in conflict with no row.
        Tag.objects.bulk_create(
            [Tag(name=name) for name in ("sea", "sky")], **upsert("name", "user_id", "name")
        )
        assert sorted(Tag.objects.values_list("name", flat=True)) == ["sea", "sky"]
    rows = Vote.objects.scatter().values_list("user_id", "number", "value")
    assert sorted(rows) == [(ONE, 1, 9), (ONE, 2, 9), (NEAR, 1, 3)]


@pytest.mark.parametrize("pk", [103, 101, 900, Value(103), F("seller_id")], ids=repr)
def test_an_upsert_that_may_change_a_row_of_another_key(world: World, pk: Any) -> None:
    before = world.rows()
    got = run(
        world,
        lambda: Item.objects.bulk_create([new(pk, {})], **upsert("name", "id")),
        is_bound=True,
    )
    assert isinstance(got.error, BoundKeyMismatch)
    assert "'id'" in str(got.error) and "unbound()" in str(got.error)
    assert got.rows == before


class Lower(models.CharField):  # type: ignore[type-arg]  # Django has no argument here
    """Stores another value than the instance has, also for None."""

    def pre_save(self, model_instance: models.Model, add: bool) -> str:
        return str(getattr(model_instance, self.attname)).lower()


@isolate_apps("tests.photos")
def test_which_constraints_might_find_rows_of_another_key() -> None:
    """Where the database uses all constraints of a table (MySQL and MariaDB)."""

    class Base(OnPhotos):
        user_id = models.BigIntegerField()
        code = models.CharField(max_length=9, null=True)

        class Meta:
            abstract = True
            app_label = "photos_app"

    class Coded(Base):
        class Meta(Base.Meta):
            constraints = [models.UniqueConstraint(fields=["code"], name="code")]

    class Related(Base):
        tag = models.OneToOneField(Tag, models.CASCADE, null=True, related_name="+")

    class Changed(Base):
        lower = Lower(max_length=9, unique=True, null=True)

    class ByExpression(Base):
        class Meta(Base.Meta):
            constraints = [models.UniqueConstraint(functions.Lower("code"), name="expression")]

    class ByExpressionAndKey(Base):
        class Meta(Base.Meta):
            constraints = [
                models.UniqueConstraint("user_id", functions.Lower("code"), name="expressions")
            ]

    def is_refused(model: Any, **values: Any) -> bool:
        options, key = shard_options(model), BoundKey("user_id", ONE)
        assert options is not None
        try:
            refuse_upserts_without_key(options, key, [model(user_id=ONE, **values)], None)
        except BoundKeyMismatch:
            return True
        return False

    assert not is_refused(Coded)
    assert is_refused(Coded, code="a")
    assert is_refused(Coded, code=Value(None))
    assert is_refused(Coded, pk=1)
    assert not is_refused(Related)
    assert is_refused(Related, tag_id=1)
    assert is_refused(Related, tag=Tag())
    assert is_refused(Changed)
    assert is_refused(ByExpression)
    assert not is_refused(ByExpressionAndKey, code="a")


def test_an_upsert_of_no_rows_places_no_key(placed: None) -> None:
    with bound(user_id=UNPLACED):
        assert Tag.objects.bulk_create([], **upsert("name", "id")) == []
    assert runtime.locate("photos", UNPLACED) is None


def test_an_upsert_of_rows_of_an_automatic_table(world: World) -> None:
    theirs = Labelling.objects.using(SHARD[NEAR]).filter(item_id=103).first()
    row = Labelling(id=theirs.pk, item=world.of("Item", 105), label=world.of("Label", 24))
    before = world.rows()
    with bound(owner=ONE), pytest.raises(BoundKeyMismatch, match="'id'"):
        Labelling.objects.bulk_create([row], **upsert("label", "id"))
    assert world.rows() == before


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
        row = Labelling.objects.select_related("item", "label").get(item=item, label=label)
        row.save()
        assert row.delete()[0] == 1
        assert row.pk is None
        item.labels.remove(25)
        assert [each.pk for each in item.labels.all()] == [21]
        item.labels.set([24, 25])
        item.labels.clear()
        assert not item.labels.exists()


def test_a_stored_row_of_an_automatic_table_stays_with_its_key(world: World) -> None:
    theirs, their_label = world.of("Item", 103), world.of("Label", 23)
    item, label = world.of("Item", 105), world.of("Label", 24)
    their_row = Labelling.objects.using(SHARD[NEAR]).filter(item_id=103).first()
    before = world.rows()
    with bound(owner=ONE):
        own_pk = Labelling.objects.values_list("pk", flat=True).first()

        def change(**values: Any) -> None:
            row = Labelling.objects.get(pk=own_pk)
            for name, value in values.items():
                setattr(row, name, value)
            row.save()

        def change_in_bulk(**values: Any) -> None:
            row = Labelling.objects.get(pk=own_pk)
            for name, value in values.items():
                setattr(row, name, value)
            Labelling.objects.bulk_update([row], ["label"])

        for refused in (
            lambda: Labelling.objects.update(label=their_label),
            lambda: Labelling.objects.update(label_id=23),
            lambda: Labelling.objects.update(label=23),
            lambda: Labelling.objects.update(item=theirs, label=label),
            lambda: Labelling.objects.update(label=F("item")),
            lambda: change(label_id=23),
            lambda: change(label=their_label),
            lambda: change_in_bulk(label_id=23),
            lambda: change_in_bulk(label=their_label),
            lambda: their_row.save(),
            lambda: their_row.delete(),
            lambda: Labelling(id=their_row.pk, item=item, label=label).save(),
        ):
            with pytest.raises(BoundKeyMismatch, match=r"unbound|as an instance"):
                refused()
        assert world.rows() == before
        change_in_bulk(label=world.of("Label", 25))
        assert Labelling.objects.get(pk=own_pk).label_id == 25
        assert Labelling.objects.filter(pk=own_pk).update(item=item, label=label) == 1
        assert Labelling.objects.filter(item=item).get().label_id == 24
    assert their_row.delete()[0] == 1


def test_the_key_of_related_rows_is_a_key_of_the_query(world: World) -> None:
    with bound(owner=ONE):
        for name in ("item__owner", "item__owner_id", "label__owner"):
            with pytest.raises(BoundKeyMismatch, match="names the shard key"):
                list(Labelling.objects.filter(**{name: NEAR}))
        with CaptureQueriesContext(connections[SHARD[ONE]]) as queries:  # type: ignore[arg-type]  # a shard's
            rows = list(Labelling.objects.filter(item__owner=ONE))
            assert rows and rows == list(Labelling.objects.all())
        condition = f"{connections[SHARD[ONE]].ops.quote_name('owner_id')} = "
        assert [sql["sql"].count(condition) for sql in queries.captured_queries] == [1, 1]
