"""Reads by plans: the same SQL, results and errors as Django's, without compiling again."""

from __future__ import annotations

import copy
import pickle
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date, datetime
from decimal import Decimal
from enum import IntEnum
from typing import Any
from uuid import UUID

import pytest
from django.db import connections, models
from django.db.models import Exists, F, Manager, Prefetch, Q, QuerySet
from django.db.models.query import ModelIterable
from django.test.utils import CaptureQueriesContext
from django.utils.functional import SimpleLazyObject, lazystr

from sharded_orm import bound, reads_own_row
from sharded_orm.models import ShardedManager
from sharded_orm.models.querysets.plans import without_plans
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES, ONE, SHARD, START, TWO, UNPLACED
from tests.queries.twins import World, comparable_value, rolled_back
from tests.relatives.sharded.models import Agent, Item, Label, Shelf

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]

PROGRAMS = 200


class Number(IntEnum):
    ONE = ONE


#: Values of each kind that Django treats in its own way: prepared, refused, or with other SQL.
VALUES: list[Callable[[], Any]] = [
    *[lambda value=value: value for value in (ONE, TWO, UNPLACED, 0, -1, 101, 104, 2, 2**31)],
    *[lambda value=value: value for value in (2**63, -(2**63) - 1, 10**30, "1", "101", " 1")],
    *[lambda value=value: value for value in ("item 101", "x", "", "é", "a\x00b", "1.5", True)],
    *[lambda value=value: value for value in (None, 1.0, 1.5, Decimal(1), Number.ONE, b"1")],
    lambda: UUID(int=1),
    lambda: lazystr("1"),
    lambda: date(2026, 1, 1),
    lambda: datetime(2026, 1, 2),
    lambda: START,
    lambda: [ONE, TWO],
    lambda: [101, 105, 101],
    lambda: (104,),
    lambda: {105, 101},
    lambda: frozenset({"101", "0104"}),
    lambda: [101, None],
    lambda: [101, "104"],
    lambda: [2**63, 101],
    lambda: [None],
    lambda: ["item 101", "item 105"],
    lambda: [True],
    lambda: [date(2026, 1, 1)],
    lambda: [START],
    lambda: iter([101, 104]),
    lambda: [[101]],
    list,
    lambda: False,
    lambda: F("stars"),
    lambda: [F("stars")],
    lambda: Agent.objects.get(pk=ONE),
    lambda: [Agent.objects.get(pk=ONE)],
    lambda: Agent(),
    lambda: Agent(pk=TWO),
    lambda: SimpleLazyObject(lambda: Agent.objects.get(pk=ONE)),
    lambda: Shelf.objects.get(owner_id=ONE, pk=11),
    lambda: Item.objects.filter(owner_id=ONE),
]
NAMES = [
    "pk", "id", "owner_id", "owner", "stars", "name", "shelf_id", "buyer", "city_id", "posted_at",
    "stars__gt", "pk__lt", "id__gte", "stars__lte", "name__gt", "owner_id__gt", "owner__exact",
    "shelf__id", "stars__in", "pk__isnull", "name__iexact", "shelf__name", "nothing", "owner__x",
    "_connector", "pk__in", "stars__in", "name__in", "shelf__in", "shelf_id__in", "owner__in", "city__in",
    "shelf__isnull", "posted_at__isnull", "owner__isnull", "posted_at__lt", "buyer_id", "shelf",
    "id__in", "posted_at__in", "pk__range", "buyer__in", "city__isnull",
]  # fmt: skip
FIELDS: list[tuple[Any, ...]] = [
    ("pk",), ("id", "name"), ("owner",), ("owner_id", "stars"), ("owner", "owner_id"), ("posted_at",), (),
    ("shelf__name",), ("nothing",), ("name", "name"), ("labels",), (F("stars"),), (None,), ("stars", "pk"),
]  # fmt: skip
SELECTIONS: list[Callable[[Any, tuple[Any, ...]], Any]] = [
    lambda rows, names: rows.values(*names),
    lambda rows, names: rows.values_list(*names),
    lambda rows, names: rows.values_list(*names, flat=True),
    lambda rows, names: rows.values_list(*names, named=True),
    lambda rows, names: rows.values_list(*names, named=True, flat=True),
    lambda rows, names: rows.values(more=F("stars")),
    lambda rows, names: rows.only(*names),
    lambda rows, names: rows.defer(*names),
    lambda rows, names: rows.select_related("shelf", "parent"),
    lambda rows, names: rows.select_related(*names),
]
PREFETCHES: list[tuple[Any, ...]] = [
    ("children",), ("shelf",), ("shelf", "children__labels"), (Prefetch("children", Item.objects.order_by("-pk")[:1]),),
    (Prefetch("children", to_attr="kids"),), (None,), (), ("nothing",), (1,), (F("stars"),), ("owner",), ("buyer", "labels"),
]  # fmt: skip
ORDERS = [
    ("pk",), ("-stars", "id"), (), ("name",), ("owner_id",), ("shelf__name",), ("nothing",),
    (F("stars").desc(),), ("-posted_at", "pk"), (1,),
]  # fmt: skip
SLICES: list[Any] = [
    slice(0, 2), slice(1, 3), slice(None, 1), slice(1, None), slice(2, 2), slice(0, 0), slice(3, 1),
    slice(0, 4, 2), slice(-1), slice("a"), slice(True, 2), 0, 5, -1, "a",
]  # fmt: skip
ENDS: list[Callable[[Any], Any]] = [
    list, list, list, lambda rows: rows.exists(), lambda rows: rows.count(), len, bool, repr,
    lambda rows: [(row, row._prefetched_objects_cache, row._state.fields_cache) for row in rows],
    lambda rows: rows.first(), lambda rows: rows.last(), lambda rows: rows.get(),
    lambda rows: list(rows.values("pk")), lambda rows: list(rows.reverse()),
    lambda rows: [rows.exists(), list(rows), rows.count(), rows.first()],
    lambda rows: list(rows.iterator()), lambda rows: rows.ordered, lambda rows: str(rows.query),
    lambda rows: list(rows.select_related("shelf")), lambda rows: list(rows.only("name")),
    lambda rows: list(rows.prefetch_related("children")), lambda rows: list(rows | rows),
    lambda rows: list(rows.union(rows)), lambda rows: rows.aggregate(models.Sum("stars")),
    lambda rows: list(rows.distinct()), lambda rows: list(copy.deepcopy(rows)),
    lambda rows: list(pickle.loads(pickle.dumps(rows))), lambda rows: rows.in_bulk(),
    lambda rows: list(rows.using(SHARD[ONE])), lambda rows: list(rows.scatter().order_by("pk")),
    lambda rows: list(rows.exclude(stars=2)), lambda rows: list(rows.complex_filter({})),
    lambda rows: list(rows.complex_filter({"stars": 1})), lambda rows: list(rows.filter()),
    lambda rows: list(rows.exclude()), lambda rows: list(rows.complex_filter(Q(stars=1))), lambda rows: [row.pk for row in rows.all()],
    lambda rows: list(Item.objects.filter(owner_id=ONE, pk__in=rows.filter(owner_id=ONE))),
]  # fmt: skip


