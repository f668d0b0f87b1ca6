"""Settings of servers, and types of columns, under which shards would answer unlike one database."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models import (
    Avg,
    Case,
    CharField,
    Count,
    DateTimeField,
    ExpressionWrapper,
    F,
    FloatField,
    Func,
    Max,
    Min,
    OuterRef,
    QuerySet,
    Subquery,
    Sum,
    Value,
    When,
)
from django.db.models.functions import Cast, Coalesce, Collate, Greatest, NullIf

from sharded_orm import runtime, scatter
from sharded_orm.backends.pool import pools
from sharded_orm.exceptions import ScatterNotSupported, SessionStateRefused
from sharded_orm.scatter import column_checks, plan
from tests.authors.models import Novel
from tests.integration.scatter.conftest import SHARDS, WHOLE, fetch, one_database, store, targets
from tests.queries.conftest import DATABASES
from tests.samples.models import Part, Sample

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
    pytest.mark.usefixtures("batches"),
]

ALIASES = [*(f"photos_{number:05d}" for number in SHARDS), WHOLE]


def needs(vendor: str) -> None:
    if connections[WHOLE].vendor != vendor:
        pytest.skip(f"only on {vendor}")


def everywhere(sql: str, aliases: Iterable[str] = ALIASES) -> None:
    for alias in aliases:
        with connections[alias].cursor() as cursor:
            cursor.execute(sql)


def aggregate(queryset: QuerySet[Any], **aggregates: Any) -> dict[str, Any]:
    return scatter.aggregate(queryset, targets(queryset), aggregates)


def new_sessions() -> None:
    connections.close_all()
    for pool in pools():
        pool.dispose()


@pytest.fixture
def eight_places() -> Iterator[None]:
    """The servers divide with eight decimal places more, not with four."""
    needs("mysql")
    aliases = (ALIASES[0], ALIASES[-1])
    everywhere("SET GLOBAL div_precision_increment = 8", aliases)
    new_sessions()
    yield
    everywhere("SET GLOBAL div_precision_increment = 4", aliases)
    new_sessions()


SAMPLES = [
    Sample(id=n, owner=n % 5, number=n % 4, price=Decimal(n), ratio=n / 8) for n in range(10)
]


@pytest.mark.usefixtures("eight_places")
@pytest.mark.parametrize(
    "refused",
    [
        Avg("number"), Avg("price"), Avg("took"), Avg("number", distinct=True), Sum(F("number") / 2),
        Sum(F("number") / 2, distinct=True),
    ],
    ids=str,
)  # fmt: skip
def test_averages_of_another_precision_are_refused(refused: Any) -> None:
    store(SAMPLES)
    with pytest.raises(ScatterNotSupported, match="div_precision_increment is 8"):
        aggregate(one_database(Sample), x=refused)


@pytest.mark.usefixtures("eight_places")
def test_what_does_not_divide_is_the_same_with_another_precision() -> None:
    store(SAMPLES)
    samples = one_database(Sample)
    aggregates = {
        "a": Avg("ratio"),
        "b": Sum("price"),
        "c": Avg("ratio", distinct=True),
        "d": Count("number", distinct=True),
        "e": Sum("number", distinct=True),
    }
    assert aggregate(samples, **aggregates) == samples.aggregate(**aggregates)
    groups = samples.values("owner", "flag").annotate(mean=Sum("number")).order_by("owner")
    assert fetch(groups) == list(groups)


def test_averages_of_groups_of_text() -> None:
    """On MariaDB, the merge finds the precision of quotients behind the weights of the texts."""
    store(SAMPLES)
    samples = one_database(Sample)
    aggregates = {"last": Max("label"), "day": Max("day"), "mean": Avg("number")}
    assert aggregate(samples, **aggregates) == samples.aggregate(**aggregates)
    groups = samples.values("label", "day").annotate(mean=Avg("price")).order_by("label")
    assert fetch(groups) == list(groups)


@pytest.fixture
def short_floats() -> Iterator[None]:
    """The servers send floats with 15 digits, not with all."""
    needs("postgresql")
    everywhere("ALTER ROLE CURRENT_USER SET extra_float_digits = 0", (ALIASES[0], ALIASES[-1]))
    new_sessions()
    yield
    everywhere("ALTER ROLE CURRENT_USER RESET extra_float_digits", (ALIASES[0], ALIASES[-1]))
    new_sessions()


@pytest.mark.usefixtures("short_floats")
def test_floats_without_their_last_digits_are_refused() -> None:
    close = [0.1, 0.10000000000000002, 0.1 + 0.2, 0.3]
    store([Sample(id=n, owner=n % 5, number=n, ratio=close[n % 4]) for n in range(12)])
    samples = one_database(Sample)
    refused: list[Callable[[], Any]] = [
        lambda: fetch(samples.values("ratio").annotate(n=Count("id"))),
        lambda: fetch(samples.values_list("ratio").distinct()),
        lambda: fetch(samples.values("flag").annotate(total=Sum("ratio"))),
        lambda: aggregate(samples, x=Sum("ratio")),
        lambda: aggregate(samples, x=Avg("ratio")),
        lambda: aggregate(samples, x=Max("ratio")),
        lambda: aggregate(samples, x=Sum("ratio", distinct=True)),
        lambda: aggregate(samples, x=Count("ratio", distinct=True)),
        lambda: aggregate(samples, x=Sum(Cast("number", FloatField()))),
    ]
    if plan.BATCH == 1:
        refused.append(lambda: fetch(samples.order_by("ratio", "id")))
    for read in refused:
        with pytest.raises(ScatterNotSupported, match="extra_float_digits is below 1"):
            read()
    ordered = samples.order_by("id").values_list("id", "ratio")
    assert fetch(ordered) == list(ordered)
    assert aggregate(samples, x=Sum("number"), y=Avg("number")) == samples.aggregate(
        x=Sum("number"), y=Avg("number")
    )


@pytest.fixture
def three_rows() -> Iterator[None]:
    """The servers send three rows at most, unless a query has a limit."""
    needs("mysql")
    aliases = (ALIASES[0], ALIASES[-1])
    everywhere("SET GLOBAL sql_select_limit = 3", aliases)
    new_sessions()
    yield
    everywhere("SET GLOBAL sql_select_limit = 18446744073709551615", aliases)
    new_sessions()


@pytest.mark.usefixtures("three_rows")
def test_a_server_that_cuts_results_is_refused() -> None:
    store(SAMPLES)
    samples = one_database(Sample)
    assert len(samples.order_by("id")) == 3
    for read in (
        lambda: fetch(samples.order_by("id")),
        lambda: fetch(samples.order_by("id")[:5]),
        lambda: aggregate(samples, x=Sum("number")),
        lambda: scatter.count(samples, targets(samples)),
    ):
        with pytest.raises(ScatterNotSupported, match="sql_select_limit is 3"):
            read()


def rows_on_shards(model: Any) -> int:
    return sum(model.objects.using(alias).count() for alias in ALIASES)


@pytest.mark.usefixtures("three_rows")
def test_a_deletion_whose_reads_a_server_cuts_is_refused() -> None:
    store(SAMPLES, [Part(id=n, owner=n % 5, sample_id=n) for n in range(1, 5)])
    before = rows_on_shards(Sample)
    with pytest.raises(ScatterNotSupported, match="sql_select_limit is 3"):
        Sample.objects.scatter().filter(id__gte=0).delete()
    assert rows_on_shards(Sample) == before
    # One statement deletes the parts on a shard, because no rows refer to them.
    Part.objects.scatter().filter(id__gte=0).delete()
    assert rows_on_shards(Part) == 0
    # On one shard, the server does what it does for Django.
    assert one_database(Sample).delete()[0] == 3


@pytest.mark.usefixtures("three_rows")
def test_an_update_whose_reads_a_server_cuts_is_refused() -> None:
    everywhere("INSERT INTO authors_book (id, author_id) VALUES (1, 7), (2, 7), (3, 7), (4, 7)")
    everywhere("INSERT INTO authors_novel (book_ptr_id) VALUES (1), (2), (3), (4)")
    novels = Novel.objects.scatter().filter(id__gte=0)
    try:
        # Django reads the ids of the novels whose books it updates.
        with pytest.raises(ScatterNotSupported, match="sql_select_limit is 3"):
            novels.update(editor=9)
        assert not any(Novel.objects.using(alias).filter(editor=9).exists() for alias in ALIASES)
        assert one_database(Novel).update(editor=9) == 3
        # One statement updates the novels of a shard.
        assert novels.update(translator=9) >= 4 * len(SHARDS)
    finally:
        everywhere("DELETE FROM authors_novel")
        everywhere("DELETE FROM authors_book")


@pytest.fixture
def short_sorts() -> Iterator[None]:
    """The servers sort texts by their first 64 bytes."""
    needs("mysql")
    aliases = (ALIASES[0], ALIASES[-1])
    everywhere("SET GLOBAL max_sort_length = 64", aliases)
    new_sessions()
    yield
    everywhere("SET GLOBAL max_sort_length = DEFAULT", aliases)
    new_sessions()


@pytest.mark.usefixtures("short_sorts")
def test_an_order_by_texts_that_a_server_cuts_is_refused() -> None:
    store([Sample(id=n, owner=n % 5, label="x" * 50 + str(9 - n)) for n in range(10)])
    samples = one_database(Sample)
    groups = samples.values("label").annotate(n=Count("id"))
    for refused in (samples.order_by("label", "id"), groups.order_by("label")):
        with pytest.raises(ScatterNotSupported, match="max_sort_length is below 1024"):
            fetch(refused)
    for queryset in (samples.order_by("id"), samples.order_by("number", "-id")[:3]):
        assert fetch(queryset) == list(queryset)
    assert aggregate(samples, x=Max("label")) == samples.aggregate(x=Max("label"))


STATE = {
    "mysql": ["LAST_INSERT_ID()", "ROW_COUNT()", "@x", "GET_LOCK('x', 0)"],
    "postgresql": ["lastval()", "set_config('a.b', 'c', false)", "pg_try_advisory_lock(1)"],
}


def test_the_state_of_a_session_is_refused() -> None:
    store(SAMPLES)
    samples = one_database(Sample)
    for call in STATE.get(connections[WHOLE].vendor, ()):
        state = Func(template=call.replace("%", "%%"), output_field=FloatField())
        with pytest.raises(SessionStateRefused, match="Remedy: ask one shard"):
            fetch(samples.annotate(x=state).order_by("id"))


TYPES = {
    "ENUM('z', 'a', 'm')": ("label", ["z", "a", "m"]),
    "SET('z', 'a', 'm')": ("label", ["z", "a", "a,m"]),
    "INET6": ("label", ["::1", "fe80::1", "10::"]),
    "FLOAT": ("ratio", [1.0000001, 1.0000002, 0.1]),
    "BIT(8)": ("number", [1, 200, 3]),
    # These are compared.
    "CHAR(5)": ("label", ["z", "a", "B "]),
    "VARBINARY(9)": ("label", ["z", "a", "A "]),
    "DECIMAL(9,3)": ("ratio", [1.5, 0.1, 3.335]),
    "YEAR": ("number", [2001, 1999, 2155]),
    "TIMESTAMP(6) NULL": ("at", [datetime(2026, 1, 1, 1, 1, 1, n, UTC) for n in (5, 1, 3)]),
}
COMPARED = {"CHAR(5)", "VARBINARY(9)", "DECIMAL(9,3)", "YEAR", "TIMESTAMP(6) NULL"}
ORIGINAL = {
    "label": "VARCHAR(60) NOT NULL",
    "ratio": "DOUBLE",
    "number": "INT",
    "at": "DATETIME(6)",
}
COMPARISONS: list[Callable[[QuerySet[Any], str], Any]] = [
    lambda samples, name: samples.order_by(name, "id"),
    lambda samples, name: samples.order_by("-" + name, "id").values_list("id", name)[2:9],
    lambda samples, name: samples.order_by(name).values_list(name).distinct(),
    lambda samples, name: samples.values(name).annotate(n=Count("id")).order_by(name),
    lambda samples, name: Count(name, distinct=True),
]


@pytest.mark.parametrize("kind", TYPES)
def test_types_that_a_merge_cannot_compare_are_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("mysql")
    monkeypatch.setattr(column_checks, "_checked", set())
    name, values = TYPES[kind]
    store([])
    everywhere(f"ALTER TABLE samples_sample MODIFY {name} {kind}")
    try:
        rows = [Sample(id=n, owner=n % 5, label="") for n in range(15)]
        for n, row in enumerate(rows):
            setattr(row, name, values[n % 3])
            row.label = row.label or values[0] if name == "label" else ""
        store(rows)
        samples = one_database(Sample)
        for build in COMPARISONS:
            asked = build(samples, name)
            if isinstance(asked, Count):
                one, many = samples.aggregate, lambda x: aggregate(samples, x=x)
            else:
                one, many = list, fetch
            if kind in COMPARED:
                expected = one(x=asked) if isinstance(asked, Count) else one(asked)
                assert many(asked) == expected
            else:
                with pytest.raises(ScatterNotSupported, match=f"{name}, whose type on the server"):
                    many(asked)
        unordered = samples.order_by("id").values_list("id", name)
        assert fetch(unordered) == list(unordered)
        if kind[:3] in ("ENU", "SET", "FLO"):
            converted = Cast(name, CharField() if name == "label" else FloatField())
            ordered = samples.order_by(converted, "id")
            assert fetch(ordered) == list(ordered)
    finally:
        everywhere("DELETE FROM samples_sample")
        everywhere(f"ALTER TABLE samples_sample MODIFY {name} {ORIGINAL[name]}")


@pytest.fixture
def enum_and_float(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows whose label is an ``ENUM`` and whose ratio is a ``FLOAT``."""
    needs("mysql")
    monkeypatch.setattr(column_checks, "_checked", set())
    store([])
    change = "ALTER TABLE samples_sample MODIFY label {}, MODIFY ratio {}"
    everywhere(change.format("ENUM('z', 'a', 'm')", "FLOAT"))
    store(
        [Sample(id=n, owner=n % 5, label="zam"[n % 3], ratio=1 + n % 7 / 2**23) for n in range(15)]
    )
    yield
    everywhere("DELETE FROM samples_sample")
    everywhere(change.format(ORIGINAL["label"], ORIGINAL["ratio"]))


