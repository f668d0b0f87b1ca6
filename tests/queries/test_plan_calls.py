"""Plans of lists, of fields, and of related managers: the values of the moment that Django uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from django.db import connections
from django.db.models import Case, Manager, Q, QuerySet, Value, When
from django.test.utils import CaptureQueriesContext
from django.utils.functional import SimpleLazyObject

from sharded_orm.backends.group.cursor_methods import opens_as_django
from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.models.querysets import first_recordings
from sharded_orm.models.querysets.plans import without_plans
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from tests.queries.chains import outcome
from tests.queries.conftest import DATABASES, ONE, SHARD, TWO
from tests.queries.twins import World, rolled_back
from tests.relatives.sharded.models import Agent, Item, Note, Shelf
from tests.versions import HAS_FETCH_MODES

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]


def test_lists_of_any_length_share_a_plan(items: World, request: pytest.FixtureRequest) -> None:
    def read(keys: Any) -> Any:
        return outcome(lambda: list(Item.objects.filter(owner_id=ONE, pk__in=keys).order_by("pk")))

    lists: list[Any] = [[101], [101, 104, 105], (101, 101), set(range(99, 300)), [104, 999]]
    with without_plans():
        expected = [read(keys) for keys in lists]
    assert [read(keys) for keys in lists] == expected
    assert read([]) == ([], [])
    request.getfixturevalue("nothing_is_compiled")
    assert [read(keys) for keys in lists] == expected


def test_later_changes_of_a_list_or_an_instance_change_nothing(items: World) -> None:
    for _ in range(4):
        keys, agent = [101, 104], Agent(pk=ONE)
        rows = Item.objects.filter(owner=agent, pk__in=keys)
        copy_of_rows = rows.order_by("pk")
        keys.clear()
        agent.pk = TWO
        assert [row.pk for row in copy_of_rows] == [101, 104]
        assert rows.exclude(pk=101).get().pk == 104


def _with_another_key(item: Any) -> None:
    item.owner_id = TWO


def _copied_to_another_key(item: Any) -> None:
    """As Django's documentation copies a row."""
    item.pk, item.owner_id, item.shelf_id, item._state.adding = 999, TWO, None, True
    item.save()


@pytest.mark.parametrize(
    "change",
    [
        (lambda world: world.models.Item(pk=101, owner_id=ONE), _with_another_key),
        (lambda world: world.of("Item", 101), _copied_to_another_key),
    ],
)
@pytest.mark.parametrize(
    "build",
    [
        lambda rows, item: rows.filter(parent=item),
        lambda rows, item: rows.filter(parent__in=[item]),
        lambda rows, item: rows.filter(owner_id=ONE).exclude(~Q(parent=item)),
        lambda rows, item: rows.filter(Q(parent=item), owner_id=ONE),
        lambda rows, item: rows.filter(parent=SimpleLazyObject(lambda: item)),
        lambda rows, item: rows.filter(
            Case(When(parent=item, then=Value(True)), default=Value(False)), owner=ONE
        ),
    ],
)
def test_an_instance_that_gets_another_key_changes_no_query(
    build: Callable[..., Any],
    change: tuple[Callable[[World], Any], Callable[[Any], None]],
    worlds: tuple[World, World],
) -> None:
    """As in Django, whose query has the primary key that the instance had."""

    def read(world: World) -> set[int]:
        item = change[0](world)
        with rolled_back():
            rows = build(world.models.Item.objects.all(), item)
            change[1](item)
            return {row.pk for row in rows}

    assert read(worlds[0]) == {104, 105}
    with without_plans():
        assert read(worlds[1]) == {104, 105}
    for _ in range(4):
        assert read(worlds[1]) == {104, 105}


def test_rows_of_a_related_manager_know_their_instance(items: World) -> None:
    for _ in range(5):
        agent = Agent.objects.get(pk=ONE)
        rows = [*agent.items.all(), *agent.items.filter(stars=1)]
        if not HAS_FETCH_MODES:
            # Later versions of Django leave such a row without its instance.
            rows += agent.items.only("name")
        rows += [agent.items.get(pk=101), agent.items.first()]
        with CaptureQueriesContext(connections["default"]) as sent:
            assert all(row.owner is agent for row in rows)
        assert not sent


