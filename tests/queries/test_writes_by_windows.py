"""A window function that chooses the rows of a write ranks the rows of all shards, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db.models import F, Window
from django.db.models.functions import RowNumber
from django.test import TestCase

from sharded_orm.exceptions import ScatterNotSupported
from tests.queries.conftest import DATABASES
from tests.twins.models import PlainTrunk, Tree, Trunk

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

assert_queries = TestCase().assertNumQueries

#: Owners of one row each; 0 and 8 are on one shard.
OWNERS = (0, 1, 2, 8)


def newest(rows: Any) -> Any:
    return rows.annotate(rank=Window(RowNumber(), order_by=F("id").desc())).filter(rank=1)


def store(model: Any) -> list[Any]:
    rows = [model(id=100 + owner, owner=owner, n=owner) for owner in OWNERS]
    for row in rows:
        row.save(force_insert=True)
    return rows


WRITES: dict[str, Callable[[Any], Any]] = {
    "delete": lambda model: newest(model.objects.scatter()).delete(),
    "update": lambda model: newest(model.objects.scatter()).update(n=F("n") + 1),
    "update of keys": lambda model: newest(model.objects.filter(owner__in=OWNERS)).update(n=7),
    "bulk_update": lambda model: newest(model.objects.scatter()).bulk_update(
        list(model.objects.scatter()), ["n"]
    ),
}


@pytest.mark.parametrize("model", [Trunk, Tree])
@pytest.mark.parametrize("name", WRITES)
def test_on_several_shards(model: Any, name: str) -> None:
    stored = store(model)
    with pytest.raises(ScatterNotSupported, match=r"window function.*Remedy: choose the rows"):
        WRITES[name](model)
    assert sorted(model.objects.scatter().values_list("id", "n")) == sorted(
        (row.id, row.n) for row in stored
    )


def test_nothing_is_sent_before_the_error() -> None:
    with assert_queries(0, using="events"), pytest.raises(ScatterNotSupported):
        newest(Trunk.objects.scatter()).delete()


def test_on_one_shard() -> None:
    for model, condition in ((PlainTrunk, {"owner__in": [0, 8]}), (Trunk, {"owner__in": [0, 8]})):
        store(model)
        assert newest(model.objects.filter(**condition)).delete()[0] == 1
        assert not model.objects.filter(owner=8).exists()
        assert model.objects.filter(owner=0).exists()
