"""Sums and averages that the servers compute with digits that they do not send."""

from __future__ import annotations

import operator
from datetime import timedelta
from decimal import Decimal
from functools import reduce
from itertools import product
from typing import Any

import pytest
from django.db import IntegrityError, connections
from django.db.models import (
    Avg,
    BigIntegerField,
    Case,
    CharField,
    Count,
    DecimalField,
    DurationField,
    ExpressionWrapper,
    F,
    FloatField,
    Func,
    Max,
    Min,
    OuterRef,
    Q,
    Subquery,
    Sum,
    Value,
    When,
)
from django.db.models.functions import (
    Abs,
    Cast,
    Ceil,
    Coalesce,
    Floor,
    Greatest,
    Least,
    Length,
    Now,
    NullIf,
    Ord,
    Random,
    Round,
    Sqrt,
)
from django.db.models.lookups import Exact
from django.test import TestCase

from sharded_orm import scatter
from sharded_orm.exceptions import ScatterNotSupported
from tests.integration.scatter.conftest import WHOLE, fetch, one_database, store, targets
from tests.queries.conftest import DATABASES
from tests.samples.models import Sample

pytestmark = [
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]
statements = TestCase().assertNumQueries

PRICES = ["0.01", "1", "2", "0.02", "-0.05", "7", "1", "99.99", "0.03", "1"]


@pytest.fixture
def rows() -> None:
    store(
        [
            Sample(
                id=n,
                owner=n % 5,
                number=n,
                price=Decimal(price),
                ratio=float(price) / 3,
                flag=n % 2 == 0,
                name=str(n) * 2,
                text=price,
                took=timedelta(microseconds=n),
            )
            for n, price in enumerate(PRICES)
        ]
    )


def power(exponent: int) -> Any:
    """Prices multiplied by each other: they have two decimal places for each factor."""
    return reduce(operator.mul, [F("price")] * exponent)


def with_places(count: int) -> Any:
    return Cast(F("price") / 7, DecimalField(max_digits=40, decimal_places=count))


def results(aggregate: Any) -> list[Any]:
    """What one database and the shards answer to the aggregate, of all rows and of groups."""
    queryset = one_database(Sample)
    groups = queryset.values("flag").annotate(x=aggregate).order_by("flag")
    answers: list[Any] = []
    for one, many in (
        (
            lambda: queryset.aggregate(x=aggregate),
            lambda: scatter.aggregate(queryset, targets(queryset), {"x": aggregate}),
        ),
        (lambda: list(groups), lambda: fetch(groups)),
    ):
        answers.append((repr(one()), repr(many())))
    return answers


def refuses(aggregate: Any) -> None:
    """Nothing is sent."""
    queryset = one_database(Sample)
    with statements(0, using="photos"), pytest.raises(ScatterNotSupported):
        scatter.aggregate(queryset, targets(queryset), {"n": Count("id"), "x": aggregate})
    groups = queryset.values("flag").annotate(x=aggregate)
    with statements(0, using="photos"), pytest.raises(ScatterNotSupported):
        fetch(groups)


@pytest.mark.mysql_settings
def test_averages_have_the_digits_of_the_server(rows: None) -> None:
    for divisor in (10, 7, 3):
        for alias in [WHOLE, *(target.shard.alias for target in targets(one_database(Sample)))]:
            Sample.objects.using(alias).filter(pk__gte=divisor).update(price=None)
        expressions = [*map(power, range(1, 8)), *map(with_places, range(13))]
        for expression, kind in product(expressions, (Avg, Sum)):
            for one, many in results(kind(expression)):
                assert one == many


@pytest.mark.mysql_settings
def test_what_is_added_with_the_digits_of_its_type_is_exact(rows: None) -> None:
    for aggregate in (
        Avg(Abs(F("price") * F("price"))),
        Avg(Coalesce("price", Value(Decimal("1.5")), output_field=DecimalField())),
        Sum(Round(F("price") / 3, precision=2)),
        Avg(Round("price")),
        Sum(Ceil("price")),
        Sum(Cast(F("price") / 3, DecimalField(max_digits=20, decimal_places=4))),
        Avg(Cast("text", DecimalField(max_digits=20, decimal_places=4))),
        Sum(F("number") % 3),
        Avg(F("number") - F("owner")),
        Max(Cast(Ord("name"), BigIntegerField())),
        *map(Sum, rounded_decimals()),
        *map(Sum, exact_quotients()),
        Avg(F("number") / 100),
        Sum(Case(When(price__gt=F("number") / 2, then=1), default=0)),
        Avg(Case(When(Q(ratio__gt=F("ratio") / 3), then="price"), default=Value(Decimal(0)))),
        Sum(Case(When(Exact(Round("ratio"), 1), then="number"), default=0)),
    ):
        for one, many in results(aggregate):
            assert one == many


