"""Averages of integers whose sum has more than 64 bits."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.db.models import Avg, FloatField
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
