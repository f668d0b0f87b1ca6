"""Random rows and random querysets, for comparing shards with one database."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from django.db.models import Avg, Case, Count, F, Max, Min, Q, QuerySet, Sum, Value, When
from django.db.models.functions import Coalesce, Concat, ExtractDay, Length, Lower, Trim
from hypothesis import strategies as st

from tests.samples.models import Part, Sample

# Letters that some collations treat as equal, blanks, and characters that sort before the blank.
TEXTS = st.text(alphabet="aAáÁbBßsS é\t\x01-_%😀😁中ſÅåzZ", max_size=5)


def _optional(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


@st.composite
def samples(draw: st.DrawFn) -> list[Sample]:
    count = draw(st.integers(0, 14))
    return [
        Sample(
            id=number,
            owner=draw(st.integers(0, 4)),
            name=draw(_optional(TEXTS)),
            label=draw(TEXTS),
            text=draw(_optional(TEXTS)),
            number=draw(_optional(st.integers(-3, 3))),
            # SQLite sums floats; sums of quarters and eighths are exact in any order.
            price=draw(_optional(st.integers(-36, 36).map(lambda n: Decimal(n) / 4))),
            ratio=draw(_optional(st.integers(-20, 20).map(lambda n: n / 8))),
            flag=draw(_optional(st.booleans())),
            day=draw(_optional(st.dates(datetime.date(2026, 1, 1), datetime.date(2026, 1, 4)))),
            at=draw(
                _optional(
                    st.integers(0, 5).map(
                        lambda n: datetime.datetime(2026, 1, 1, n // 2, 0, 0, n, datetime.UTC)
                    )
                )
            ),
            clock=draw(_optional(st.integers(0, 3).map(lambda n: datetime.time(1, 0, 0, n)))),
            took=draw(_optional(st.integers(-5, 5).map(lambda n: datetime.timedelta(0, n, n)))),
            code=draw(
                _optional(
                    st.uuids(version=4)
                    | st.uuids(version=1)
                    | st.integers(0, 3).map(lambda n: uuid.UUID(int=n))
                )
            ),
            data=draw(_optional(st.sampled_from([{"a": 1}, {"a": "x"}, [1], 2, "y", True, {}]))),
            blob=draw(_optional(st.binary(max_size=2))),
        )
        for number in range(count)
    ]


@st.composite
def parts(draw: st.DrawFn, owners: list[Sample]) -> list[Part]:
    if not owners:
        return []
    count = draw(st.integers(0, 10))
    parts = []
    for number in range(count):
        sample = draw(st.sampled_from(owners))
        weight = draw(_optional(st.integers(-2, 2)))
        parts.append(Part(id=number, owner=sample.owner, sample_id=sample.pk, weight=weight))
    return parts


FIELDS = [
    "name", "label", "text", "number", "price", "ratio", "flag", "day", "at", "clock", "took",
    "data", "blob", "owner", "code",
]  # fmt: skip

EXPRESSIONS: list[Callable[[], Any]] = [
    lambda: F("number") + F("owner"),
    lambda: F("price") * 2,
    lambda: F("ratio") / 2,
    lambda: Length("name"),
    lambda: Lower("label"),
    lambda: Trim("text"),
    lambda: Concat("label", Value("%s"), "label"),
    lambda: Coalesce("number", Value(1)),
    lambda: Coalesce("name", "label"),
    lambda: Case(When(number__gt=0, then="label"), default="name"),
    lambda: ExtractDay("day"),
    lambda: Value("x"),
]

conditions = st.recursive(
    st.sampled_from(
        [
            Q(number__gt=0),
            Q(number=None),
            Q(flag=True),
            ~Q(number=1),
            Q(label__lt="b"),
            Q(name__contains="a"),
            Q(name__startswith="%"),
            Q(owner__in=[0, 1, 2]),
            Q(id__lt=7),
            Q(number__lt=F("owner")),
            Q(parts__weight__gt=0),
            ~Q(parts__weight=1),
            Q(data__a=1),
            Q(pk__in=[]),
            Q(label=""),
        ]
    ),
    lambda inner: st.tuples(inner, inner, st.booleans()).map(
        lambda three: three[0] | three[1] if three[2] else three[0] & three[1]
    ),
    max_leaves=3,
)


@st.composite
def orders(draw: st.DrawFn, names: list[str]) -> list[Any]:
    conditions: list[Any] = []
    for name in draw(st.lists(st.sampled_from(names), max_size=3, unique=True)):
        expression = F(name)
        conditions.append(
            draw(
                st.sampled_from(
                    [
                        name,
                        "-" + name,
                        expression.asc(nulls_last=True),
                        expression.asc(nulls_first=True),
                        expression.desc(nulls_first=True),
                        expression.desc(nulls_last=True),
                    ]
                )
            )
        )
    return conditions


@st.composite
def slices(draw: st.DrawFn) -> slice:
    low = draw(st.sampled_from([None, None, 0, 1, 3]))
    length = draw(st.sampled_from([None, 0, 1, 2, 5]))
    return slice(low, None if length is None else (low or 0) + length)


AGGREGATES: list[Callable[[], Any]] = [
    lambda: Count("id"),
    lambda: Count("number"),
    lambda: Sum("number"),
    lambda: Sum("price"),
    lambda: Sum("ratio"),
    lambda: Sum("took"),
    lambda: Avg("number"),
    lambda: Avg("price"),
    lambda: Avg("ratio"),
    lambda: Avg("took"),
    lambda: Min("price"),
    lambda: Max("number"),
    lambda: Max("at"),
    lambda: Max("name"),
    lambda: Min("label"),
    lambda: Min("code"),
    lambda: Max("data"),
    lambda: Min("day"),
    lambda: Max("clock"),
    lambda: Count("id", filter=Q(flag=True)),
    lambda: Sum("number", filter=Q(owner__gt=1), default=3),
    lambda: Avg("price", filter=Q(owner__gt=1), default=Decimal("1.5")),
    lambda: Sum(F("number") * F("owner")),
    lambda: Max(Length("label")),
    lambda: Count("parts"),
    lambda: Sum("parts__weight"),
]

Query = Callable[[QuerySet[Any]], QuerySet[Any]]


@st.composite
def row_queries(draw: st.DrawFn) -> Query:
    """Queries with filters, annotations, an order and a slice; of instances, dicts or tuples."""
    where = draw(_optional(conditions))
    made = draw(_optional(st.sampled_from(EXPRESSIONS)))
    names = FIELDS if made is None else [*FIELDS, "made"]
    order = draw(orders(names))
    values = draw(_optional(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True)))
    part = draw(slices())
    turned = draw(st.booleans())
    distinct = draw(st.booleans())

    def build(queryset: QuerySet[Any]) -> QuerySet[Any]:
        if where is not None:
            queryset = queryset.filter(where)
        if made is not None:
            queryset = queryset.annotate(made=made())
        if distinct:
            queryset = queryset.distinct()
        queryset = queryset.order_by(*order, "id")
        if turned:
            queryset = queryset.reverse()
        if values:
            queryset = queryset.values_list("id", *values)
        return queryset[part]

    return build


@st.composite
def distinct_queries(draw: st.DrawFn) -> Query:
    """Queries of distinct values, ordered by all of them."""
    where = draw(_optional(conditions))
    names = draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3, unique=True))
    part = draw(slices())

    def build(queryset: QuerySet[Any]) -> QuerySet[Any]:
        if where is not None:
            queryset = queryset.filter(where)
        return queryset.order_by(*names).values_list(*names).distinct()[part]

    return build


@st.composite
def group_queries(draw: st.DrawFn) -> Query:
    """Aggregates of groups, ordered by the groups or by an aggregate before them."""
    where = draw(_optional(conditions))
    names = draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=2, unique=True))
    aggregates = draw(st.lists(st.sampled_from(AGGREGATES), min_size=1, max_size=3))
    first = draw(st.sampled_from([(), ("x0",), ("-x0",)]))
    part = draw(slices())

    def build(queryset: QuerySet[Any]) -> QuerySet[Any]:
        if where is not None:
            queryset = queryset.filter(where)
        annotations = {f"x{n}": make() for n, make in enumerate(aggregates)}
        queryset = queryset.values(*names).annotate(**annotations)
        return queryset.order_by(*first, *names).values_list(*names, *annotations)[part]

    return build


@st.composite
def counted_queries(draw: st.DrawFn) -> Query:
    """Rows with aggregates of their own, filtered by them."""
    aggregate = draw(st.sampled_from(AGGREGATES))
    least = draw(_optional(st.just(0)))
    part = draw(slices())

    def build(queryset: QuerySet[Any]) -> QuerySet[Any]:
        queryset = queryset.annotate(x=aggregate())
        if least is not None:
            queryset = queryset.filter(x__isnull=False)
        return queryset.order_by("x", "-id")[part]

    return build


aggregations = st.tuples(
    _optional(conditions),
    st.lists(st.sampled_from(AGGREGATES), min_size=1, max_size=4),
)