def rounded_decimals() -> list[Any]:
    return [
        Round(value, precision=1)
        for value in (
            ExpressionWrapper(F("price") * F("number"), output_field=DecimalField()),
            Coalesce("price", Value(Decimal(0))),
            Case(When(ratio__gt=1.5, then="price"), default=Value(Decimal("0.25"))),
            Abs("price"),
            Greatest("price", Value(Decimal("1.55"))),
            Least("price", Value(Decimal("1.55"))),
            NullIf("price", Value(Decimal(1))),
            Length("name"),
        )
    ]


def exact_quotients() -> list[Any]:
    return [
        F("number") / 2,
        F("price") / 4,
        F("price") / Decimal(100),
        -F("price") * F("number") / 100 / -100,
        Coalesce(F("price") / 10_000, Value(Decimal(0)), output_field=DecimalField()),
        power(11) / 2,
    ]


def thirds(value: Any) -> list[Any]:
    return [
        value / 3,
        Coalesce(value / 3, Value(Decimal(0)), output_field=DecimalField()),
        Case(When(flag=True, then=value / 3), default=value, output_field=DecimalField()),
        value / 3 + F("number"),
        Func(value, Value(3), arg_joiner=" / ", template="(%(expressions)s)", output_field=DecimalField()),
    ]  # fmt: skip


@pytest.mark.mysql_settings
def test_quotients_are_refused(rows: None) -> None:
    """Each has more digits while it is added than when it is sent."""
    quotients = [F("number") / F("owner"), F("number") / 7, F("price") / Decimal("0.3")]
    quotients += [F("price") / 20_000, power(12) / 2]
    floats = [Cast(quotient, FloatField()) for quotient in quotients]
    floats += [Cast("price", FloatField()) / 3, Cast("number", FloatField()) / F("owner")]
    third = Sample.objects.filter(pk=OuterRef("pk")).annotate(x=F("price") / 3).values("x")
    for expression in [*thirds(F("price")), *quotients, *floats, Subquery(third)]:
        for kind in (Sum, Avg):
            refuses(kind(expression))


@pytest.mark.mysql_settings
def test_rounded_floats_are_refused(rows: None) -> None:
    for expression in (
        Round("ratio"),
        Round("ratio", precision=2),
        Round(Coalesce("ratio", Value(0.0))),
        Round(Case(When(flag=True, then="ratio"), default=Value(0.0)), precision=1),
        Ceil("ratio"),
        Floor("ratio"),
        Cast(Round("ratio", precision=1), FloatField()),
    ):
        for kind in (Sum, Avg):
            refuses(kind(expression))


@pytest.mark.mysql_settings
def test_quotients_of_floats_are_floats(rows: None) -> None:
    queryset = one_database(Sample)
    for expression in (
        F("ratio") / 3,
        F("number") / Value(2.0),
        Cast("ratio", FloatField()) / 3,
        Cast("text", FloatField()) / 3,
        Sqrt("number") / 3,
        Coalesce("ratio", Value(0.0)) / F("number"),
    ):
        for kind in (Sum, Avg):
            aggregate = {"x": kind(expression, output_field=FloatField())}
            (value,) = scatter.aggregate(queryset, targets(queryset), aggregate).values()
            assert value == pytest.approx(queryset.aggregate(**aggregate)["x"], rel=1e-14)