def values_of_same_row(name: str) -> Subquery:
    return Subquery(Sample.objects.using(WHOLE).filter(pk=OuterRef("pk")).values(name)[:1])


@pytest.mark.usefixtures("enum_and_float")
@pytest.mark.parametrize(
    "expression",
    [
        ExpressionWrapper(F("label"), output_field=CharField()),
        ExpressionWrapper(F("ratio"), output_field=FloatField()),
        values_of_same_row("ratio"),
        Case(When(flag=True, then=F("ratio")), default=F("ratio")),
        Case(When(ratio=0.5, then=F("ratio"))),
        Coalesce("ratio", F("ratio")),
        NullIf("ratio", Value(0.5)),
    ],
    ids=str,
)
def test_expressions_of_a_type_that_a_merge_cannot_compare_are_refused(expression: Any) -> None:
    with pytest.raises(ScatterNotSupported, match="whose type on the server"):
        fetch(one_database(Sample).order_by(expression, "id"))
    with pytest.raises(ScatterNotSupported, match="whose type on the server"):
        fetch(one_database(Sample).annotate(x=expression).order_by("x", "id"))


@pytest.mark.usefixtures("enum_and_float")
@pytest.mark.parametrize(
    "expression",
    [
        Coalesce("label", Value("b")),
        values_of_same_row("label"),
        Greatest("label", Value("b")),
        F("ratio") * 1,
        Case(When(ratio__gt=1, then=Value(1)), default=Value(2)),
        Coalesce("ratio", 0.5),
        Coalesce(NullIf("ratio", Value(1.0)), Value(0.5)),
        Coalesce(Case(When(id__gt=3, then=F("ratio"))), Value(0.5)),
        Case(When(id__gt=3, then=F("ratio")), default=0.5),
        Case(When(id__gt=9, then=Value(0.5)), When(id__gt=3, then=F("ratio"))),
    ],
    ids=str,
)
def test_expressions_of_another_type_than_their_columns_are_compared(
    expression: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = one_database(Sample).order_by(expression, "id")
    assert fetch(samples) == list(samples)
    # The types are known now, so they are not read again.
    monkeypatch.delattr(type(connections[ALIASES[0]]), "column_types")
    assert fetch(samples) == list(samples)


@pytest.mark.usefixtures("enum_and_float")
def test_a_float_beside_a_float_of_four_bytes_is_compared_with_all_its_digits() -> None:
    samples = one_database(Sample).annotate(x=Coalesce(NullIf("ratio", Value(1.0)), 0.5))
    for build in COMPARISONS[:-1]:
        assert fetch(build(samples, "x")) == list(build(samples, "x"))
    for asked in (Count("x", distinct=True), Max("x"), Min("x")):
        assert aggregate(samples, n=asked) == samples.aggregate(n=asked)
    assert samples.aggregate(n=Count("x", distinct=True)) == {"n": 7}


def test_an_order_by_uuids_in_a_text_column_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the field with ``db_type()`` "char(32)" that Django's documentation recommends."""
    needs("mysql")
    if not connections[WHOLE].features.has_native_uuid_field:
        pytest.skip("the server has no type for UUIDs")
    monkeypatch.setattr(column_checks, "_checked", set())
    store([])
    everywhere("ALTER TABLE samples_sample MODIFY code CHAR(32)")
    try:
        store([Sample(id=n, owner=n % 5) for n in range(10)])
        everywhere("UPDATE samples_sample SET code = MD5(id % 4)")
        samples = one_database(Sample)
        with pytest.raises(ScatterNotSupported, match="whose type on the server is CHAR"):
            fetch(samples.order_by("code", "id"))
        cast = samples.order_by(Cast("code", CharField()), "id")
        assert fetch(cast) == list(cast)
        distinct = samples.values_list("code").distinct()
        assert set(fetch(distinct)) == set(distinct)
    finally:
        everywhere("DELETE FROM samples_sample")
        everywhere("ALTER TABLE samples_sample MODIFY code UUID")


def test_columns_are_checked_again_after_a_change_of_settings() -> None:
    needs("mysql")
    store(SAMPLES)
    samples = one_database(Sample).order_by("ratio", "id")
    assert fetch(samples) == list(samples)
    everywhere("ALTER TABLE samples_sample MODIFY ratio FLOAT")
    try:
        runtime.reset()
        with pytest.raises(ScatterNotSupported, match="whose type on the server is FLOAT"):
            fetch(samples)
    finally:
        everywhere("ALTER TABLE samples_sample MODIFY ratio DOUBLE")


def test_a_check_of_columns_joins_no_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_checks, "_checked", set())
    store(SAMPLES)
    group: Any = connections["photos"]
    with transaction.atomic("photos"):
        assert len(fetch(one_database(Sample).order_by("number", "id"))) == len(SAMPLES)
        if connections[WHOLE].vendor != "sqlite":  # Its connections are those of the shards.
            assert group.open_transactions() == frozenset()