def condition(pick: random.Random, depth: int = 2) -> Any:
    """A random ``Q``, with other parts in places where Django takes them."""
    choice = pick.random()
    if depth == 0 or choice < 0.4:
        # Mostly conditions that Django accepts, because many trees have several.
        if pick.random() < 0.7:
            return Q(**pick.choice(CONDITIONS)(pick.randrange(3)))
        named = {pick.choice(NAMES): pick.choice(VALUES)() for _ in range(pick.randrange(1, 3))}
        named.pop("_connector", None)
        return Q(**named)
    left, right = condition(pick, depth - 1), condition(pick, depth - 1)
    if choice < 0.6:
        return left | right
    if choice < 0.75:
        return left & right
    if choice < 0.9:
        return ~left
    return pick.choice(PARTS)(left, right)


#: Conditions with values that differ by a number.
CONDITIONS: list[Callable[[int], dict[str, Any]]] = [
    lambda n: {"stars": n}, lambda n: {"stars__gt": n, "name": f"item {100 + n}"}, lambda n: {"pk": 101 + n},
    lambda n: {"owner_id": (ONE, TWO, UNPLACED)[n]}, lambda n: {"shelf": 11 + n}, lambda n: {"shelf": None},
    lambda n: {"shelf__isnull": n > 0}, lambda n: {"pk__in": list(range(101, 102 + n))},
    lambda n: {"posted_at__lte": START}, lambda n: {"name": None}, lambda n: {"pk__lt": 103 + n, "stars": 1},
    lambda n: {"buyer_id": n}, lambda n: {"shelf__owner_id": ONE}, lambda n: {"city__isnull": True},
]  # fmt: skip
#: Other combinations, most of which have no plan.
PARTS: list[Callable[[Any, Any], Any]] = [
    lambda left, right: left ^ right, lambda left, right: Q(left, right, _connector="OR"),
    lambda left, right: Q(), lambda left, right: Q() | left, lambda left, right: Q(left),
    lambda left, right: Q(Exists(Item.objects.filter(owner_id=ONE)), left),
    lambda left, right: Q(("stars", 1), left), lambda left, right: Q(left, stars=F("stars")),
    lambda left, right: Q(_connector="OR", stars=1, shelf=None), lambda left, right: Q(stars=1) | Q(stars=1),
    lambda left, right: Q(left, _connector="OR"), lambda left, right: Q(_connector="OR", owner_id=ONE),
    lambda left, right: Marked(stars=1), lambda left, right: Q(Marked(stars=1), right),
]  # fmt: skip


