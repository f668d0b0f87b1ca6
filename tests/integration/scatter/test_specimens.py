"""Values that only PostgreSQL has: shards give the answer of one database, or refuse."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from django.contrib.postgres.aggregates import ArrayAgg, BoolAnd, JSONBAgg
from django.contrib.postgres.search import SearchQuery, SearchRank, SearchVector
from django.core.exceptions import FieldError
from django.db import DataError, ProgrammingError, connections
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange, NumericRange
from django.db.models import (
    Avg,
    CharField,
    Count,
    DurationField,
    ExpressionWrapper,
    F,
    Func,
    Max,
    Min,
    Model,
    Q,
    QuerySet,
    StdDev,
    Sum,
    TextField,
    Value,
    Variance,
)
from django.db.models.fields.json import KeyTextTransform, KeyTransform
from django.db.models.functions import Cast, Collate, Concat, Lower
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from sharded_orm import scatter
from sharded_orm.exceptions import ScatterNotSupported
from tests.integration.scatter import queries
from tests.integration.scatter.conftest import (
    SHARDS,
    WHOLE,
    distribute,
    fetch,
    one_database,
    targets,
)
from tests.queries.conftest import DATABASES

if TYPE_CHECKING:
    from tests.specimens.models import Specimen

pytestmark = [
    pytest.mark.postgresql_settings,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
    pytest.mark.usefixtures("batches"),
]

ALIASES = [*(f"photos_{number:05d}" for number in SHARDS), WHOLE]
_EXAMPLES = int(os.environ.get("SCATTER_EXAMPLES", "25"))
differential = settings(
    max_examples=_EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # An example costs many statements.
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
NAN, INFINITY = float("nan"), float("inf")


def model() -> type[Specimen]:
    from tests.specimens.models import Specimen

    return Specimen


def everywhere(sql: str) -> None:
    for alias in ALIASES:
        with connections[alias].cursor() as cursor:
            cursor.execute(sql)


def store(rows: Sequence[Any]) -> None:
    everywhere("DELETE FROM specimens_specimen")
    distribute(rows)
    # Django does not write NaN into a DecimalField.
    everywhere("UPDATE specimens_specimen SET amount = 'NaN' WHERE amount = 99")


def specimens() -> QuerySet[Any]:
    return one_database(model())


# -- Random rows and queries


def _optional(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([None, *values])


def _time(hour: int) -> datetime.datetime:
    return datetime.datetime(2026, 1, 1, hour, tzinfo=datetime.UTC)


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "text": _optional("", "a", "A", "b", "B", "ä", "a b", "é", "e\u0301", "-a", "_", "中"),
    "tags": _optional([], ["a"], ["A"], ["a", "b"], ["ä"], ["b"], ['"', ","]),
    "numbers": _optional([], [1], [1, 2], [None], [2], [10]),
    "span": st.sampled_from([
        None, NumericRange(1, 3), NumericRange(1, 4), NumericRange(None, 2), NumericRange(2, None),
        NumericRange(empty=True), NumericRange(1, 2, "[]"),
    ]),
    "period": _optional(
        DateTimeTZRange(_time(1), _time(2)), DateTimeTZRange(_time(1), _time(3)),
        DateTimeTZRange(None, _time(2)),
    ),
    "address": _optional("10.0.0.1", "10.0.0.2", "9.0.0.1", "::1", "fe80::1"),
    "data": _optional(1, 1.0, "a", "A", "ä", [1], [], {}, {"a": 1}, {"a": "x"}, {"b": None}, True),
    "amount": _optional(
        Decimal(99), Decimal(0), Decimal("-1.5"), Decimal("0.00000001"), Decimal("1e20"),
        Decimal(7), Decimal("2.25"),
    ),
    "ratio": _optional(NAN, INFINITY, -INFINITY, 0.0, -0.0, 1.5, -2.25),
    "took": _optional(
        *(datetime.timedelta(d, s, u) for d, s, u in ((0, 0, 0), (1, 0, 0), (0, 90000, 0),
        (-1, 5, 1), (3, 0, 7), (0, 0, 1)))
    ),
    "big": _optional(2**62, -(2**62), 1, 10**10),
}  # fmt: skip
FIELDS = [*VALUES, "owner"]
EXPRESSIONS: list[Callable[[], Any]] = [
    lambda: Collate("text", "und-x-icu"),
    lambda: Collate("text", "sv-x-icu"),
    lambda: Collate("text", "C"),
    lambda: Lower(Collate("text", "und-x-icu")),
    lambda: Concat(Collate("text", "de-x-icu"), Value("-"), output_field=TextField()),
    lambda: F("tags__0"),
    lambda: F("tags__len"),
    lambda: F("numbers__0_1"),
    lambda: KeyTransform("a", "data"),
    lambda: KeyTextTransform("a", "data"),
    lambda: SearchRank(SearchVector("text", config="simple"), SearchQuery("a", config="simple")),
    lambda: SearchVector("text", config="simple"),
    lambda: Func(F("span"), function="lower"),
    lambda: F("ratio") + F("big"),
    lambda: F("amount") / 3,
    lambda: ExpressionWrapper(F("took") * 2, DurationField()),
    lambda: Cast(Value(None), CharField()),
]
AGGREGATES: list[Callable[[], Any]] = [
    lambda: Count("id"),
    lambda: Count("tags"),
    *(
        lambda name=name: Sum(name)
        for name in ("amount", "ratio", "took", "big", "owner", "numbers")
    ),  # type: ignore[misc]  # a default binds
    *(lambda name=name: Avg(name) for name in ("amount", "ratio", "took", "big", "owner")),  # type: ignore[misc]  # a default binds
    *(lambda name=name: Min(name) for name in FIELDS),  # type: ignore[misc]  # a default binds
    *(lambda name=name: Max(name) for name in FIELDS),  # type: ignore[misc]  # a default binds
    lambda: Max("text", default=Value("b")),
    lambda: Max(Collate("text", "und-x-icu")),
    lambda: Sum("took", default=datetime.timedelta(1)),
    lambda: Avg("took", filter=Q(owner__gt=1)),
    lambda: StdDev("amount"),
    lambda: Variance("ratio"),
    lambda: ArrayAgg("text"),
    lambda: JSONBAgg("data"),
    lambda: BoolAnd(Q(owner__gt=1)),
]
SUMMARIES: list[Callable[[], Any]] = [
    *AGGREGATES,
    *(lambda name=name: Count(name, distinct=True) for name in FIELDS),  # type: ignore[misc]  # a default binds
    *(lambda name=name: Sum(name, distinct=True) for name in ("amount", "big", "took", "ratio")),  # type: ignore[misc]  # a default binds
    *(lambda name=name: Avg(name, distinct=True) for name in ("amount", "big", "took", "ratio")),  # type: ignore[misc]  # a default binds
]
conditions = st.sampled_from(
    [
        None, Q(tags__contains=["a"]), Q(numbers__len__gt=0), Q(span__contains=2), Q(data__a=1),
        Q(data__contains={"a": 1}), Q(address="::1"), Q(ratio__gt=1), Q(text__search="a"),
        Q(period__startswith=_time(1)),
    ]
)  # fmt: skip


@st.composite
def rows(draw: st.DrawFn) -> list[Any]:
    return [
        model()(
            id=number,
            owner=draw(st.integers(0, 4)),
            **{name: draw(values) for name, values in VALUES.items()},
        )
        for number in range(draw(st.integers(0, 12)))
    ]


@st.composite
def row_queries(draw: st.DrawFn) -> queries.Query:
    condition = draw(conditions)
    made = draw(st.sampled_from([None, *EXPRESSIONS]))
    names = FIELDS if made is None else [*FIELDS, "made", "made"]
    order = draw(queries.orders(names))
    chosen = draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
    part = draw(queries.slices())
    how = draw(st.sampled_from(["rows", "distinct", "distinct on", "values"]))
    on = [key.lstrip("-") if isinstance(key, str) else key.expression.name for key in order]

    def build(queryset: QuerySet[Any]) -> QuerySet[Any]:
        queryset = queryset if condition is None else queryset.filter(condition)
        if made is not None:
            queryset = queryset.annotate(made=made())
        if how == "distinct on":
            return queryset.order_by(*order, "id").distinct(*on[:2], "id" if not on else on[0])[
                part
            ]
        if how == "distinct":
            return (
                queryset.order_by(*chosen, "owner").values_list(*chosen, "owner").distinct()[part]
            )
        queryset = queryset.order_by(*order, "id")
        return (queryset.values_list("id", *chosen) if how == "values" else queryset)[part]

    return build


@st.composite
def group_queries(draw: st.DrawFn) -> queries.Query:
    condition = draw(conditions)
    names = draw(st.lists(st.sampled_from([*FIELDS, "made"]), min_size=1, max_size=2, unique=True))
    made = draw(st.sampled_from(EXPRESSIONS))
    aggregates = draw(st.lists(st.sampled_from(AGGREGATES), min_size=1, max_size=2))
    first = draw(st.sampled_from([(), ("x0",), ("-x0",)]))
    part = draw(queries.slices())

    def build(queryset: QuerySet[Any]) -> QuerySet[Any]:
        queryset = queryset if condition is None else queryset.filter(condition)
        annotations = {f"x{n}": make() for n, make in enumerate(aggregates)}
        queryset = queryset.annotate(made=made()).values(*names).annotate(**annotations)
        return queryset.order_by(*first, *names).values_list(*names, *annotations)[part]

    return build


def canonical(value: Any) -> Any:
    """Return a form in which values are equal if PostgreSQL may return either for one group."""
    if isinstance(value, Model):
        return [(k, canonical(v)) for k, v in sorted(value.__dict__.items()) if k != "_state"]
    if isinstance(value, list | tuple):
        return [canonical(part) for part in value]
    if isinstance(value, dict):
        return {key: canonical(part) for key, part in value.items()}
    if isinstance(value, float) or type(value) is int:
        return "nan" if math.isnan(value) else value + 0
    return repr(value)


def check(one: Callable[[], Any], many: Callable[[], Any]) -> None:
    try:
        expected = one()
    except (DataError, FieldError, ProgrammingError) as error:
        with pytest.raises((type(error), ScatterNotSupported)):
            many()
        event(f"error: {error}"[:60])
        return
    try:
        answer = many()
    except ScatterNotSupported as refusal:
        event(f"refused: {refusal}"[:90])
        return
    event("compared")
    assert canonical(answer) == canonical(expected)


@differential
@given(rows(), row_queries())
def test_rows(rows: list[Any], build: queries.Query) -> None:
    store(rows)
    queryset = build(specimens())
    check(lambda: list(queryset), lambda: fetch(queryset))
    check(queryset.all().count, lambda: scatter.count(queryset, targets(queryset)))
    check(queryset.all().exists, lambda: scatter.exists(queryset, targets(queryset)))


@differential
@given(rows(), group_queries())
def test_groups(rows: list[Any], build: queries.Query) -> None:
    store(rows)
    queryset = build(specimens())
    check(lambda: list(queryset), lambda: fetch(queryset))


@differential
@given(rows(), conditions, st.lists(st.sampled_from(SUMMARIES), min_size=1, max_size=2))
def test_aggregates(rows: list[Any], condition: Q | None, made: list[Any]) -> None:
    store(rows)
    queryset = specimens() if condition is None else specimens().filter(condition)
    aggregates = {f"x{n}": make() for n, make in enumerate(made)}
    check(
        lambda: queryset.aggregate(**aggregates),
        lambda: scatter.aggregate(queryset, targets(queryset), aggregates),
    )