def test_columns_with_different_collations_are_refused() -> None:
    needs("mysql")
    store([Sample(id=n, owner=n % 5, label="ab"[n % 2]) for n in range(10)])
    of_one_node = [alias for alias in ALIASES[:-1] if int(alias[-5:]) < 8]
    column = "ALTER TABLE samples_sample MODIFY label VARCHAR(60) COLLATE {} NOT NULL"
    everywhere(column.format("utf8mb4_bin"), of_one_node)
    try:
        for queryset in (
            one_database(Sample).order_by("label", "id"),
            one_database(Sample).values("label").annotate(n=Count("id")),
        ):
            with pytest.raises(ScatterNotSupported, match="utf8mb4_bin"):
                fetch(queryset)
        collated = one_database(Sample).order_by(Collate("label", "utf8mb4_bin"), "id")
        assert fetch(collated) == list(collated)
    finally:
        everywhere(column.format("utf8mb4_general_ci"), of_one_node)


def test_rows_with_a_type_of_each_schema_are_refused() -> None:
    needs("postgresql")
    store([])
    everywhere("CREATE TYPE mood AS ENUM ('z', 'a', '')")
    change = "ALTER TABLE samples_sample ALTER label TYPE {} USING label::text::{}"
    everywhere(change.format("mood", "mood"))
    try:
        everywhere("INSERT INTO samples_sample (id, owner, label) VALUES (1, 2, 'a')")
        samples = one_database(Sample).order_by("id")
        if plan.BATCH > 1:
            with pytest.raises(ScatterNotSupported, match="outside of the shards' schemas"):
                fetch(samples)
        cast = samples.annotate(mood=Cast("label", CharField())).values_list("mood", flat=True)
        assert fetch(cast) == ["a"] * len(SHARDS)
    finally:
        everywhere(change.format("varchar(60)", "varchar(60)"))
        everywhere("DROP TYPE mood")