@pytest.mark.mysql_settings
def test_averages_with_a_default_that_is_a_float_are_refused(rows: None) -> None:
    """The server sends all digits of an average that may be a float."""
    for refused in (
        Avg("number", default=0),
        Avg(F("number") % 3, default=0),
        Avg(Cast("price", FloatField()), default=0),
        Coalesce(Avg("number"), 0.0),
    ):
        refuses(refused)
    queryset = one_database(Sample)
    with statements(0, using="photos"), pytest.raises(ScatterNotSupported, match="or 0"):
        scatter.aggregate(
            queryset, targets(queryset), {"x": Avg("number", default=0, distinct=True)}
        )
    for accepted in (
        Avg("price", default=0),
        Avg("took", default=timedelta(0)),
        Coalesce(Avg("number"), Value(0), output_field=FloatField()),
        Coalesce(Avg("number"), Value(None), output_field=FloatField()),
        Sum("number", default=0),
        Coalesce(Sum("price"), Value(0.0), output_field=FloatField()),
    ):
        for one, many in results(accepted):
            assert one == many
    for floats in ("ratio", Sqrt("number"), Abs("ratio"), Cast("ratio", FloatField())):
        aggregate = {"x": Avg(floats, default=0)}
        (value,) = scatter.aggregate(queryset, targets(queryset), aggregate).values()
        assert value == pytest.approx(queryset.aggregate(**aggregate)["x"], rel=1e-14)


@pytest.mark.mysql_settings
def test_sums_of_texts_with_a_default_are_refused(rows: None) -> None:
    refuses(Sum("name", default="0"))
    refuses(Sum("data__a", default=0))


@pytest.mark.mysql_settings
def test_durations_with_parts_of_microseconds_are_refused(rows: None) -> None:
    """The server casts their sum to whole microseconds."""
    microseconds = Cast("took", BigIntegerField())
    for expression in (microseconds * Decimal("1.3"), microseconds / 2, microseconds * 1.3):
        for kind in (Sum, Avg):
            refuses(kind(ExpressionWrapper(expression, output_field=DurationField())))
    whole = ExpressionWrapper(
        Cast(microseconds * Decimal("1.3"), BigIntegerField()), output_field=DurationField()
    )
    for accepted in (Sum(whole), Avg(whole), Sum(F("took") + timedelta(seconds=1))):
        for one, many in results(accepted):
            assert one == many


@pytest.mark.mysql_settings
def test_averages_of_values_that_are_no_numbers_are_refused(rows: None) -> None:
    """The type of the column, which the library does not know, decides about the digits."""
    for expression in ("name", "day", "data", Cast("price", CharField())):
        refuses(Avg(expression))


@pytest.mark.mysql_settings
def test_averages_whose_digits_are_unknown_are_refused(rows: None) -> None:
    halves = Cast("number", FloatField()) / 2
    for expression in (Abs(power(3)), F("price") / 100, halves, power(14)):
        refuses(Avg(expression))
    queryset = one_database(Sample)
    unknown = Func(power(3), template="(%(expressions)s)", output_field=DecimalField())
    with pytest.raises(ScatterNotSupported, match="divide in Python"):
        scatter.aggregate(queryset, targets(queryset), {"x": Avg(unknown)})


@pytest.mark.mysql_settings
def test_sums_that_the_server_cuts_off_are_refused(rows: None) -> None:
    queryset = one_database(Sample)
    huge = Cast(Value("9" * 35), DecimalField(max_digits=65, decimal_places=30))
    with pytest.raises(ScatterNotSupported, match="65 digits"):
        scatter.aggregate(queryset, targets(queryset), {"x": Sum(huge)})


@pytest.mark.mysql_settings
def test_ord_is_refused(rows: None) -> None:
    """The code of an emoji is greater than the type of the column in a union."""
    queryset = one_database(Sample)
    for query in (
        queryset.annotate(x=Ord("name")),
        queryset.order_by(Ord("name")),
        queryset.values("flag").annotate(x=Max(Ord("name"))),
        queryset.annotate(x=Ord("name")).values("x").distinct(),
    ):
        with statements(0, using="photos"), pytest.raises(ScatterNotSupported, match="Ord"):
            fetch(query)


@pytest.mark.mysql_settings
def test_values_out_of_range_are_the_error_of_one_database(rows: None) -> None:
    queryset = one_database(Sample).annotate(x=F("number") * Value(2**62) * Value(4))
    for read in (
        lambda: list(queryset),
        lambda: fetch(queryset),
        lambda: fetch(queryset, stream=True),
    ):
        with pytest.raises(IntegrityError, match="out of range"):
            read()


@pytest.mark.every_backend
def test_distinct_values_that_are_no_numbers_are_refused(rows: None) -> None:
    queryset = one_database(Sample)
    names = ("name", "text", "day", "at", "clock", "code", "data", "blob")
    for name, kind in product(names, (Sum, Avg)):
        with statements(0, using="photos"), pytest.raises(ScatterNotSupported, match="no numbers"):
            scatter.aggregate(
                queryset, targets(queryset), {"n": Count("id"), "x": kind(name, distinct=True)}
            )