class Marked(Q):
    """A ``Q`` of a project."""


class Program:
    """A random chain of calls, the same for each run of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self) -> Any:
        pick = random.Random(self.seed)
        rows: Any = Item.objects.all() if pick.random() < 0.5 else Item.objects
        if pick.random() < 0.8:
            rows = rows.filter(owner_id=pick.choice([ONE, TWO, UNPLACED]))
        for _ in range(pick.randrange(4)):
            choice = pick.random()
            if choice < 0.25:
                trees = [condition(pick) for _ in range(pick.choice([1, 1, 2]))]
                named = pick.choice([{}, {}, {"owner_id": ONE}, {"stars__gte": 0}])
                rows = (rows.filter if choice < 0.17 else rows.exclude)(*trees, **named)
            elif choice < 0.6:
                conditions = {
                    pick.choice(NAMES): pick.choice(VALUES)() for _ in range(pick.randrange(1, 3))
                }
                rows = (rows.filter if choice < 0.47 else rows.exclude)(**conditions)
            elif choice < 0.7:
                rows = pick.choice(SELECTIONS)(rows, pick.choice(FIELDS))
            elif choice < 0.76:
                rows = rows.order_by(*pick.choice(ORDERS))
            elif choice < 0.82:
                rows = rows.prefetch_related(*pick.choice(PREFETCHES))
            elif not isinstance(rows, Manager):
                rows = rows[pick.choice(SLICES)]
                if not isinstance(rows, QuerySet):
                    return rows
        if pick.random() < 0.3:
            trees = [condition(pick)] if pick.random() < 0.3 else []
            return rows.get(*trees, **{pick.choice(NAMES): pick.choice(VALUES)()})
        return pick.choice(ENDS)(rows.all() if isinstance(rows, Manager) else rows)


def outcome(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return the result or the error of ``call``, and the statements that it has sent."""
    value: Any
    # PostgreSQL runs nothing in a transaction after an error.
    errors_end = connections["default"].vendor == "postgresql"
    with (
        rolled_back() if errors_end else nullcontext(),
        CaptureQueriesContext(connections["photos"]) as sent,
    ):
        try:
            value = comparable_value(call())
        except Exception as exc:
            value = (type(exc), str(exc))
    statements = [str(query["sql"]) for query in sent]
    # A scatter asks the nodes at the same time. The names of cursors are counted.
    return value, sorted(
        re.sub(r'"_django_curs_\w+"', "", text) for text in statements if "SAVEPOINT" not in text
    )