@pytest.fixture
def usual_packets() -> Iterator[None]:
    """The servers take the packets that MariaDB takes by default: 16 MB."""
    needs("mysql")
    aliases = (ALIASES[0], ALIASES[-1])
    everywhere(f"SET GLOBAL max_allowed_packet = {2**24}", aliases)
    new_sessions()
    yield
    everywhere(f"SET GLOBAL max_allowed_packet = {2**26}", aliases)
    new_sessions()


@pytest.mark.usefixtures("usual_packets")
def test_a_long_text_does_not_make_a_statement_too_long() -> None:
    store(SAMPLES)
    text = "x" * 6_000_000
    samples = one_database(Sample).exclude(label=text).order_by("id")
    assert fetch(samples) == list(samples)
    assert scatter.count(samples, targets(samples)) == len(SAMPLES)
    filtered = one_database(Sample).filter(text__in=[text[n:] for n in range(2)])
    assert fetch(filtered) == []


@pytest.mark.parametrize("constant", [Value(Decimal("1.5")), Value(b"x"), Value(True), Value(7)])
def test_first_rows_ordered_by_a_constant(constant: Any) -> None:
    store(SAMPLES)
    queryset = one_database(Sample).annotate(constant=constant).order_by("-constant", "-id")[:4]
    assert [row.pk for row in fetch(queryset)] == [row.pk for row in queryset]


