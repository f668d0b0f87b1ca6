"""Values that only PostgreSQL has: shards give the answer of one database, or refuse."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from django.contrib.postgres.aggregates import (
    ArrayAgg,
    BitAnd,
    BitOr,
    BitXor,
    BoolAnd,
    BoolOr,
    JSONBAgg,
    StringAgg,
)
from django.contrib.postgres.functions import RandomUUID, TransactionNow
from django.contrib.postgres.search import SearchQuery, SearchRank, SearchVector
from django.core.exceptions import FieldError
from django.db import DataError, ProgrammingError, connections, transaction
from django.db.backends.postgresql.psycopg_any import DateTimeTZRange, NumericRange
from django.db.models import (
    Avg,
    BooleanField,
    CharField,
    Count,
    DateField,
    DateTimeField,
    DurationField,
    ExpressionWrapper,
    F,
    FloatField,
    Func,
    Max,
    Min,
    Model,
    Q,
    QuerySet,
    StdDev,
    Sum,
    TextField,
    TimeField,
    UUIDField,
    Value,
    Variance,
)
from django.db.models.fields.json import KeyTextTransform, KeyTransform
from django.db.models.functions import Cast, Collate, Concat, Lower, Now
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from sharded_orm import scatter
from sharded_orm.exceptions import ScatterNotSupported
from sharded_orm.scatter import merge, plan
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
_EXAMPLES = int(os.environ.get("SCATTER_EXAMPLES", "12"))
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
    lambda: StringAgg("text", "-", default=Value("none")),
    lambda: BoolAnd(Q(owner__gt=1)),
    lambda: BoolOr(Q(big__gt=1), filter=Q(owner__gt=1)),
    lambda: BoolOr(Q(big__gt=1), default=Value(False)),
    *(lambda kind=kind: kind("big") for kind in (BitAnd, BitOr, BitXor)),  # type: ignore[misc]  # a default binds
    lambda: BitXor("owner", default=Value(0)),
]
SUMMARIES: list[Callable[[], Any]] = [
    *AGGREGATES,
    *(lambda name=name: Count(name, distinct=True) for name in FIELDS),  # type: ignore[misc]  # a default binds
    *(lambda name=name: Sum(name, distinct=True) for name in ("amount", "big", "took", "ratio")),  # type: ignore[misc]  # a default binds
    *(lambda name=name: Avg(name, distinct=True) for name in ("amount", "big", "took", "ratio")),  # type: ignore[misc]  # a default binds
    # The server has no sum of these.
    *(
        lambda name=name, kind=kind: kind(name, distinct=True)
        for name in ("text", "address", "data")
        for kind in (Sum, Avg)
    ),  # type: ignore[misc]  # a default binds
    lambda: Count(Concat(Cast("text", CharField()), "text"), distinct=True),
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


# -- Fixed cases


def test_text_has_the_order_of_its_collation() -> None:
    texts = ["b", "A", "a", "Ä", "z", "B", None, "ö"]
    store([model()(id=n, owner=n % 5, text=text) for n, text in enumerate(texts)])
    queryset = specimens().order_by(Collate("text", "sv-x-icu"))
    assert [row.text for row in fetch(queryset)] == ["a", "A", "b", "B", "z", "Ä", "ö", None]


def test_streams_are_merged_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "ROUND", 2)
    monkeypatch.setattr("sharded_orm.scatter.api.STREAM_BATCH", 1)
    store([model()(id=n, owner=n % 5, text=chr(97 + n * 7 % 26) * 2) for n in range(60)])
    queryset = specimens().order_by(Collate("text", "und-x-icu").desc(), "id")
    assert fetch(queryset, stream=True, chunk_size=3) == list(queryset)


def test_shards_in_transactions_are_ranked_there() -> None:
    store([model()(id=n, owner=n % 5, text="bAaB"[n % 4]) for n in range(12)])
    queryset = specimens().order_by(Collate("text", "und-x-icu"), "id")
    with ExitStack() as stack:
        for alias in ALIASES[:-1]:
            stack.enter_context(transaction.atomic(using=alias))
            with connections[alias].cursor() as cursor:
                # No other session can read the table now.
                cursor.execute("LOCK TABLE specimens_specimen IN ACCESS EXCLUSIVE MODE")
        assert fetch(queryset) == list(queryset)


def test_nodes_that_sort_differently_are_refused() -> None:
    for alias, locale in (("photos_00000", "de"), ("photos_00008", "sv")):
        with connections[alias].node_cursor() as cursor:
            cursor.execute("CREATE SCHEMA IF NOT EXISTS extensions")
            cursor.execute("DROP COLLATION IF EXISTS extensions.here")
            cursor.execute(
                f"CREATE COLLATION extensions.here (provider = icu, locale = '{locale}')"
            )
    store([model()(id=n, owner=n, text="aä"[n % 2]) for n in range(5)])
    with pytest.raises(ScatterNotSupported, match=r"'db1' and 'db2'.*Collate"):
        fetch(specimens().order_by(Collate("text", "here")))


@pytest.fixture
def column_type(request: pytest.FixtureRequest) -> Iterator[None]:
    """Another type of the text column, given in SQL."""
    for alias in ("photos_00000", "photos_00008"):
        with connections[alias].node_cursor() as cursor:
            cursor.execute("CREATE SCHEMA IF NOT EXISTS extensions")
            cursor.execute("CREATE EXTENSION IF NOT EXISTS citext SCHEMA extensions")
    for alias in ALIASES:
        with connections[alias].cursor() as cursor:
            cursor.execute("CREATE COLLATION own (provider = icu, locale = 'de')")
            cursor.execute(f"ALTER TABLE specimens_specimen ALTER text TYPE {request.param}")
    yield
    for alias in ALIASES:
        with connections[alias].cursor() as cursor:
            cursor.execute(
                "ALTER TABLE specimens_specimen ALTER text TYPE text COLLATE pg_catalog.default"
            )
            cursor.execute("DROP COLLATION own")


@pytest.mark.parametrize("column_type", ["extensions.citext"], indirect=True)
def test_texts_without_case(column_type: None) -> None:
    texts = ["b", "A", "a", "B", "c", "C", "a"]
    store([model()(id=n, owner=n % 5, text=text) for n, text in enumerate(texts)])
    for queryset in (
        specimens().filter(text="A").order_by("id"),
        specimens().order_by("text", "id"),
        specimens().order_by("-text", "id")[:4],
    ):
        assert fetch(queryset) == list(queryset)
    counted = specimens().values("text").annotate(n=Count("id")).order_by("text")
    found = [(row["text"].lower(), row["n"]) for row in fetch(counted)]
    assert found == [("a", 3), ("b", 2), ("c", 2)]
    assert len(fetch(specimens().values("text").distinct())) == 3


@pytest.mark.parametrize("column_type", ["text COLLATE own"], indirect=True)
def test_collations_of_each_schema_are_refused(column_type: None) -> None:
    store([model()(id=n, owner=n % 5, text="aä"[n % 2]) for n in range(10)])
    queryset = specimens().order_by("text", "id")
    if plan.BATCH == 1:
        assert fetch(queryset) == list(queryset)
    else:
        with pytest.raises(ScatterNotSupported, match="Collate"):
            fetch(queryset)
    queryset = specimens().order_by(Collate("text", "C"), "id")
    assert fetch(queryset) == list(queryset)


def test_months_are_compared_and_not_added() -> None:
    lengths = ["1 month", "30 days", "29 days 24:00:01", "1 year", "360 days", "-1 month"]
    store([model()(id=n, owner=n % 5) for n in range(6)])
    for number, length in enumerate(lengths):
        everywhere(f"UPDATE specimens_specimen SET took = '{length}' WHERE id = {number}")
    queryset = specimens().order_by("took", "id")
    assert fetch(queryset) == list(queryset)
    assert scatter.aggregate(queryset, targets(queryset), {"n": Count("took", distinct=True)}) == {
        "n": 4
    }
    for aggregate in (Sum("took"), Avg("took")):
        with pytest.raises(ScatterNotSupported, match="months"):
            scatter.aggregate(queryset, targets(queryset), {"x": aggregate})


ADDED: dict[str, Callable[[], Any]] = {
    "text": lambda: F("text"),
    "arrays": lambda: F("numbers"),
    "ranges": lambda: F("span"),
    "JSON": lambda: F("data"),
    "booleans": lambda: ExpressionWrapper(Q(owner__gt=1), BooleanField()),
    "moments": lambda: Func(
        Value("2026-01-01 00:00Z"),
        template="CAST(%(expressions)s AS timestamptz)",
        output_field=DateTimeField(),
    ),
    "days": lambda: Cast(Value("2026-01-01"), DateField()),
    "addresses": lambda: F("address"),
    "UUIDs": lambda: Cast(Value("00000000-0000-4000-8000-000000000001"), UUIDField()),
}


@pytest.mark.parametrize("count", [5, 0])
def test_distinct_values_that_are_no_numbers_have_no_sum(count: int) -> None:
    store([
        model()(id=n, owner=n, text=str(n), numbers=[n], data=n, address=f"10.0.0.{n}")
        for n in range(count)
    ])  # fmt: skip
    queryset = specimens()
    for aggregate in (Sum, Avg):
        for added in ADDED.values():
            aggregates = {"x": aggregate(added(), distinct=True)}
            with pytest.raises(ProgrammingError):
                queryset.aggregate(**aggregates)
            with pytest.raises(ScatterNotSupported, match="Cast"):
                scatter.aggregate(queryset, targets(queryset), aggregates)


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("count", [1, 5])
def test_an_average_of_times_is_refused(count: int, distinct: bool) -> None:
    store([model()(id=n, owner=n) for n in range(count)])
    queryset = specimens()
    average = Avg(
        Cast(Concat(Value("0"), Cast("owner", CharField()), Value(":00")), TimeField()),
        distinct=distinct,
    )
    assert isinstance(queryset.aggregate(x=average)["x"], datetime.timedelta)
    with pytest.raises(ScatterNotSupported, match=r"output_field|Cast"):
        scatter.aggregate(queryset, targets(queryset), {"x": average})


@pytest.mark.parametrize("distinct", [False, True])
def test_averages_of_reals_have_the_digits_of_a_double(distinct: bool) -> None:
    """The server computes a similarity as ``real``, and the average of these as ``double precision``."""
    store([model()(id=n, owner=n % 5, ratio=1 / (n + 3)) for n in range(12)])
    real = Func(F("ratio"), template="CAST(%(expressions)s AS real)", output_field=FloatField())
    queryset, average = specimens(), Avg(real, distinct=distinct)
    one = queryset.aggregate(x=average)["x"]
    many = scatter.aggregate(queryset, targets(queryset), {"x": average})["x"]
    assert many == pytest.approx(one, rel=1e-14)


def mixed() -> Any:
    return Concat("text", Cast("text", CharField()))


def test_expressions_of_an_unknown_field_are_compared_by_the_server() -> None:
    """As on one database, the field matters only for values that are returned."""
    texts = ["b", "A", "a", "Ä", "z", "a", None, "ö"]
    store([model()(id=n, owner=n % 5, text=text) for n, text in enumerate(texts)])
    for queryset in (
        specimens().order_by(mixed(), "id"),
        specimens().alias(x=mixed()).order_by("-x", "id")[1:4],
        specimens().order_by(mixed(), "id").values_list("id"),
    ):
        assert fetch(queryset) == list(queryset)
    counts = {"n": Count(mixed(), distinct=True)}
    queryset = specimens()
    assert scatter.aggregate(queryset, targets(queryset), counts) == queryset.aggregate(**counts)


def test_infinite_dates_are_the_error_that_django_has() -> None:
    store([model()(id=n, owner=n) for n in range(5)])
    everywhere("UPDATE specimens_specimen SET period = '[2026-01-01,infinity)' WHERE id = 3")
    queryset = specimens().annotate(
        end=Func(F("period"), function="upper", output_field=DateTimeField())
    )
    for read in (list, fetch):
        with pytest.raises(DataError):
            read(queryset.order_by("end"))


def test_a_sum_of_floats_that_overflows() -> None:
    store([model()(id=n, owner=n, ratio=1e308) for n in range(5)])
    queryset = specimens()
    with pytest.raises(DataError):
        queryset.aggregate(x=Sum("ratio"))
    with pytest.raises(ScatterNotSupported, match="overflows"):
        scatter.aggregate(queryset, targets(queryset), {"x": Sum("ratio")})


@pytest.mark.parametrize(
    "build",
    [
        lambda q: q.order_by(RandomUUID()),
        lambda q: q.annotate(x=TransactionNow()).order_by("x"),
        lambda q: q.annotate(x=Now()).order_by("-x", "id"),
        lambda q: q.annotate(x=TransactionNow()).values("x").annotate(n=Count("id")),
        lambda q: q.annotate(x=RandomUUID()).values("x").distinct(),
        lambda q: q.order_by().distinct("text"),
        lambda q: q.order_by("text").distinct("text", "tags"),
        lambda q: q.values("owner").annotate(n=ArrayAgg("text")).order_by("owner"),
    ],
)
def test_refused(build: Callable[[Any], Any]) -> None:
    store([model()(id=n, owner=n) for n in range(5)])
    with pytest.raises(ScatterNotSupported):
        fetch(build(specimens()))


def test_statements_of_many_shards_are_not_compiled_by_the_server() -> None:
    with connections["photos_00000"].node_cursor() as cursor:
        cursor.execute("SELECT current_setting('jit'), current_setting('search_path')")
        assert cursor.fetchall() == [("off", '"extensions"')]
    with connections["photos_00000"].cursor() as cursor:
        cursor.execute("SELECT current_setting('jit')")
        assert cursor.fetchall() == [("on",)]
