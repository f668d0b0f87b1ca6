"""Models with a composite primary key answer on several shards as in one plain database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections
from django.db.models import Count, F, Max, Sum

from sharded_orm.exceptions import ScatterNotSupported
from tests.queries.conftest import DATABASES
from tests.twins.models import Ballot, PlainBallot

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

Rows = Any
#: The first two columns are the key; two owners are on one shard, and ``n`` is in another order.
STORED = [
    (owner, number, (owner * 3 + number * 2) % 5, "abc"[(owner + number) % 3])
    for owner in (0, 1, 2, 8)
    for number in (5, 1, 3)
]

CALLS: dict[str, Callable[[Rows], Any]] = {
    "all in order": lambda q: q.order_by("pk").values_list("pk", "n"),
    "backwards": lambda q: q.order_by("-pk").values_list("pk", flat=True),
    "a slice": lambda q: q.order_by("pk")[2:7].values_list("pk", "text"),
    "after a key": lambda q: q.filter(pk__gt=(1, 3)).order_by("pk").values_list("pk"),
    "some keys": lambda q: q.filter(pk__in=[(0, 5), (8, 1), (9, 9)]).order_by("pk").values("pk"),
    "by a column before the key": lambda q: q.order_by("n", "pk").values_list("n", "pk"),
    "by a column after the key": lambda q: q.order_by("n", "text").values_list("pk", "n", "text"),
    "by columns around the key": lambda q: q.order_by("text", "-n", "pk").values_list(
        "text", "pk", "n"
    ),
    "the first of them": lambda q: q.order_by("n", "-number").values_list("pk", "n", "text")[:1],
    "by an annotation after the key": lambda q: (
        q.annotate(x=F("n") * -10 - F("owner")).order_by("x", "pk").values_list("pk", "x")
    ),
    "in_bulk": lambda q: {k: r.n for k, r in q.in_bulk([(0, 5), (1, 1)]).items()},
    "distinct keys": lambda q: sorted(q.values_list("pk").distinct()),
    "groups of one row": lambda q: sorted(
        q.values_list("pk").annotate(c=Count("n"), s=Sum("number"))
    ),
    "groups with a column": lambda q: sorted(
        q.values("pk", "text").annotate(c=Max("n")).values_list("pk", "text", "c")
    ),
    "groups with a filter": lambda q: sorted(
        q.values("pk").annotate(s=Sum("n")).filter(s__gt=1).values_list("pk", "s")
    ),
    "groups in order": lambda q: (
        q.values("pk").annotate(s=Sum("n")).order_by("-pk").values_list("s", "pk")[1:6]
    ),
    "the number of groups": lambda q: len(q.values("pk").annotate(s=Sum("n"))),
    "groups without the whole key": lambda q: sorted(
        q.values_list("number").annotate(s=Sum("n"), c=Count("n"))
    ),
}


def _answer(call: Callable[[Rows], Any], rows: Rows) -> Any:
    answer = call(rows)
    return answer if isinstance(answer, int | dict | list) else list(answer)


def _store() -> None:
    for model in (Ballot, PlainBallot):
        model.objects.bulk_create(
            [model(owner=owner, number=number, n=n, text=text) for owner, number, n, text in STORED]
        )


@pytest.mark.parametrize("name", CALLS)
def test_as_in_one_database(name: str) -> None:
    _store()
    expected = _answer(CALLS[name], PlainBallot.objects.all())
    answer = _answer(CALLS[name], Ballot.objects.scatter())
    assert answer == expected


def test_the_first_row_of_each_key() -> None:
    """``distinct("pk")`` has two columns, and Django gives their SQL as one."""
    _store()
    for fields in (["pk"], ["owner", "number"]):
        with pytest.raises(ScatterNotSupported, match="Remedy"):
            list(Ballot.objects.scatter().order_by(*fields).distinct("pk"))
    if connections["events"].features.can_distinct_on_fields:
        for names in (["owner", "number"], ["owner"]):
            ordered = [
                model.order_by("owner", "number").distinct(*names).values_list("pk", "n")
                for model in (Ballot.objects.scatter(), PlainBallot.objects.all())
            ]
            assert list(ordered[0]) == list(ordered[1])
