"""Sums and averages of integers whose sum has more than 64 bits."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import OperationalError, connection
from django.db.models import Avg, FloatField, Sum
from django.db.models.functions import Cast

from sharded_orm.exceptions import ScatterNotSupported
from tests.queries.conftest import DATABASES
from tests.twins.models import PlainTwig, Twig

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

LARGE = 2**63 - 1
AVERAGES = {
    "of all rows": lambda rows, source: rows.aggregate(x=Avg(source))["x"],
    "of groups": lambda rows, source: rows.values("n").annotate(x=Avg(source)).get()["x"],
}


@pytest.fixture
def large(db: Any) -> None:
    for model in (PlainTwig, Twig):
        model.objects.bulk_create([model(id=n, owner=n % 2, ref=LARGE) for n in range(4)])


@pytest.mark.parametrize("name", AVERAGES)
def test_large_sums(large: None, name: str) -> None:
    average, rows = AVERAGES[name], Twig.objects.scatter()
    plain = average(PlainTwig.objects, "ref")
    if connection.vendor == "sqlite":
        with pytest.raises(ScatterNotSupported, match=r"more than 64 bits.*Avg\(Cast"):
            average(rows, "ref")
        assert average(rows, Cast("ref", FloatField())) == plain
    else:
        assert average(rows, "ref") == plain


SUMS = {
    "of all rows": lambda rows, source: rows.aggregate(x=Sum(source))["x"],
    "with a default": lambda rows, source: rows.aggregate(x=Sum(source, default=0))["x"],
    "of different values": lambda rows, source: rows.aggregate(x=Sum(source, distinct=True))["x"],
    "of groups": lambda rows, source: rows.values("n").annotate(x=Sum(source)).get()["x"],
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_that_only_the_shards_together_exceed(db: Any, name: str, sign: int) -> None:
    total, rows = SUMS[name], Twig.objects.scatter()
    for model in (PlainTwig, Twig):
        model.objects.bulk_create(
            [model(id=n, owner=n, ref=sign * (2**62 + n - 1)) for n in range(2)]
        )
    # The greatest number of 64 bits, and the smallest but one.
    assert total(rows, "ref") == total(PlainTwig.objects, "ref") == sign * LARGE
    for model in (PlainTwig, Twig):
        model.objects.filter(owner=0).update(ref=sign * (2**62 + 2))
    if connection.vendor == "sqlite":
        with pytest.raises(OperationalError, match="integer overflow"):
            total(PlainTwig.objects, "ref")
        with pytest.raises(ScatterNotSupported, match=r"more than 64 bits.*Sum\(Cast"):
            total(rows, "ref")
        plain = total(PlainTwig.objects, Cast("ref", FloatField()))
        assert total(rows, Cast("ref", FloatField())) == plain
    else:
        assert total(rows, "ref") == total(PlainTwig.objects, "ref")
