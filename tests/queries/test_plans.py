"""Reads by plans: the same SQL, results and errors as Django's, without compiling again."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.db import connections, models
from django.db.models import Q, QuerySet
from django.db.models.query import ModelIterable
from django.test.utils import CaptureQueriesContext

from sharded_orm import bound, reads_own_row
from sharded_orm.models import ShardedManager
from sharded_orm.models.querysets.plans import without_plans
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from tests.photos.models import Photo
from tests.queries.chains import outcome
from tests.queries.conftest import DATABASES, ONE, START, TWO
from tests.queries.twins import World
from tests.relatives.sharded.models import Agent, Item, Label

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]

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


@pytest.mark.parametrize("condition", [{"stars": "many"}, {"stars__in": ["many"]}])
def test_a_lookup_that_is_registered_later_may_accept_other_values(
    condition: dict[str, Any], items: World
) -> None:
    @reads_own_row
    class Exactly(models.lookups.Exact):  # type: ignore[type-arg]
        prepare_rhs = False

        def as_sql(self, compiler: Any, connection: Any) -> Any:
            return "1 = 1", []

    @reads_own_row
    class Among(Exactly):
        lookup_name = "in"

    (name,) = condition
    known = {name: ["21"] if name.endswith("in") else "21"}
    read: list[Callable[[], Any]] = [
        lambda: Label.objects.filter(owner_id=ONE, **condition).count(),
        lambda: Label.objects.filter(Q(**condition), owner_id=ONE).count(),
    ]
    for _ in range(4):
        assert Label.objects.filter(owner_id=ONE, **known).count() == 1
        assert Label.objects.filter(Q(**known), owner_id=ONE).count() == 1
        for call in read:
            with pytest.raises(ValueError, match="expected a number but got 'many'"):
                call()
    field = Label._meta.get_field("stars")
    for lookup in (Exactly, Among):
        field.register_lookup(lookup)
    try:
        assert [call() for call in read] == [3, 3]
    finally:
        for lookup in (Exactly, Among):
            field._unregister_lookup(lookup)


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