def test_a_related_manager_compiles_nothing(items: World, request: pytest.FixtureRequest) -> None:
    agent, other = Agent.objects.get(pk=ONE), Agent.objects.get(pk=TWO)

    def read() -> list[Any]:
        rows = list(agent.items.all()), list(agent.items.filter(stars=1)), list(other.items.all())
        assert all(row.owner is agent for row in rows[1])
        return [sorted(row.pk for row in part) for part in rows]

    expected = [read() for _ in range(3)]
    assert expected[0] == [
        [101, 104, 105, 107],
        [101, 105],
        sorted(row.pk for row in other.items.all()),
    ]
    request.getfixturevalue("nothing_is_compiled")
    assert [read()] * 3 == expected


def test_a_related_manager_reads_the_key_that_its_instance_has_at_the_read(items: World) -> None:
    """As in Django: the condition of a related manager is made when the rows are read."""
    for _ in range(5):
        agent = Agent(pk=ONE)
        rows, chosen = agent.items.all(), agent.items.filter(stars__gte=0)
        agent.pk = TWO
        assert {row.owner_id for row in rows} == {TWO}
        assert set(chosen.values_list("owner_id", flat=True)) == {ONE}
        with pytest.raises(ValueError, match="primary key"):
            Agent().items.all()


CLOSED: list[Callable[[Any], Any]] = [
    lambda rows: rows.all(),
    lambda rows: rows.filter(stars__gte=0),
    lambda rows: rows.order_by("pk"),
    lambda rows: rows.values("pk"),
    lambda rows: rows[:2],
    lambda rows: rows.using(None),
    lambda rows: rows.prefetch_related("shelf"),
    lambda rows: rows.exists(),
    lambda rows: rows.count(),
    lambda rows: rows.first(),
    lambda rows: rows.get(pk=101),
    lambda rows: list(rows.iterator()),
    lambda rows: rows.explain_routing(),
    lambda rows: rows.ordered,
]


@pytest.mark.parametrize("call", CLOSED)
def test_the_first_call_after_a_related_manager_fixes_its_key(
    call: Callable[[Any], Any], items: World
) -> None:
    """As in Django: the call makes the condition of the manager in the queryset itself, too."""

    def read() -> list[Any]:
        agent = Agent(pk=ONE)
        rows = agent.items.all()
        call(rows)
        agent.pk = TWO
        return list(rows.values_list("owner_id", flat=True))

    with without_plans():
        assert set(read()) == {ONE}
    for _ in range(4):
        assert set(read()) == {ONE}


def test_deferred_fields_are_read_later(items: World) -> None:
    for _ in range(4):
        row = Item.objects.only("name").get(owner_id=ONE, pk=101)
        assert row.get_deferred_fields() >= {"stars", "owner_id"}
        assert (row.name, row.stars) == ("item 101", 1)


def test_an_instance_on_another_shard_is_left_to_django(items: World) -> None:
    """Two rows of different shards may have one id, so the shard of the instance counts."""
    here, there = items.of("Item", 101), items.of("Item", 102)
    for _ in range(5):
        assert {row.pk for row in Item.objects.filter(owner_id=ONE, parent=here)} == {104, 105}
        assert list(Item.objects.filter(owner_id=ONE, parent=there)) == []
        assert {row.pk for row in here.children.all()} == {104, 105}
        assert {row.pk for row in here.children.filter(stars=1)} == {105}
        assert here.children.exclude(pk=104).get().parent is here


def test_an_instance_with_the_id_of_a_row_elsewhere(items: World) -> None:
    twin = items.of("Item", 102)
    twin.pk = 101  # As if the other shard had a row with this id.
    read = [lambda: Item.objects.filter(owner_id=ONE, parent=twin).count(), twin.children.count]
    with without_plans():
        expected = [outcome(call) for call in read]
    for _ in range(4):
        Item.objects.filter(owner_id=ONE, parent=items.of("Item", 101)).count()
        assert [outcome(call) for call in read] == expected