class Score(Func):
    """How well a text matches the word "red"."""

    template = "MATCH(%(expressions)s) AGAINST ('red' IN NATURAL LANGUAGE MODE)"
    output_field = FloatField()


def test_scores_of_a_full_text_search_are_refused() -> None:
    needs("mysql")
    store([])
    everywhere("ALTER TABLE samples_sample ADD FULLTEXT INDEX words (text)")
    try:
        texts = ["red " * (n % 3) + "blue " * (n % 7) + f"word{n}" for n in range(25)]
        store([Sample(id=n, owner=n % 5, text=text) for n, text in enumerate(texts)])
        samples = one_database(Sample).alias(score=Score("text"))
        matching = samples.filter(score__gt=0).order_by("id").values_list("id")
        assert len(fetch(matching)) == 16
        assert fetch(matching) == list(matching)
        for refused in (samples.order_by("-score"), samples.annotate(score=Score("text"))):
            with pytest.raises(ScatterNotSupported, match="score of a full-text search"):
                fetch(refused)
        with pytest.raises(ScatterNotSupported, match="score of a full-text search"):
            aggregate(one_database(Sample), best=Max(Score("text")))
    finally:
        everywhere("DELETE FROM samples_sample")
        everywhere("ALTER TABLE samples_sample DROP INDEX words")


CHANCE = {"mysql": "RAND", "postgresql": "random", "sqlite": "RANDOM"}


def test_functions_of_time_and_chance_are_refused_by_their_names() -> None:
    store(SAMPLES)
    samples = one_database(Sample)
    chance = Func(function=CHANCE[connections[WHOLE].vendor], output_field=FloatField())
    time = Func(template="CURRENT_TIMESTAMP", output_field=DateTimeField())
    for refused in (
        samples.order_by(chance),
        samples.order_by(time),
        samples.annotate(x=time).values_list("x").distinct(),
        samples.annotate(x=chance).values("x").annotate(n=Count("id")),
    ):
        with pytest.raises(ScatterNotSupported):
            fetch(refused)
    with pytest.raises(ScatterNotSupported, match="Now"):
        Sample.objects.scatter().update(at=time)
