"""Reads by a lookup use plans, and return what they return without plans."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections
from django.db.models.sql.compiler import SQLCompiler
from django.test.utils import CaptureQueriesContext

from sharded_orm.contrib.lookups import entries, key_source
from sharded_orm.models.querysets.plans import without_plans
from sharded_orm.models.sharding import key_sources
from sharded_orm.models.sharding.query import ShardedQuery
from tests.finders.models import Account, Member
from tests.queries.conftest import DATABASES, ONE, TWO

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

PROGRAMS = 150
READS: dict[str, Callable[[], Any]] = {
    "get by a unique lookup": lambda: Account.objects.get(email="ada@x").id,
    "get by two lookups": lambda: Account.objects.get(serial=7, email="bob@x").id,
    "get by a lookup that is not unique": lambda: Account.objects.get(serial=8).id,
    "a list": lambda: [row.id for row in Account.objects.filter(serial=8, id__gt=0).order_by("id")],
    "a list of no rows": lambda: list(Account.objects.filter(email="nobody@x")),
    "exists": lambda: Account.objects.filter(email="bob@x").exists(),
    "count": lambda: Account.objects.filter(serial=8).count(),
    "count of no rows": lambda: Account.objects.filter(serial=999).count(),
    "first": lambda: Account.objects.filter(email="ada@x").first(),
    "entries on shards": lambda: Member.objects.get(email="ada@x").id,
}
VALUES: dict[str, list[Any]] = {
    "email": ["ada@x", "bob@x", "ADA@x", "nobody@x", "", "x" * 300, 7, None],
    "serial": [7, 8, 9, "7", "x", 2**31, 2**63, -1, True],
    "id": [1, 2, 3, 2**63],
    "id__gte": [0, 2],
    "note": ["", "n"],
    "user_id": [ONE, TWO],
    "email__in": [["ada@x"], ["ada@x", "bob@x"], [], [None]],
    "serial__in": [[7], (8, 7, 7), {9}],
    "note__isnull": [True, False],
}
EXCLUDED: list[dict[str, Any]] = [
    {"note": "n"}, {"id": 1}, {"email": "ada@x"}, {"serial": 7, "note": ""}, {"serial__in": [7, 8]}, {"id": None},
]  # fmt: skip


@pytest.fixture
def rows(accounts: Any) -> Any:
    Account.objects.create(id=3, user_id=TWO, serial=8)
    Member.objects.create(id=1, user_id=ONE, email="ada@x")
    return accounts


def forget_keys() -> None:
    for source in key_sources._sources:
        if isinstance(source, key_source.EntryKeySource):
            source._remembered.clear()


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("is_remembered", [True, False])
def test_the_third_read_by_a_lookup_compiles_nothing(
    name: str, is_remembered: bool, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = READS[name]
    with without_plans():
        expected = read()
    for _ in range(3):
        assert read() == expected

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("This read has compiled its query.")

    if not is_remembered:
        forget_keys()
    monkeypatch.setattr(SQLCompiler, "as_sql", refuse)
    monkeypatch.setattr(ShardedQuery, "add_q", refuse)
    assert read() == expected


def outcome(read: Callable[[], Any], *, remembers: bool) -> Any:
    if not remembers:
        forget_keys()
    with CaptureQueriesContext(connections["default"]) as sent:
        try:
            result = read()
        except Exception as exc:
            result = type(exc), str(exc)
    return result, len(sent)


def program(seed: int) -> Any:
    pick = random.Random(seed)
    names = pick.sample(sorted(VALUES), pick.choice([1, 1, 2, 3]))
    found = Account.objects.filter(**{name: pick.choice(VALUES[name]) for name in names})
    if pick.random() < 0.3:
        found = found.exclude(**pick.choice(EXCLUDED))
    if pick.random() < 0.5:
        found = found.order_by(*pick.choice([("id",), ("-serial", "id")]))
    end = pick.choice(["rows", "page", "exists", "count", "get", "first", "values"])
    if end == "values":
        return sorted(found.values_list("id", "email"))
    if end == "page":
        start = pick.randrange(2)
        return [row.id for row in found.order_by("id")[start : start + 1]]
    if end == "rows":
        return sorted((row.id, row.user_id, row._state.db) for row in found)
    result = getattr(found, end)()
    return result.id if isinstance(result, Account) else result


@pytest.mark.parametrize("seed", range(0, PROGRAMS, 50))
def test_random_reads_are_equal_with_and_without_plans(seed: int, rows: Any) -> None:
    for number in range(seed, seed + 50):
        for remembers in (False, True):
            with without_plans():
                expected, most = outcome(lambda: program(number), remembers=remembers)  # noqa: B023
            for _ in range(4):
                found, sent = outcome(lambda: program(number), remembers=remembers)  # noqa: B023
                assert found == expected, number
                assert sent <= most, number


def test_a_value_with_many_entries(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "FEW_ENTRIES", 3)
    for number in (11, 12, 13):
        Account.objects.create(id=number, user_id=ONE, serial=7)
    Account.objects.create(id=14, user_id=TWO, serial=7)
    for _ in range(3):
        found = Account.objects.filter(serial=7)
        assert {row.id for row in found} == {1, 2, 11, 12, 13, 14}