@pytest.mark.every_backend
def test_distinct_numbers(rows: None) -> None:
    queryset = one_database(Sample)
    for name, kind in (("number", Sum), ("price", Sum), ("number", Avg), ("price", Avg)):
        aggregate = {"x": kind(name, distinct=True)}
        assert repr(scatter.aggregate(queryset, targets(queryset), aggregate)) == repr(
            queryset.aggregate(**aggregate)
        )


def test_distinct_booleans(rows: None) -> None:
    """SQLite has integers for booleans."""
    queryset = one_database(Sample)
    for kind in (Sum, Avg):
        aggregate = {"x": kind("flag", distinct=True)}
        assert repr(scatter.aggregate(queryset, targets(queryset), aggregate)) == repr(
            queryset.aggregate(**aggregate)
        )


@pytest.mark.every_backend
def test_distinct_aggregates_are_refused_before_anything_is_sent(rows: None) -> None:
    queryset = one_database(Sample)
    for refused in (Now(), Random()):
        with statements(0, using="photos"), pytest.raises(ScatterNotSupported):
            scatter.aggregate(
                queryset,
                targets(queryset),
                {"n": Count("id"), "x": Count(refused, distinct=True)},
            )


@pytest.mark.mysql_settings
def test_zero_dates_are_refused_where_they_are_compared(rows: None) -> None:
    """The driver returns None for them, but for the server they are the smallest dates, and no NULL."""
    queryset = one_database(Sample)
    for alias in [WHOLE, *(target.shard.alias for target in targets(queryset))]:
        Sample.objects.using(alias).filter(number__lt=5).update(day="2026-01-01")
        with connections[alias].cursor() as cursor:
            cursor.execute("UPDATE samples_sample SET day = '0000-00-00' WHERE number = 6")
    for refused in (
        queryset.order_by("day", "id"),
        queryset.order_by("-day", "id"),
        queryset.values("day").distinct(),
        queryset.values("day").annotate(n=Count("id")),
        queryset.values("flag").annotate(n=Min("day")),
    ):
        with pytest.raises(ScatterNotSupported, match="0000-00-00"):
            fetch(refused)
    assert len(fetch(queryset.order_by("number"))) == len(PRICES)
    for alias in [WHOLE, *(target.shard.alias for target in targets(queryset))]:
        with connections[alias].cursor() as cursor:
            cursor.execute("UPDATE samples_sample SET day = NULL WHERE number = 6")
    for accepted in (
        queryset.order_by("day", "id"),
        queryset.order_by("-day", "id"),
        queryset.values("day").distinct().order_by("day"),
        queryset.values("flag").annotate(n=Min("day"), m=Max("day")).order_by("n", "flag"),
    ):
        assert fetch(accepted) == list(accepted)


@pytest.mark.every_backend
def test_rounded_floats_have_all_their_digits() -> None:
    ratios = [1.5e17, -1.5e19, 3e300, 2e18, -0.4, 2.5, None, 1.5e17]
    store([Sample(id=n, owner=n % 5, ratio=ratio) for n, ratio in enumerate(ratios)])
    queryset = one_database(Sample)
    for rounded in (
        Round("ratio"),
        Ceil("ratio"),
        Floor("ratio"),
        Coalesce(Round("ratio"), 0.0),
        Round("ratio") * 1.0,
    ):
        for query in (
            queryset.annotate(x=rounded).order_by("id").values_list("id", "x"),
            queryset.annotate(x=rounded).order_by("x", "id").values_list("id", "x"),
            queryset.order_by(rounded, "id").values_list("id"),
            queryset.annotate(x=rounded).values_list("x").distinct().order_by("x"),
            queryset.annotate(x=rounded).values("x").annotate(n=Count("id")).order_by("x"),
            queryset.values("flag").annotate(x=Max(rounded), y=Min(rounded)),
        ):
            assert repr(fetch(query)) == repr(list(query)), str(query.query)
        extremes = {"x": Max(rounded), "y": Min(rounded)}
        many = scatter.aggregate(queryset, targets(queryset), extremes)
        assert repr(many) == repr(queryset.aggregate(**extremes))
