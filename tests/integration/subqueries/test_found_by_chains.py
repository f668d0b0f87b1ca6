"""Chains of calls that random programs found to differ from one database, each in its smallest form."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models import (
    Avg,
    Case,
    CharField,
    Count,
    DecimalField,
    Exists,
    F,
    FilteredRelation,
    FloatField,
    Func,
    Max,
    OuterRef,
    Q,
    StdDev,
    Subquery,
    Sum,
    TextField,
    Value,
    When,
)
from django.db.models.expressions import RawSQL
from django.db.models.functions import Cast, Concat
from django.test.utils import CaptureQueriesContext

from sharded_orm import bound
from sharded_orm.exceptions import BoundKeyMismatch, CrossShardRelation, UnknownExpression
from tests.integration.subqueries.conftest import (
    DATABASES,
    PLAIN,
    SHARDED,
    Models,
    alias_of,
    store,
)
from tests.twins.models import Folder, PlainFolder, PlainSheet, Sheet, Trunk

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.usefixtures("placed", "forest"),
]

Program = Callable[[Models], Any]


def trunks(models: Models) -> Any:
    return models.everywhere(models.trunk.objects.all())


def twigs(models: Models) -> Any:
    return models.everywhere(models.twig.objects.all())


def same(program: Program) -> Any:
    """Run ``program`` on both sides, and return the result, which must be the same."""
    one, many = program(PLAIN), program(SHARDED)
    assert repr(many) == repr(one)
    return many


@pytest.fixture
def bushes(forest: None) -> None:
    """Trunks with two twigs each, and one without."""
    store(
        [(1, 0, 5), (2, 1, 6), (3, 2, None), (4, 8, 8)],
        [(10 + n, (0, 1, 2)[n % 3], None, n % 3, n % 3 + 1) for n in range(6)],
    )


def test_an_instance_of_another_shard_beside_a_condition_on_an_aggregate() -> None:
    def largest(models: Models, condition: Callable[[Any], Q]) -> Any:
        trunk = trunks(models).get(pk=1)
        rows = twigs(models).annotate(x=Max("n")).filter(condition(trunk))
        return list(rows.order_by("id").values_list("id", "x"))

    assert same(lambda m: largest(m, lambda t: Q(x__gt=3) | Q(parent=t))) == [(11, 1), (14, 4)]
    assert same(lambda m: largest(m, lambda t: ~(Q(x__gt=3) | Q(parent=t)))) == [(12, 2), (13, 3)]
    same(lambda m: largest(m, lambda t: Q(x__gt=3) ^ Q(parent=t.pk, owner=t.owner)))
    same(lambda m: twigs(m).annotate(x=Count("n")).exclude(Q(x=0) | Q(parent=1)).count())


@pytest.mark.usefixtures("bushes")
@pytest.mark.parametrize(
    "order",
    [
        ["twigs__n", "id"],
        ["twigs"],
        [F("twigs__n").desc(nulls_last=True), "id"],
        [Case(When(twigs__n__gt=1, then=1), default=2)],
        ["-n", "id"],
        ["id"],
    ],
)
def test_a_slice_counts_the_rows_that_its_order_joins(order: list[Any]) -> None:
    for part in (slice(2, None), slice(5, 9), slice(0, 6), slice(1, 3), slice(9, 12)):
        rows = [len(list(trunks(m).order_by(*order)[part])) for m in (PLAIN, SHARDED)]
        assert rows[0] == rows[1]
        assert same(lambda m, part=part: trunks(m).order_by(*order)[part].count()) == rows[0]  # type: ignore[misc]
        same(lambda m, part=part: trunks(m).order_by(*order)[part].exists())  # type: ignore[misc]
    same(lambda m: trunks(m).order_by(*order).count())


@pytest.mark.usefixtures("bushes")
def test_the_existence_of_rows_after_an_offset_does_not_depend_on_the_order() -> None:
    for low in range(8):
        same(lambda m, low=low: trunks(m).distinct().order_by("twigs__n")[low:].exists())  # type: ignore[misc]
        same(
            lambda m, low=low: (  # type: ignore[misc]
                trunks(m)
                .values("owner")
                .annotate(x=Count("id"))
                .order_by("twigs__n")[low:]
                .exists()
            )
        )


def test_the_existence_of_groups_after_an_offset_depends_on_their_keys_only() -> None:
    for low in range(8):
        same(
            lambda m, low=low: (  # type: ignore[misc]
                trunks(m).values("owner").annotate(x=Count("id")).values("n", "x")[low:].exists()
            )
        )


def test_a_count_of_distinct_rows_leaves_out_selected_relations() -> None:
    for folder, sheet in ((PlainFolder, PlainSheet), (Folder, Sheet)):
        for owner in (0, 1, 2):
            rows = folder.objects.create(id=owner + 1, owner=owner)
            sheet.objects.create(id=owner + 1, owner=owner, folder=rows)
    both = [
        rows.annotate(z=FilteredRelation("folder", condition=Q(folder__id=1)))
        .select_related("z")
        .distinct()
        .order_by("id")
        for rows in (PlainSheet.objects.all(), Sheet.objects.scatter())
    ]
    # Django's statement for the rows leaves out those without the relation, that for their number does not.
    assert [len(rows) for rows in both] == [1, 1]
    assert [rows.all().count() for rows in both] == [3, 3]
    assert [rows.all()[1:].count() for rows in both] == [2, 2]
    assert [rows.all()[1:].exists() for rows in both] == [False, False]


def test_distinct_rows_in_an_order_whose_type_django_does_not_know() -> None:
    mixed = Concat(Cast("n", TextField()), Value("%s"), Cast("owner", CharField(max_length=9)))
    expected = [1, 2, 4]
    rows = same(lambda m: list(trunks(m).distinct().order_by(mixed, "id").values_list("id", "n")))
    assert [pk for pk, _ in rows if pk != 3] == expected
    same(lambda m: [row.pk for row in trunks(m).distinct().order_by(mixed.desc(), "id")])


class OwnSQL(Func):
    """An expression that the library does not know."""

    function = "ABS"

    def as_sql(self, *args: Any, **kwargs: Any) -> Any:
        return super().as_sql(*args, **kwargs)


#: Annotations that a query of several shards, or of one, cannot select.
UNUSED: list[Callable[[Models], Any]] = [
    lambda m: Subquery(m.trunk.objects.filter(owner=1).values("n")[:1]),
    lambda m: Subquery(m.everywhere(m.trunk.objects.all()).values("n")[:1]),
    lambda m: Exists(m.trunk.objects.filter(owner=1, n=6)),
    lambda m: Case(When(parent=trunks(m).get(pk=2), then=1), default=0),
    lambda m: RawSQL("(SELECT 1)", []),
    lambda m: OwnSQL("n"),
]


@pytest.mark.parametrize("unused", UNUSED)
def test_a_count_leaves_out_annotations_that_do_not_matter(
    unused: Callable[[Models], Any],
) -> None:
    for rows in (twigs, lambda m: m.twig.objects.filter(owner=0)):
        for how in ("annotate", "alias"):

            def annotated(m: Models, rows: Any = rows, how: str = how) -> Any:
                return getattr(rows(m), how)(x=unused(m))

            same(lambda m, of=annotated: of(m).order_by("x").count())  # type: ignore[misc]
            same(lambda m, of=annotated: of(m).order_by("x").exists())  # type: ignore[misc]
            same(lambda m, of=annotated: of(m).values("id").filter(n__gt=1).count())  # type: ignore[misc]
            same(lambda m, of=annotated: of(m).order_by("id")[:2].exists())  # type: ignore[misc]
            same(lambda m, of=annotated: of(m).distinct().exists())  # type: ignore[misc]
        same(lambda m, rows=rows: rows(m).alias(x=unused(m)).order_by("id")[1:].count())  # type: ignore[misc]
        same(lambda m, rows=rows: len(rows(m).alias(x=unused(m)).order_by("id")))  # type: ignore[misc]


@pytest.mark.parametrize("unused", UNUSED)
def test_an_annotation_that_matters_for_a_count_is_checked(
    unused: Callable[[Models], Any],
) -> None:
    rows = twigs(SHARDED).alias(x=unused(SHARDED))
    for found in (
        rows.filter(x=1),
        rows.order_by("x")[1:3],
        rows.order_by("-x", "id")[:1],
        rows.order_by(F("x").desc())[1:],
        rows.annotate(y=F("x")).distinct(),
        rows.annotate(y=F("x")).values("y").annotate(z=Count("id")),
    ):
        with pytest.raises((CrossShardRelation, UnknownExpression)):
            found.count()
    for found in (rows.filter(x=1), rows.annotate(y=F("x")), rows.order_by("x")):
        with pytest.raises((CrossShardRelation, UnknownExpression)):
            list(found)


def of_first_owner(models: Models) -> Any:
    return models.twig.objects.filter(owner=0)


@pytest.mark.parametrize("unused", UNUSED)
def test_an_aggregate_leaves_out_annotations_that_do_not_matter(
    unused: Callable[[Models], Any],
) -> None:
    for rows in (twigs, of_first_owner):

        def annotated(m: Models, rows: Any = rows) -> Any:
            return rows(m).annotate(x=unused(m), y=F("n") + 1)

        for aggregates in (
            {"a": Count("*")},
            {"a": Sum("n"), "b": Max("y"), "c": Avg(F("y") * 2)},
            {"a": Count("y", filter=Q(n__gt=1))},
        ):
            same(lambda m, of=annotated, a=aggregates: of(m).aggregate(**a))  # type: ignore[misc]
            same(lambda m, of=annotated, a=aggregates: of(m).order_by("x").aggregate(**a))  # type: ignore[misc]
            same(lambda m, of=annotated, a=aggregates: of(m).filter(n__gt=1).aggregate(**a))  # type: ignore[misc]
    sums = {"a": Sum("n"), "b": F("a") + Max("n")}
    same(lambda m: of_first_owner(m).annotate(x=unused(m)).aggregate(**sums))
    same(lambda m: of_first_owner(m).alias(x=unused(m)).order_by("id")[:2].aggregate(Sum("n")))


@pytest.mark.parametrize("unused", UNUSED)
def test_an_annotation_that_matters_for_an_aggregate_is_checked(
    unused: Callable[[Models], Any],
) -> None:
    for rows in (twigs(SHARDED), of_first_owner(SHARDED)):
        annotated = rows.annotate(x=unused(SHARDED))
        for aggregates in (
            {"a": Max("x")},
            {"a": Count("id"), "b": Sum(F("x") + 1)},
            {"a": Max("n", filter=Q(x=1))},
        ):
            with pytest.raises((CrossShardRelation, UnknownExpression)):
                annotated.aggregate(**aggregates)
        for found in (
            annotated.filter(x=1),
            annotated.order_by("x")[:1],
            annotated.distinct(),
            annotated.annotate(y=F("x")).values("y").annotate(z=Count("id")),
        ):
            with pytest.raises((CrossShardRelation, UnknownExpression)):
                found.aggregate(a=Count("id"))


def test_an_annotation_beside_the_subquery_of_an_aggregate_is_checked() -> None:
    """Django then aggregates the rows of a subquery, which has the other annotations."""

    def read(m: Models, unused: Any) -> Any:
        on_shard = Exists(m.trunk.objects.filter(pk=OuterRef("parent"), owner=0))
        return of_first_owner(m).annotate(x=unused, y=on_shard).aggregate(a=Count("y"))

    for unknown in (OwnSQL("n"), RawSQL("(SELECT 1)", [])):
        with (
            CaptureQueriesContext(connections[alias_of(0)]) as sent,
            pytest.raises(UnknownExpression),
        ):
            read(SHARDED, unknown)
        assert not sent.captured_queries
    same(lambda m: read(m, F("n")))
    same(lambda m: read(m, Subquery(m.trunk.objects.filter(owner=1).values("n")[:1])))


@pytest.mark.parametrize("unused", UNUSED)
def test_the_order_of_an_update_is_checked(unused: Callable[[Models], Any]) -> None:
    """An UPDATE of MariaDB and MySQL has an ORDER BY."""
    rows = SHARDED.twig.objects.filter(owner=0)
    row = SHARDED.twig.objects.create(id=1, owner=0, n=1, ref=1)
    for ordered in (
        rows.alias(x=unused(SHARDED)).order_by("x"),
        rows.order_by(unused(SHARDED)),
    ):
        with pytest.raises((CrossShardRelation, UnknownExpression)):
            ordered.update(n=3)
        with pytest.raises((CrossShardRelation, UnknownExpression)):
            ordered.bulk_update([row], ["n"])


@pytest.mark.parametrize("unused", UNUSED)
def test_an_alias_after_values_is_checked_if_it_is_selected(
    unused: Callable[[Models], Any],
) -> None:
    def found(m: Models) -> Any:
        return twigs(m).order_by("id").values("id").alias(x=unused(m))

    same(lambda m: [row["id"] for row in found(m)])
    rows = found(SHARDED)
    rows.query.selected["x"] = "x"  # As alias() of Django 5.2.0 does.
    with pytest.raises((CrossShardRelation, UnknownExpression)):
        list(rows)


def test_a_count_of_groups_computes_no_aggregates_that_do_not_matter() -> None:
    largest = 2**63 - 1
    store([], [(1, 0, largest, 1, None), (2, 0, largest, 1, None), (3, 1, largest, 1, None)])
    for group in ("owner", "n", "id"):
        for total in (Sum("ref"), Sum("ref") * 10, StdDev("ref")):
            same(lambda m, g=group, t=total: twigs(m).values(g).annotate(x=t).count())  # type: ignore[misc]
            same(lambda m, g=group, t=total: twigs(m).values(g).annotate(x=t).exists())  # type: ignore[misc]
    same(lambda m: twigs(m).annotate(x=Sum("ref"), y=Count("id")).filter(y=1).count())
    same(lambda m: twigs(m).values("n").annotate(x=StdDev("ref"), y=Count("id")).count())
    same(lambda m: twigs(m).values("owner").annotate(x=Sum("id")).filter(x__gt=2)[:1].count())


#: Django cannot order by a bare condition, and reports this if the statement has an ORDER BY.
BY_CONDITION: list[Callable[[], Any]] = [lambda: Q(n=2), lambda: ~Q(parent__n=5)]


@pytest.mark.parametrize("order", BY_CONDITION)
def test_an_order_by_a_condition(order: Callable[[], Any]) -> None:
    for rows in (twigs, lambda m: m.twig.objects.filter(owner=0)):

        def ordered(m: Models, rows: Any = rows) -> Any:
            return rows(m).order_by(order(), "id")

        for read in (
            lambda found: found.count(),
            lambda found: found.exists(),
            lambda found: found[1:].exists(),
            lambda found: found.distinct()[:1].exists(),
            lambda found: found.aggregate(Max("n")),
        ):
            same(lambda m, read=read, of=ordered: read(of(m)))  # type: ignore[misc]
        for read in (list, lambda found: found.first(), lambda found: found[1:].count()):
            for models in (PLAIN, SHARDED):
                with pytest.raises(AttributeError, match="asc"):
                    read(ordered(models))
        if connections["events_00000"].vendor == "mysql":  # Its UPDATE has an ORDER BY.
            for models, alias in ((PLAIN, "default"), (SHARDED, "events")):
                with pytest.raises(AttributeError, match="asc"), transaction.atomic(alias):
                    ordered(models).update(n=7)
        else:
            same(lambda m, of=ordered: of(m).update(n=7))  # type: ignore[misc]
            same(lambda m, of=ordered: of(m).exclude(n=7).exists())  # type: ignore[misc]


#: A key that no row has, on a shard that is not asked; and conditions on which no shard is asked.
NO_ROWS: list[Callable[[Models], Any]] = [
    lambda m: m.trunk.objects.filter(owner__in=[0, 1], n=77),
    lambda m: m.trunk.objects.filter(owner=0).filter(owner=1),
    lambda m: m.twig.objects.filter(owner=0, parent=trunks(m).get(pk=2)),
    lambda m: trunks(m).filter(n=77),
    lambda m: trunks(m).filter(pk__in=[]),
    lambda m: trunks(m).filter(Q(pk__in=[]) | Q(n__in=[None])),
    lambda m: trunks(m).filter(pk__in=m.trunk.objects.none()),
    lambda m: trunks(m).filter(n=10**30),
    lambda m: trunks(m).exclude(~Q(pk__in=[])),
]


@pytest.mark.parametrize("rows", NO_ROWS)
@pytest.mark.parametrize(
    "aggregate",
    [
        Sum("n", default=1.5),
        Sum("n", default=0),
        Avg(Cast("n", FloatField()), default=Value(2)),
        Sum(Cast("n", FloatField()), default=0),
        Sum(Cast("n", FloatField()), default=0, distinct=True),
        Sum(Cast("n", DecimalField(max_digits=9, decimal_places=2)), default=Decimal(3)),
        Sum(Cast("n", DecimalField(max_digits=9, decimal_places=2)), default=0),
        Max("n", default=7),
        Max("n"),
        Count("n"),
    ],
)
def test_a_default_of_an_aggregate_has_the_type_that_the_database_gives(
    rows: Callable[[Models], Any], aggregate: Any
) -> None:
    one, many = (rows(models).aggregate(x=aggregate)["x"] for models in (PLAIN, SHARDED))
    assert many == one
    assert type(many) is type(one)


def test_a_combination_with_a_scatter_says_what_to_do() -> None:
    everywhere, one = Trunk.objects.scatter(), Trunk.objects.filter(owner=0)
    for left, right in ((everywhere, one), (one, everywhere)):
        with pytest.raises(BoundKeyMismatch, match=r"scatter\(\) on both"):
            _ = left | right
    assert sorted(row.pk for row in everywhere | one.scatter()) == [1, 2, 3, 4]
    with bound(owner=0):
        inside = Trunk.objects.all()
    with pytest.raises(BoundKeyMismatch, match="inside the same block"):
        _ = inside | one


#: Conditions on an instance in an XOR. The last two compare a column that is never NULL there.
IN_XOR: list[Callable[[Any], Q]] = [
    lambda t: ~Q(parent=t) ^ Q(n=2),
    lambda t: Q(parent=t) ^ Q(n=2),
    lambda t: Q(n=2) ^ (Q(parent__in=[t, 2]) | Q(n=3)),
    lambda t: ~(~Q(parent=t) ^ Q(n=2)),
    lambda t: Q(parent=t, parent__isnull=False) ^ Q(n=2),
    lambda t: ~Q(parent=t, parent__isnull=False) ^ Q(n=2),
]


@pytest.fixture
def loose_twig(forest: None) -> None:
    """A twig without a trunk, on another shard than trunk 1."""
    store([(1, 0, 5), (2, 1, 6)], [(11, 0, 2, 1, 1), (12, 1, 3, 2, 2), (13, 1, 4, 2, None)])


@pytest.mark.usefixtures("loose_twig")
@pytest.mark.parametrize("condition", IN_XOR)
@pytest.mark.parametrize("aggregate", [False, True])
@pytest.mark.parametrize("owners", [None, 1])
def test_an_xor_that_compares_with_an_instance_of_another_shard_is_refused(
    condition: Callable[[Any], Q], aggregate: bool, owners: int | None
) -> None:
    rows = twigs(SHARDED) if owners is None else twigs(SHARDED).filter(owner=owners)
    xor = condition(trunks(SHARDED).get(pk=1))
    if aggregate:
        rows, xor = rows.annotate(x=Max("n")), xor ^ Q(x=7)
    for found in (rows.filter(xor), rows.exclude(xor)):
        for read in (list, lambda found: found.count(), lambda found: found.exists()):
            with pytest.raises(CrossShardRelation, match=r"XOR.*shard key"):
                read(found)


@pytest.mark.usefixtures("loose_twig")
def test_the_remedy_for_an_xor_with_an_instance() -> None:
    def program(models: Models, how: str) -> list[int]:
        trunk = trunks(models).get(pk=1)
        rows = getattr(twigs(models), how)(~Q(parent=trunk.pk, owner=trunk.owner) ^ Q(n=2))
        return sorted(rows.values_list("id", flat=True))

    same(lambda m: program(m, "filter"))
    same(lambda m: program(m, "exclude"))


@pytest.mark.usefixtures("loose_twig")
def test_an_xor_of_a_query_of_the_shard_of_the_instance() -> None:
    for owner in (0, 8):
        for condition in IN_XOR:
            for how in ("filter", "exclude"):
                same(
                    lambda m, owner=owner, condition=condition, how=how: sorted(  # type: ignore[misc]
                        getattr(twigs(m).filter(owner=owner), how)(
                            condition(trunks(m).get(pk=1))
                        ).values_list("id", flat=True)
                    )
                )


@pytest.mark.usefixtures("loose_twig")
@pytest.mark.parametrize("condition", IN_XOR)
def test_an_xor_with_an_instance_of_another_shard_on_a_named_shard(
    condition: Callable[[Any], Q],
) -> None:
    trunk = trunks(SHARDED).get(pk=1)
    home = trunk._state.db
    (elsewhere,) = {row._state.db for row in twigs(SHARDED).filter(owner=1)}
    assert elsewhere != home
    rows = SHARDED.twig.objects.using(elsewhere)
    xor = condition(trunk)
    for found in (rows.filter(xor), rows.exclude(xor), rows.filter(Q(owner=1) & (Q(n=9) | xor))):
        for call in (
            list,
            lambda found: found.count(),
            lambda found: found.exists(),
            lambda found: found.aggregate(Max("n")),
            lambda found: found.update(n=5),
            lambda found: found.delete(),
            lambda found: list(rows.filter(pk__in=found)),
        ):
            with (
                pytest.raises(CrossShardRelation, match=r"XOR.*shard key"),
                transaction.atomic(elsewhere),
            ):
                call(found)
    for how in ("filter", "exclude"):
        one, many = (
            getattr(models.twig.objects.filter(owner__in=[0, 8]), how)
            for models in (PLAIN, SHARDED)
        )
        expected = sorted(one(condition(trunks(PLAIN).get(pk=1))).values_list("id", flat=True))
        assert sorted(many(xor).using(home).values_list("id", flat=True)) == expected


@pytest.mark.usefixtures("loose_twig")
def test_an_xor_of_two_querysets_on_a_named_shard() -> None:
    trunk = trunks(SHARDED).get(pk=1)
    (elsewhere,) = {row._state.db for row in twigs(SHARDED).filter(owner=1)}
    rows = SHARDED.twig.objects.using(elsewhere)
    with pytest.raises(CrossShardRelation, match=r"XOR.*shard key"):
        list(rows.exclude(parent=trunk) ^ rows.filter(n=2))
