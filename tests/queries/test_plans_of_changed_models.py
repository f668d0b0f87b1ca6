"""Plans of models that a program changes in place: the statements are those that Django makes then."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.db import models
from django.db.models import Q
from django.db.models.query_utils import DeferredAttribute
from django.db.models.sql.compiler import SQLInsertCompiler

from sharded_orm import reads_own_row
from sharded_orm.models.plans import plan, saves, updates
from sharded_orm.models.querysets import first_recordings
from sharded_orm.models.querysets.plans import without_plans
from tests.queries import chains
from tests.queries.conftest import DATABASES, ONE
from tests.queries.test_plans_of_columns import samples as samples  # a fixture
from tests.queries.twins import World, rolled_back
from tests.relatives.sharded.models import Item, Label, Shelf
from tests.samples.models import Sample

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]


@reads_own_row
class ExactOrNone(models.lookups.Exact):  # type: ignore[type-arg]
    """A lookup of a project that compares with NULL by itself."""

    can_use_none_as_rhs = True

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        return "1 = 0", []


@reads_own_row
class NeverNull(models.lookups.IsNull):
    def as_sql(self, compiler: Any, connection: Any) -> Any:
        return "1 = 0", []


class Capitals(DeferredAttribute):
    def __set__(self, instance: Any, value: str) -> None:
        instance.__dict__[self.field.attname] = value.upper()


class CapitalField(models.CharField):  # type: ignore[type-arg]
    """A field of a project that changes its values when they are set."""

    descriptor_class = Capitals


def _field(model: Any, name: str, attribute: str, value: Any) -> Callable[[Any], None]:
    return lambda patch: patch.setattr(model._meta.get_field(name), attribute, value)


def _meta(model: Any, option: str, value: Any) -> Callable[[Any], None]:
    return lambda patch: patch.setattr(model._meta, option, value)


def _lookup(model: Any, name: str, lookup: Any) -> Callable[[Any], None]:
    # As register_lookup() of a field that is an instance.
    field = model._meta.get_field(name)
    return lambda patch: patch.setattr(
        field, "instance_lookups", {lookup.lookup_name: lookup}, raising=False
    )


CHANGES: dict[str, Callable[[Any], None]] = {
    "the table": _meta(Item, "db_table", "elsewhere"),
    "a joined table": _meta(Shelf, "db_table", "elsewhere"),
    "the order": _meta(Item, "ordering", ["-stars", "id"]),
    "a column": _field(Item, "name", "column", "id"),
    "a column of a joined table": _field(Shelf, "name", "column", "id"),
    "the key of a joined table": _field(Shelf, "id", "column", "stars"),
    "NULL in a column": _field(Item, "stars", "null", True),
    "no NULL in a column": _field(Item, "posted_at", "null", False),
    "no NULL in a foreign key": _field(Item, "shelf", "null", False),
    "a lookup": _lookup(Item, "stars", ExactOrNone),
    "the lookup of None": _lookup(Item, "posted_at", ExactOrNone),
    "the lookup of NULL": _lookup(Item, "posted_at", NeverNull),
}
READS: dict[str, Callable[[], Any]] = {
    "rows": lambda: list(Item.objects.filter(owner_id=ONE)),
    "values": lambda: list(Item.objects.filter(owner_id=ONE).values_list("name")),
    "by a column": lambda: Item.objects.filter(owner_id=ONE, stars=1).count(),
    "not by a column": lambda: list(Item.objects.filter(owner_id=ONE).exclude(stars=1)),
    "not by a time": lambda: Item.objects.filter(owner_id=ONE).exclude(
        posted_at__lt=Item.objects.get(owner_id=ONE, pk=101).posted_at
    ).count(),
    "by NULL": lambda: Item.objects.filter(owner_id=ONE, posted_at=None).exists(),
    "joined": lambda: [
        (row.name, row.shelf) for row in Item.objects.filter(owner_id=ONE).select_related("shelf")
    ],
    "by a tree": lambda: list(Item.objects.filter(Q(stars=1) | ~Q(stars__gt=5, posted_at=None), owner_id=ONE)),
    "update": lambda: Item.objects.filter(owner_id=ONE, stars=1).update(name="x"),
    "save of a read row": lambda: Item.objects.get(owner_id=ONE, pk=101).save(),
    "save": lambda: Item(id=101, owner_id=ONE, seller_id=ONE, name="y").save(force_update=True),
}  # fmt: skip


def test_decimal_places_that_change(samples: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's converter rounds to them."""
    Sample.objects.filter(owner=ONE).update(price=Decimal("1.25"))

    def read() -> list[str]:
        return [str(row.price) for row in Sample.objects.filter(owner=ONE)]

    for _ in range(4):
        assert set(read()) == {"1.25"}
    monkeypatch.setattr(Sample._meta.get_field("price"), "decimal_places", 1)
    with without_plans():
        expected = read()
    assert read() == expected


