"""Plans of models with columns of all types, and of global models: the same results as Django's."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from django.db import connections
from django.db.models import F
from django.test.utils import CaptureQueriesContext
from django.utils.functional import lazystr

from sharded_orm.models.querysets.plans import without_plans
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, START, TWO
from tests.queries.test_plans import SELECTIONS
from tests.queries.twins import World, comparable_value, rolled_back
from tests.relatives.sharded.models import Agent, Memo
from tests.samples.models import Sample

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]

PROGRAMS = 150
NAIVE = datetime(2026, 1, 2, 3, 4, 5)
#: Values of each kind, of which some fit the columns.
VALUES: list[Callable[[], Any]] = [
    *[lambda value=value: value for value in (0, 1, 2, 7, -1, 2**31, 2**70, True, False, None)],
    *[lambda value=value: value for value in ("a", "é", "", "1", "2026-01-02", "true", "x" * 99)],
    *[lambda value=value: value for value in (1.5, float("nan"), Decimal("1.50"), Decimal("NaN"))],
    *[lambda value=value: value for value in (date(2026, 1, 2), NAIVE, START, time(3, 4), b"ab")],
    lambda: NAIVE.replace(tzinfo=UTC),
    lambda: timedelta(days=1),
    lambda: UUID(int=7),
    lambda: str(UUID(int=7)),
    lambda: lazystr("a"),
    lambda: {"a": 1},
    lambda: F("number"),
    *[lambda value=value: list(value) for value in ([], [1, 2], [1, 1], ["a", "b"], [None], [1, "a"])],
    *[lambda value=value: set(value) for value in ([True], [UUID(int=7)], [date(2026, 1, 2)], [1.5])],
    lambda: (START, NAIVE),
]  # fmt: skip
COLUMNS = [
    "id", "name", "label", "text", "number", "price", "ratio", "flag", "day", "at", "clock", "took",
    "code", "data", "blob",
]  # fmt: skip
LOOKUPS = [
    "",
    "",
    "",
    "__exact",
    "__in",
    "__in",
    "__isnull",
    "__gt",
    "__lte",
    "__iexact",
    "__range",
]
ENDS: list[Callable[[Any], Any]] = [
    list, list, list, lambda rows: rows.count(), lambda rows: rows.exists(), lambda rows: rows.first(),
    lambda rows: rows.get(), lambda rows: list(rows[1:3]), lambda rows: list(rows.values()),
    lambda rows: list(rows.order_by("-id").values_list()),
]  # fmt: skip


def value_for(name: str, value: Callable[[], Any]) -> Any:
    """Return the value. For bytes, a number is their count, and no server takes two gigabytes."""
    made = value()
    return 7 if name.startswith("blob") and made == 2**31 else made


class ColumnProgram:
    """A random chain of calls on one model, the same for each run of one seed."""

    def __init__(self, seed: int, start: Callable[[], Any], columns: list[str]) -> None:
        self._seed, self._start, self._columns = seed, start, columns

    def _name(self, pick: random.Random) -> str:
        return pick.choice(self._columns) + pick.choice(LOOKUPS)

    def __call__(self) -> Any:
        pick = random.Random(self._seed)
        rows = self._start()
        for _ in range(pick.randrange(1, 4)):
            choice = pick.random()
            if choice < 0.3:
                names = pick.sample(self._columns, pick.randrange(4))
                rows = pick.choice(SELECTIONS)(rows, tuple(names))
            else:
                conditions = {}
                for _ in range(pick.randrange(1, 3)):
                    name = self._name(pick)
                    conditions[name] = value_for(name, pick.choice(VALUES))
                rows = (rows.filter if choice < 0.7 else rows.exclude)(**conditions)
        return pick.choice(ENDS)(rows)


def outcome(call: Callable[[], Any], alias: str) -> tuple[Any, list[str]]:
    """Return the result or the error of ``call``, and the statements that it has sent."""
    value: Any
    # PostgreSQL runs nothing in a transaction after an error.
    errors_end = connections["default"].vendor == "postgresql"
    with (
        rolled_back() if errors_end else nullcontext(),
        CaptureQueriesContext(connections[alias]) as sent,
    ):
        try:
            value = repr(comparable_value(call()))
        except (Exception, Warning) as exc:
            value = (type(exc), str(exc))
    # Bytes for a UUID become the text of a memoryview, with its address.
    statements = [re.sub("(?<=<memory at )0x[0-9a-f]+", "", str(query["sql"])) for query in sent]
    return value, sorted(text for text in statements if "SAVEPOINT" not in text)


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


PARTS = [0, *[pytest.param(n, marks=pytest.mark.long) for n in range(1, 20)]]


@pytest.mark.parametrize("part", PARTS)
def test_random_chains_of_all_columns(part: int, samples: None) -> None:
    def start() -> Any:
        return Sample.objects.filter(owner=ONE)

    _compare(part, start, COLUMNS, SHARD[ONE])


@pytest.mark.parametrize("part", PARTS)
def test_random_chains_of_a_global_model(part: int, items: World) -> None:
    columns = ["pk", "name", "stars", "posted_at", "owner", "owner_id", "content_type", "object_id"]
    _compare(part, Memo.objects.all, columns, "default")


def _compare(part: int, start: Callable[[], Any], columns: list[str], alias: str) -> None:
    for seed in range(part * PROGRAMS, (part + 1) * PROGRAMS):
        program = ColumnProgram(seed, start, columns)
        with without_plans():
            expected = outcome(program, alias)
        for _ in range(4):
            assert outcome(program, alias) == expected, seed


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
    for lookup in sorted(set(LOOKUPS)):
        for method in ("filter", "exclude"):

            def read(value: Callable[[], Any]) -> Any:
                rows = getattr(Sample.objects.filter(owner=ONE), method)  # noqa: B023
                name = column + lookup  # noqa: B023
                return list(rows(**{name: value_for(name, value)}).values_list("id"))

            with without_plans():
                expected = [outcome(partial(read, value), SHARD[ONE]) for value in VALUES]
            for _ in range(3):
                found = [outcome(partial(read, value), SHARD[ONE]) for value in VALUES]
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
        expected = outcome(read, "default")
    for _ in range(3):
        assert outcome(read, "default") == expected
    request.getfixturevalue("nothing_is_compiled")
    assert outcome(read, "default") == expected
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
