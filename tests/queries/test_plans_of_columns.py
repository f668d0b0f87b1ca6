"""Plans of models with columns of all types, and of global models: the same results as Django's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from itertools import chain
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis.strategies import SearchStrategy

from sharded_orm.models.querysets.plans import without_plans
from tests.queries.chains import Chain, Comparison, as_many, count_of_uses, shown_outcome
from tests.queries.chains_of_columns import (
    COLUMNS,
    LOOKUPS,
    NAIVE,
    chains_of_memos,
    chains_of_samples,
    small_chains_of_memos,
    small_chains_of_samples,
    value_of,
    values_of,
)
from tests.queries.conftest import DATABASES, NEAR, ONE, START, TWO
from tests.queries.twins import World
from tests.relatives.sharded.models import Agent, Memo
from tests.samples.models import Sample

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]


@pytest.fixture
def samples(placed: None) -> None:
    for number in range(5):
        is_null = number == 4
        Sample.objects.create(
            id=number, owner=ONE, name=None if is_null else "aAbé"[number], label=str(number % 2),
            text="a" * number, number=None if is_null else number % 3, price=Decimal("1.50"),
            ratio=1.5, flag=(None, True, False)[number % 3], day=date(2026, 1, 1 + number),
            at=START + timedelta(days=number), clock=time(3, 4), took=timedelta(days=1),
            code=UUID(int=6 + number), data={"a": number}, blob=b"ab",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("chains", "rows", "examples"),
    [
        (small_chains_of_samples, "samples", 18),
        (chains_of_samples, "samples", 12),
        (small_chains_of_memos, "items", 10),
        (chains_of_memos, "items", 10),
    ],
)
def test_random_chains(
    chains: Callable[[], SearchStrategy[list[Chain]]],
    rows: str,
    examples: int,
    request: pytest.FixtureRequest,
    pytestconfig: pytest.Config,
) -> None:
    request.getfixturevalue(rows)
    compare = Comparison()

    @as_many(examples, pytestconfig)
    @given(chains())
    def same(chains: list[Chain]) -> None:
        compare(chains, count_of_uses)

    same()
    assert compare.share("used") > 0.1
    assert compare.share("results") > 0.2


#: The columns that are tried in each run; others in long runs.
ROUTINE = ("owner", "number", "flag", "at")


@pytest.mark.parametrize(
    "column",
    [
        pytest.param(name, marks=[] if name in ROUTINE else pytest.mark.long)
        for name in ("owner", *COLUMNS)
    ],
)
def test_the_plan_of_one_value_is_not_used_for_another(column: str, samples: None) -> None:
    """Values of all kinds take turns with each lookup."""
    for lookup in sorted({*LOOKUPS} - {"__exact"}):  # which is that without a name
        for method in ("filter", "exclude"):

            def read(value: Chain) -> Any:
                rows = getattr(Sample.objects.filter(owner=ONE), method)  # noqa: B023
                return list(rows(**{column + lookup: value()}).values_list("id"))  # noqa: B023

            values = [
                value_of(source) for source in dict.fromkeys(chain(*values_of(column, lookup)))
            ]
            with without_plans():
                expected = [shown_outcome(partial(read, value)) for value in values]
            for _ in range(3):
                found = [shown_outcome(partial(read, value)) for value in values]
                assert found == expected, (lookup, method)


READS: dict[str, Callable[[], Any]] = {
    "get": lambda: Memo.objects.get(pk=71),
    "get of nothing": lambda: Memo.objects.get(pk=999),
    "by a relation": lambda: list(Memo.objects.filter(owner=Agent(pk=ONE)).order_by("-pk")[:2]),
    "a list": lambda: list(Memo.objects.filter(pk__in=[71, 73]).values_list("name", flat=True)),
    "exists": lambda: Memo.objects.exclude(stars=2).exists(),
    "count": lambda: Memo.objects.count(),
    "first": lambda: Memo.objects.filter(object_id=None).first(),
    "a database": lambda: list(Memo.objects.using("default").filter(stars__lt=2)),
    "a related manager": lambda: list(Agent(pk=ONE).memos.values_list("name")),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_of_a_global_model_compiles_nothing(
    name: str, items: World, request: pytest.FixtureRequest
) -> None:
    read = READS[name]
    with without_plans():
        expected = shown_outcome(read)
    for _ in range(3):
        assert shown_outcome(read) == expected
    request.getfixturevalue("nothing_is_compiled")
    assert shown_outcome(read) == expected
    assert len(expected[1]) == 1


def test_booleans_have_shapes_of_their_own(samples: None) -> None:
    for _ in range(4):
        rows = Sample.objects.filter(owner=ONE)
        for flag in (True, False, None):
            matching = [row.pk for row in rows if row.flag is flag]
            assert [row.pk for row in rows.filter(flag=flag)] == matching
            assert rows.exclude(flag=flag).count() == 5 - len(matching)
        assert rows.filter(number=True).count() == rows.filter(number=1).count() == 1


def test_rows_of_two_keys_keep_their_shards(samples: None) -> None:
    for key in (NEAR, TWO):
        Sample.objects.create(id=10 + key, owner=key, flag=True)
    for _ in range(4):
        for key in (ONE, NEAR, TWO):
            numbers = Sample.objects.filter(owner=key, id__in=[1, 12, 13]).values_list(
                "id", flat=True
            )
            assert list(numbers) == {ONE: [1], NEAR: [13], TWO: [12]}[key]


def test_a_time_without_a_time_zone_warns_once_for_each_use(samples: None) -> None:
    for _ in range(4):
        with pytest.warns(RuntimeWarning, match="naive datetime") as warned:
            Sample.objects.filter(owner=ONE, at=NAIVE).exists()
        assert len(warned) == 1
