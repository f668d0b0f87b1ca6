"""What ``django.contrib.postgres`` has, on one shard: as in Django."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from django.contrib.postgres.aggregates import ArrayAgg, JSONBAgg, StringAgg
from django.contrib.postgres.expressions import ArraySubquery
from django.contrib.postgres.search import (
    SearchHeadline,
    SearchQuery,
    SearchRank,
    SearchVector,
)
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.backends.postgresql.psycopg_any import NumericRange
from django.db.models import F, Func, OuterRef, Q, StdDev, Value, Variance
from django.db.models.fields.json import KT
from django.db.models.functions import Collate

from sharded_orm import cache_scope
from tests.queries.conftest import DATABASES, LATER, NEAR, ONE, TWO, Clock

if TYPE_CHECKING:
    from tests.specimens.models import Specimen

pytestmark = [
    pytest.mark.postgresql_settings,
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.usefixtures("placed"),
]


def model() -> type[Specimen]:
    from tests.specimens.models import Specimen

    return Specimen


@pytest.fixture
def rows(placed: None) -> Any:
    """A query of the rows of one key. Other keys, on the same shard and on another, have rows as well."""
    for owner in (ONE, NEAR, TWO):
        for n in range(4):
            model().objects.create(
                id=owner * 100 + n,
                owner=owner,
                text=["red fox", "Red dog", "green fox", "über"][n],
                tags=[f"t{n}", "all"],
                numbers=[n, n + 1],
                span=NumericRange(n, n + 2),
                data={"n": n, "deep": {"list": [n]}},
                ratio=n,
            )
    return model().objects.filter(owner=ONE).order_by("id")


def numbers(queryset: Any) -> list[int]:
    return [row.pk % 100 for row in queryset]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (Q(tags__contains=["t1"]), [1]),
        (Q(tags__contained_by=["t2", "all", "x"]), [2]),
        (Q(tags__overlap=["t0", "t3"]), [0, 3]),
        (Q(tags__0="t3"), [3]),
        (Q(tags__len=2, numbers__0_1=[2]), [2]),
        (Q(span__contains=2), [1, 2]),
        (Q(span__overlap=NumericRange(3, 9)), [2, 3]),
        (Q(span__fully_lt=NumericRange(3, 9)), [0, 1]),
        (Q(span__startswith=3), [3]),
        (Q(data__n__gte=2), [2, 3]),
        (Q(data__contains={"n": 1}), [1]),
        (Q(data__deep__list__0=3), [3]),
        (Q(data__has_keys=["n", "deep"]) & ~Q(data__has_key="x"), [0, 1, 2, 3]),
        (Q(text__search="fox"), [0, 2]),
        (Q(text__iregex="^red"), [0, 1]),
    ],
)
def test_conditions(rows: Any, condition: Q, expected: list[int]) -> None:
    assert numbers(rows.filter(condition)) == expected
    assert rows.filter(condition).count() == len(expected)


def test_expressions(rows: Any) -> None:
    vector = SearchVector("text", config="english")
    query = SearchQuery("fox", config="english")
    found = rows.annotate(rank=SearchRank(vector, query), head=SearchHeadline("text", query))
    assert found.filter(rank__gt=0).values_list("head", flat=True)[0] == "red <b>fox</b>"
    assert [kt for (kt,) in rows.annotate(kt=KT("data__n")).values_list("kt")] == list("0123")
    order = rows.order_by(Collate("text", "en-x-icu"))
    assert [row.text for row in order] == ["green fox", "Red dog", "red fox", "über"]
    others = model().objects.filter(owner=OuterRef("owner")).order_by("-id").values("id")
    (ids,) = rows.annotate(ids=ArraySubquery(others)).values_list("ids", flat=True)[:1]
    assert ids == [ONE * 100 + n for n in (3, 2, 1, 0)]


def test_aggregates(rows: Any) -> None:
    answer = rows.aggregate(
        array=ArrayAgg("numbers__0"),
        text=StringAgg("tags__0", "-"),
        json=JSONBAgg("data__n"),
        deviation=StdDev("ratio"),
        variance=Variance("ratio", sample=True),
    )
    assert sorted(answer["array"]) == answer["json"] == [0, 1, 2, 3]
    assert answer["text"] == "t0-t1-t2-t3"
    assert answer["deviation"] == pytest.approx(1.25**0.5)
    assert answer["variance"] == pytest.approx(5 / 3)


def test_updates(rows: Any) -> None:
    appended = Func(F("tags"), Value("new"), function="array_append")
    assert rows.filter(numbers__overlap=[3]).update(tags=appended, data={"n": None}) == 2
    assert numbers(rows.filter(tags__contains=["new"])) == [2, 3]
    assert not model().objects.filter(owner=NEAR, tags__contains=["new"]).exists()
    row = rows.get(id=ONE * 100)
    row.span, row.tags = NumericRange(None, 5), []
    row.save()
    row.refresh_from_db()
    assert (row.span, row.tags) == (NumericRange(None, 5), [])


def test_an_exclusion_constraint_holds_on_each_shard(rows: Any) -> None:
    def booking(pk: int, owner: int, first: int) -> Specimen:
        return model()(id=pk, owner=owner, text="booked", span=NumericRange(first, first + 10))

    booking(1, ONE, 0).save()
    with pytest.raises(ValidationError, match="booked_once"):
        booking(2, ONE, 5).validate_constraints()
    with pytest.raises(IntegrityError, match="booked_once"), transaction.atomic(using="photos"):
        booking(2, ONE, 5).save()
    booking(2, ONE, 10).save()
    other = booking(3, TWO, 5)
    other.validate_constraints()
    other.save()


@pytest.mark.django_db(transaction=True, databases=DATABASES)
@pytest.mark.parametrize(
    "read",
    [
        lambda rows: rows.get(owner=ONE),
        lambda rows: next(iter(rows.filter(owner=ONE, tags__isnull=False))),
        lambda rows: rows.in_bulk([ONE])[ONE],
    ],
    ids=["get", "list", "in_bulk"],
)
def test_level_1_does_not_share_an_array_that_the_program_changes(clock: Clock, read: Any) -> None:
    """The driver returns a list, which must not become a value of two instances."""
    from tests.specimens.models import CachedSpecimen

    CachedSpecimen.objects.create(owner=ONE, tags=["a"])
    read(CachedSpecimen.objects)
    clock.ahead += LATER
    with cache_scope():
        for _ in range(3):
            row = read(CachedSpecimen.objects)
            assert row.tags == ["a"]
            row.tags.append("changed")