def test_a_lazy_object_stands_for_an_instance(items: World) -> None:
    """As ``request.user`` does."""
    for _ in range(4):
        owner: Any = SimpleLazyObject(lambda: Agent.objects.get(pk=ONE))
        assert Item.objects.filter(owner=owner).count() == 4
        assert Note.objects.exclude(owner=owner).filter(owner_id=TWO).count() == 2
        assert Shelf.objects.get(owner=owner, name="shelf 11").pk == 11


def test_values_of_a_queryset_with_other_rows(items: World) -> None:
    for _ in range(4):
        rows = Item.objects.filter(owner_id=ONE).values_list("pk")
        rows._iterable_class = Item.objects.values()._iterable_class
        assert {"pk": 101} in list(rows)
        with pytest.raises(TypeError, match="after"):
            Item.objects.filter(owner_id=ONE).values("pk").only("pk")
        with pytest.raises(TypeError, match="after"):
            Item.objects.filter(owner_id=ONE).values("pk").contains(items.of("Item", 101))


def test_a_name_that_is_selected_twice(items: World) -> None:
    for _ in range(4):
        rows = Item.objects.filter(owner_id=ONE, pk=101).values_list("pk", "pk", named=True)
        assert [row._asdict() for row in rows] == [{"pk": 101, "pk1": 101}]


class Reduced(QuerySet[Any]):
    """A mixin of a project that stands behind the library's class."""

    def exclude(self, *args: Any, **kwargs: Any) -> Any:
        return super().exclude(*args, **kwargs).filter(stars=1)

    def values_list(self, *fields: Any, **options: Any) -> Any:
        return super().values_list("pk", flat=True)


class ReducedItems(ShardedQuerySet[Any], Reduced):
    pass


def test_other_overrides_behind_the_library_are_called(items: World) -> None:
    for _ in range(4):
        rows = ReducedItems(Item).filter(owner_id=ONE)
        assert {row.pk for row in rows.exclude(pk=101)} == {105}
        assert set(rows.values_list("name")) == {101, 104, 105, 107}


class Backwards(ShardedQuerySet[Any]):
    """A queryset with orders and slices of its own."""

    def order_by(self, *names: Any) -> Any:
        return super().order_by(*(f"-{name}" for name in names))


class SecondRow(ShardedQuerySet[Any]):
    def __getitem__(self, k: Any) -> Any:
        return super().__getitem__(slice(1, 2) if k == slice(None, 1) else k)


def test_first_calls_the_methods_of_a_project(items: World) -> None:
    for _ in range(4):
        known = [row.pk for row in Item.objects.filter(owner_id=ONE).order_by("pk")]
        assert Item.objects.filter(owner_id=ONE).first() == Item(pk=known[0], owner_id=ONE)
        assert Backwards(Item).filter(owner_id=ONE).first() == Item(pk=known[-1], owner_id=ONE)
        assert SecondRow(Item).filter(owner_id=ONE).first() == Item(pk=known[1], owner_id=ONE)
        assert Item.objects.filter(owner_id=ONE, pk=0).first() is None
        with pytest.raises(TypeError, match="reorder"):
            Item.objects.filter(owner_id=ONE)[:1].first()


class WithoutStars(ShardedQuerySet[Any]):
    """Django's get() removes the order of the rows by this method."""

    def order_by(self, *names: Any) -> Any:
        return super().order_by(*names).filter(stars__gt=5)


class Counting(ShardedQuerySet[Any]):
    lengths: ClassVar[list[int]] = []

    def __len__(self) -> int:
        self.lengths.append(super().__len__())
        return self.lengths[-1]


def test_get_calls_the_methods_of_a_project(items: World) -> None:
    for _ in range(4):
        assert Item.objects.get(owner_id=ONE, pk=101).stars == 1
        with pytest.raises(Item.DoesNotExist):
            WithoutStars(Item).get(owner_id=ONE, pk=101)
        with pytest.raises(Item.DoesNotExist):
            WithoutStars(Item).filter(owner_id=ONE).get(Q(pk=101) | Q(pk=999))
        assert Counting(Item).get(owner_id=ONE, pk=101).pk == 101
        assert Counting.lengths == [1]
        Counting.lengths.clear()