def outcome(call: Callable[[], Any]) -> Any:
    with rolled_back():
        return chains.outcome(call)


@pytest.mark.parametrize("name", READS)
def test_a_change_in_place_voids_a_plan(name: str, items: World) -> None:
    read = READS[name]
    with without_plans():
        before = outcome(read)
    for change, make in CHANGES.items():
        for _ in range(4):
            assert outcome(read) == before, change
        with pytest.MonkeyPatch.context() as patch:
            make(patch)
            with without_plans():
                expected = outcome(read)
            # The second time, the plan is made anew.
            for _ in range(4):
                assert outcome(read) == expected, change


def test_a_plan_is_made_anew_after_a_change(
    items: World, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> Any:
        return list(Item.objects.filter(owner_id=ONE, stars=1))

    for _ in range(3):
        read()
    _field(Item, "stars", "column", "id")(monkeypatch)
    assert read() == []
    request.getfixturevalue("nothing_is_compiled")
    assert read() == []


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_one_that_django_notices(change: str, items: World) -> None:
    """Otherwise the test above would not show anything of it."""
    with without_plans():
        before = [outcome(read) for read in READS.values()]
        with pytest.MonkeyPatch.context() as patch:
            CHANGES[change](patch)
            assert [outcome(read) for read in READS.values()] != before


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rows", "a column"),
        ("not by a column", "NULL in a column"),
        ("joined", "a joined table"),
        ("update", "a column"),
        ("save", "a column"),
    ],
)
def test_a_change_while_a_plan_is_made(name: str, change: str, items: World) -> None:
    """Another thread changes a model after the SQL of a plan was compiled."""
    read, compiled = READS[name], plan.fixed_parameters
    first_recordings.forget()
    saves.forget()
    with pytest.MonkeyPatch.context() as patch:

        def changed(*args: Any) -> Any:
            CHANGES[change](patch)
            return compiled(*args)

        for module in (plan, updates):
            patch.setattr(module, "fixed_parameters", changed)
        before = outcome(read)
        for _ in range(3):
            outcome(read)
        with without_plans():
            expected = outcome(read)
        assert expected != before
        assert [outcome(read) for _ in range(4)] == [expected] * 4


def test_a_new_row_in_another_column(items: World) -> None:
    def insert() -> Any:
        return Label(id=900, name="x", owner_id=ONE).save(force_insert=True)

    for _ in range(4):
        outcome(insert)
    with pytest.MonkeyPatch.context() as patch:
        _field(Label, "name", "column", "title")(patch)
        with without_plans():
            expected = outcome(insert)
        assert [outcome(insert) for _ in range(3)] == [expected] * 3
        # Its plan was made anew.
        patch.setattr(SQLInsertCompiler, "as_sql", None)
        assert outcome(insert) == expected


def test_a_field_that_is_added_later(items: World) -> None:
    """As by ``contribute_to_class()`` of a package that is imported late."""

    def read() -> Any:
        (row,) = Item.objects.filter(owner_id=ONE, pk=101)
        return [(name, str(value)) for name, value in vars(row).items() if name != "_state"]

    for _ in range(4):
        outcome(read)
    before = outcome(read)
    field = CapitalField(db_column="name", default="")
    field.contribute_to_class(Item, "further")
    try:
        with without_plans():
            expected = outcome(read)
        assert outcome(read) == expected != before
        fresh = outcome(lambda: list(Item.objects.filter(pk=101, owner_id=ONE).order_by("-name")))
        for _ in range(3):
            assert fresh == outcome(
                lambda: list(Item.objects.filter(pk=101, owner_id=ONE).order_by("-name"))
            )
    finally:
        Item._meta.local_fields.remove(field)
        Item._meta._expire_cache()  # type: ignore[attr-defined]
        del Item.further  # type: ignore[attr-defined]
    assert outcome(read) == before