READS: dict[str, Callable[[], Any]] = {
    "get": lambda: Item.objects.get(owner_id=ONE, pk=101),
    "get of nothing": lambda: Item.objects.get(owner_id=ONE, pk=999),
    "get of several": lambda: Item.objects.get(owner_id=ONE),
    "get of a filter": lambda: Item.objects.filter(owner=ONE).get(name="item 101"),
    "a list": lambda: list(Item.objects.filter(owner_id=ONE)),
    "an ordered list": lambda: list(Item.objects.filter(owner_id=ONE).order_by("-stars", "pk")),
    "a page": lambda: list(Item.objects.filter(owner_id=ONE, pk__lt=105).order_by("-pk")[1:3]),
    "exists": lambda: Item.objects.filter(owner_id=ONE, stars=1).exists(),
    "count": lambda: Item.objects.filter(owner_id=ONE).count(),
    "first": lambda: Item.objects.filter(owner_id=ONE).first(),
    "the first by name": lambda: Item.objects.order_by("-name").filter(owner_id=ONE).first(),
    "all": lambda: list(Item.objects.all().filter(owner_id=TWO).all()),
    "get of a filter alone": lambda: Item.objects.filter(owner_id=ONE, pk=101).get(),
    "values": lambda: list(Item.objects.filter(owner_id=ONE).values("pk", "owner", "posted_at")),
    "values of all": lambda: list(Item.objects.filter(owner_id=ONE).values()),
    "values_list": lambda: list(Item.objects.filter(owner_id=ONE).values_list("name", "stars")),
    "flat": lambda: list(Item.objects.values_list("pk", flat=True).filter(owner_id=ONE)[:2]),
    "named": lambda: [
        (row.pk, row.posted_at)
        for row in Item.objects.filter(owner_id=ONE).values_list("pk", "posted_at", named=True)
    ],
    "the first value": lambda: Item.objects.filter(owner_id=ONE).values_list("name").first(),
    "get of values": lambda: Item.objects.values("name").get(owner_id=ONE, pk=101),
    "only": lambda: list(Item.objects.filter(owner_id=ONE).only("name", "shelf")),
    "defer": lambda: list(Item.objects.filter(owner_id=ONE).defer("name", "owner")),
    "a list of keys": lambda: list(Item.objects.filter(owner_id=ONE, pk__in=[101, 105, 101])),
    "a list of relations": lambda: list(Item.objects.filter(owner_id=ONE, shelf__in={11, 12})),
    "the count of a list": lambda: Item.objects.filter(owner_id=ONE, stars__in=(0, 1)).count(),
    "null": lambda: list(Item.objects.filter(owner_id=ONE, shelf=None)),
    "not null": lambda: Item.objects.filter(owner_id=ONE, shelf__isnull=False).exists(),
    "exclude": lambda: list(Item.objects.filter(owner_id=ONE).exclude(shelf=11, stars__gt=0)),
    "exclude a list": lambda: Item.objects.filter(owner_id=ONE).exclude(pk__in=[101]).count(),
    "or": lambda: list(Item.objects.filter(Q(stars=1) | Q(stars=2, name="x"), owner_id=ONE)),
    "or before the key": lambda: (
        Item.objects.filter(Q(stars=1) | Q(shelf=None)).filter(owner_id=ONE).count()
    ),
    "exclude a tree": lambda: list(
        Item.objects.filter(owner_id=ONE).exclude(Q(shelf=11) | ~Q(stars__gt=0), pk__in=[104])
    ),
    "not": lambda: Item.objects.filter(~Q(shelf=11, stars=1), owner_id=ONE).exists(),
    "a tree of the key": lambda: list(
        Item.objects.filter(Q(owner_id=ONE), ~(Q(stars=5) | ~Q(stars__lt=3)))
    ),
    "an or of one part": lambda: list(
        Item.objects.filter(
            Q(Q(stars=1, pk=101), _connector="OR"), Q(owner_id=ONE, _connector="OR")
        )
    ),
    "nested": lambda: list(
        Item.objects.filter(owner=ONE).filter(
            (Q(stars=1) | Q(stars__gt=4)) & (Q(shelf__isnull=True) | Q(pk__lt=105) & ~Q(buyer_id=3))
        )[:3]
    ),
    "get by a tree": lambda: Item.objects.filter(owner_id=ONE).get(Q(pk=101) | Q(pk=999)),
    "before a time": lambda: list(Item.objects.filter(owner_id=ONE, posted_at__lte=START)),
    # Without rows, nothing is prefetched, which Django would compile.
    "prefetches": lambda: list(
        Item.objects.filter(owner_id=ONE, pk__lt=0).prefetch_related("shelf", "children")[:3]
    ),
    "select_related": lambda: [
        (row.pk, row.shelf, row.parent)
        for row in Item.objects.filter(owner_id=ONE).select_related("shelf", "parent")
    ],
    "an instance": lambda: list(Item.objects.filter(owner=Agent(pk=ONE), stars=1)),
    "a related manager": lambda: list(Agent(pk=ONE).items.all()),
    "a page of a related manager": lambda: list(Agent(pk=ONE).items.filter(stars__lt=3)[:2]),
    "get of a related manager": lambda: Agent(pk=ONE).items.get(pk=101),
    "values of a related manager": lambda: list(Agent(pk=ONE).items.values_list("pk", flat=True)),
    "a related manager on the shard": lambda: list(Item(pk=101, owner_id=ONE).children.all()),
    "the key of a related manager again": lambda: list(
        Item(pk=101, owner_id=ONE).children.filter(owner_id=ONE, stars__gte=0)
    ),
    "a key twice": lambda: Item.objects.filter(owner_id=ONE, stars__gte=0).get(owner=ONE, pk=101),
    "exists of a related manager": lambda: Agent(pk=ONE).items.exists(),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_of_a_known_shape_compiles_nothing(
    name: str, items: World, request: pytest.FixtureRequest
) -> None:
    read = READS[name]
    with without_plans():
        expected = outcome(read)
    # A related manager takes one read more: Django filters by its instance when the rows are read.
    for _ in range(3):
        assert outcome(read) == expected
    request.getfixturevalue("nothing_is_compiled")
    assert outcome(read) == expected
    assert len(expected[1]) == 1


@pytest.mark.parametrize(
    "part", [0, *[pytest.param(n, marks=pytest.mark.long) for n in range(1, 18)]]
)
def test_random_chains(part: int, items: World) -> None:
    """Each chain runs four times, so that its plan is made and used."""
    for seed in range(part * PROGRAMS, (part + 1) * PROGRAMS):
        program = Program(seed)
        with without_plans():
            expected = outcome(program)
        for _ in range(4):
            assert outcome(program) == expected, seed


def test_values_of_other_types_have_other_shapes(items: World) -> None:
    for _ in range(4):
        for value in ("101", 101, Decimal(101), 101.0):
            assert Item.objects.get(owner_id=ONE, pk=value).pk == 101
        for value in (None, [101], "x"):
            with pytest.raises((ValueError, TypeError, Item.DoesNotExist)):
                Item.objects.get(owner_id=ONE, pk=value)


def test_two_keys(items: World) -> None:
    for _ in range(5):
        for first, second in ((ONE, ONE), (TWO, TWO), (ONE, TWO), (TWO, ONE)):
            rows = Item.objects.filter(owner_id=first).filter(owner_id=second)
            assert {row.owner_id for row in rows} == ({first} if first == second else set())
            children = Item(pk=101, owner_id=first).children.filter(owner_id=second)
            assert {row.pk for row in children} == ({104, 105} if first == second == ONE else set())


def test_a_number_beyond_its_column(items: World) -> None:
    for number in (ONE, TWO, ONE, 2**70, -(2**70), ONE):
        assert Item.objects.filter(owner_id=ONE, stars__gt=number).count() == (
            0 if number == 2**70 else Item.objects.filter(owner_id=ONE).count()
            if number < 0 else sum(row.stars > number for row in Item.objects.filter(owner_id=ONE))
        )  # fmt: skip


def test_a_queryset_is_read_once_and_can_go_on(items: World) -> None:
    for _ in range(4):
        rows = Item.objects.filter(owner_id=ONE)
        with CaptureQueriesContext(connections["photos"]) as sent:
            first, again = list(rows), list(rows)
            assert first == again and first[0] is again[0]
            assert rows[0] is first[0] and len(rows) == len(first) and rows.count() == len(first)
        assert len(sent) == 1
        assert set(rows.filter(stars=1)) == {row for row in first if row.stars == 1}
        assert rows.exclude(pk=101).count() == len(first) - 1


def test_get_prefetches(items: World) -> None:
    for _ in range(4):
        row = Item.objects.prefetch_related("children").get(owner_id=ONE, pk=101)
        with CaptureQueriesContext(connections["photos"]) as sent:
            assert {child.pk for child in row.children.all()} == {104, 105}
        assert not sent


def test_rows_of_another_kind(items: World) -> None:
    class Names(ModelIterable):
        def __iter__(self) -> Any:
            return (row.name for row in super().__iter__())

    for _ in range(4):
        rows = Item.objects.filter(owner_id=ONE)
        rows._iterable_class = Names
        assert rows.get(pk=101) == "item 101"
        assert "item 101" in set(rows)


def test_attributes_of_one_queryset_are_not_copied(items: World) -> None:
    """As djangorestframework replaces a method of a view's queryset."""

    def refuse() -> None:
        raise AssertionError

    for _ in range(4):
        rows: Any = Item.objects.all()
        rows._fetch_all = refuse
        assert {row.pk for row in rows.all().filter(owner_id=TWO)} == {102, 106}
        with pytest.raises(AssertionError):
            list(rows)


def test_hints_do_not_leak_into_another_queryset(items: World) -> None:
    shelf = items.of("Shelf", 11)
    for _ in range(4):
        rows = Item.objects.filter(owner_id=TWO)
        copy_of_rows = rows.all()
        copy_of_rows._add_hints(instance=shelf)
        assert {row.pk for row in rows} == {102, 106}


def test_a_queryset_that_was_built_outside_of_a_block_is_filtered_inside(items: World) -> None:
    for _ in range(4):
        rows, everything = Item.objects.filter(owner_id=TWO), Item.objects.all()
        with bound(owner_id=ONE), pytest.raises(Exception, match="owner_id"):
            list(rows)
        with bound(owner_id=ONE):
            assert {row.owner_id for row in everything} == {ONE}
            assert {row.owner_id for row in Item.objects.filter(stars__gte=0)} == {ONE}


def test_deferred_reads_see_writes_of_the_transaction(items: World) -> None:
    for number in range(4):
        Item.objects.filter(owner_id=ONE, pk=101).update(stars=number)
        assert Item.objects.get(owner_id=ONE, pk=101).stars == number


class Chosen(ShardedQuerySet[Any]):
    """A queryset of a project, which changes what filter() does."""

    def filter(self, *args: Any, **kwargs: Any) -> Any:
        return super().filter(*args, **{**kwargs, "stars": 1})


def test_an_override_in_a_project_is_called(items: World) -> None:
    for _ in range(4):
        assert {row.pk for row in Chosen(Item).filter(owner_id=ONE)} == {101, 105}
        assert Chosen(Item).get(owner_id=ONE, pk=101).pk == 101
        with pytest.raises(Item.DoesNotExist):
            Chosen(Item).get(owner_id=ONE, pk=104)


class Starred(QuerySet[Any]):
    """A mixin of a project that stands behind the library's class."""

    def filter(self, *args: Any, **kwargs: Any) -> Any:
        return super().filter(*args, **{**kwargs, "stars": 1})


class StarredItems(ShardedQuerySet[Any], Starred):
    pass


def test_an_override_behind_the_library_is_called(items: World) -> None:
    for _ in range(4):
        assert {row.pk for row in StarredItems(Item).filter(owner_id=ONE)} == {101, 105}


class Wrapped(ShardedQuerySet[Any]):
    def first(self) -> Any:
        return [super().first()]


def test_first_is_called_once_and_orders_as_django(items: World) -> None:
    for _ in range(4):
        assert [row.pk for row in Wrapped(Item).filter(owner_id=TWO).first()] == [102]
        with without_plans():
            expected = outcome(lambda: Item.objects.filter(owner_id=TWO).order_by().first())
        assert outcome(lambda: Item.objects.filter(owner_id=TWO).order_by().first()) == expected


def test_a_lookup_that_a_project_registers_is_used(items: World) -> None:
    @reads_own_row
    class Never(models.lookups.Exact):  # type: ignore[type-arg]
        def as_sql(self, compiler: Any, connection: Any) -> Any:
            return "1 = 0", []

    for _ in range(4):
        assert Label.objects.filter(owner_id=ONE, stars=21).count() == 1
    field = Label._meta.get_field("stars")
    field.register_lookup(Never)
    try:
        assert Label.objects.filter(owner_id=ONE, stars=21).count() == 0
    finally:
        field._unregister_lookup(Never)
    assert Label.objects.filter(owner_id=ONE, stars=21).count() == 1


def test_receivers_of_signals_are_called(items: World) -> None:
    seen: list[Any] = []

    def remember(instance: Any, **kwargs: Any) -> None:
        seen.append(instance.pk)

    for _ in range(4):
        Item.objects.get(owner_id=ONE, pk=101)
    models.signals.post_init.connect(remember, sender=Item)
    try:
        Item.objects.get(owner_id=ONE, pk=101)
    finally:
        models.signals.post_init.disconnect(remember, sender=Item)
    assert seen == [101]


def test_a_site_can_switch_plans_off(
    items: World, settings: Any, request: pytest.FixtureRequest
) -> None:
    settings.SHARDED_ORM = {**settings.SHARDED_ORM, "READ_PLANS": False}
    for _ in range(3):
        assert Photo.objects.filter(user_id=ONE).count() == 0
    request.getfixturevalue("nothing_is_compiled")
    with pytest.raises(AssertionError):
        Photo.objects.filter(user_id=ONE).count()


def test_managers_of_a_project_use_plans(items: World, request: pytest.FixtureRequest) -> None:
    class StarManager(ShardedManager):  # type: ignore[misc,valid-type]
        def get_queryset(self) -> Any:
            return super().get_queryset().filter(stars=1)

    manager = StarManager()
    manager.model = Item
    for _ in range(3):
        assert {row.pk for row in manager.filter(owner_id=ONE)} == {101, 105}
    request.getfixturevalue("nothing_is_compiled")
    assert {row.pk for row in manager.filter(owner_id=ONE)} == {101, 105}