def test_first_prefetches(items: World) -> None:
    for _ in range(4):
        row = Item.objects.filter(owner_id=ONE).prefetch_related("notes").first()
        assert row is not None
        with CaptureQueriesContext(connections["default"]) as sent:
            list(row.notes.all())
        assert not sent


def test_rows_of_a_plan_are_prefetched(items: World) -> None:
    def children() -> tuple[dict[int, set[int]], int]:
        rows = list(Item.objects.filter(owner_id=ONE).prefetch_related("shelf", "children"))
        with CaptureQueriesContext(connections["photos"]) as sent:
            return {row.pk: {child.pk for child in row.children.all()} for row in rows}, len(sent)

    for _ in range(4):
        with CaptureQueriesContext(connections["photos"]) as sent:
            assert children() == ({101: {104, 105}, 104: set(), 105: set(), 107: set()}, 0)
        assert len(sent) == 3


def test_related_instances_are_read_with_their_rows(items: World) -> None:
    for _ in range(4):
        rows = list(Item.objects.filter(owner_id=ONE).select_related("shelf", "parent"))
        with CaptureQueriesContext(connections["photos"]) as sent:
            shelves = {row.pk: row.shelf and row.shelf.name for row in rows}
            parents = {row.pk: row.parent and row.parent.pk for row in rows}
        assert shelves == {101: "shelf 11", 104: "shelf 11", 105: None, 107: None}
        assert parents == {101: None, 104: 101, 105: 101, 107: None}
        assert not sent
        assert all(row.shelf._state.db == row._state.db for row in rows if row.shelf)


def test_managers_of_projects(items: World) -> None:
    class NamedManager(Manager[Any]):
        def get_queryset(self) -> Any:
            return ShardedQuerySet(self.model).only("name").exclude(name="item 107")

    manager = NamedManager()
    manager.model = Item
    for _ in range(4):
        rows = list(manager.filter(owner_id=ONE))
        assert {row.name for row in rows} == {"item 101", "item 104", "item 105"}
        assert "stars" in rows[0].get_deferred_fields()
        assert Note.objects.filter(owner_id=ONE, object_id=None).count() == 1
        assert Shelf.objects.get(owner=Agent(pk=ONE), name="shelf 11").pk == 11


def test_the_tests_with_a_database_open_cursors_in_the_short_way() -> None:
    """As programs do. See tests/conftest.py."""
    shard = connections[SHARD[ONE]]
    with shard.cursor():
        assert opens_as_django(shard, super(ShardConnectionMixin, type(shard)))


def test_a_route_tells_whether_rows_are_read_by_a_plan(items: World, settings: Any) -> None:
    def plan(**conditions: Any) -> str:
        rows = Item.objects.filter(owner_id=ONE, **conditions)
        phrase = rows.explain_routing().plan
        assert rows.explain_routing() == rows.all().explain_routing()
        list(rows)
        return phrase

    first_recordings.forget()
    assert plan(stars=1) == "no plan yet, the second read of this shape makes it"
    plan(stars=1)
    phrases = [plan(stars=1) for _ in range(3)]
    first = int(phrases[0].split()[-2])
    assert phrases == [
        f"rows are read by a plan, which was used {first + number} times" for number in range(3)
    ]
    assert {plan(name__contains="x") for _ in range(3)} == {"Django compiles this query"}
    with without_plans():
        assert plan(stars=1) == "Django compiles this query"
    settings.SHARDED_ORM = {**settings.SHARDED_ORM, "READ_PLANS": False}
    assert plan(stars=1) == "plans are switched off by READ_PLANS"


def test_the_log_names_conditions_without_a_plan(
    items: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "sharded_orm.plans"):
        for _ in range(3):
            list(Item.objects.filter(owner_id=ONE, name__iendswith="101"))
    expected = "Item by ['name__iendswith', 'owner_id']: left to Django, no plan compares ['name__iendswith'] so"
    assert caplog.messages.count(expected) == 1
