"""A query on many shards gives the answer of one database with the same rows, or is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from django.db import ProgrammingError, connections
from django.db.models import Model
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from sharded_orm import scatter
from sharded_orm.exceptions import ScatterNotSupported
from tests.integration.scatter import queries
from tests.integration.scatter.conftest import WHOLE, fetch, one_database, store, targets
from tests.queries.conftest import DATABASES
from tests.samples.models import Sample

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
    pytest.mark.usefixtures("batches"),
]

_EXAMPLES = int(os.environ.get("SCATTER_EXAMPLES", "12"))

differential = settings(
    max_examples=_EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@st.composite
def _rows(draw: st.DrawFn) -> tuple[Any, Any]:
    samples = draw(queries.samples())
    return samples, draw(queries.parts(samples))


def _canonical(value: Any) -> Any:
    """Return a comparable form of a value: texts of a group may be spelled differently."""
    if isinstance(value, Model):
        shown = {name: getattr(value, name) for name in value.__dict__ if not name.startswith("_")}
        return [(name, _canonical(found)) for name, found in sorted(shown.items())]
    if isinstance(value, list | tuple):
        return [_canonical(part) for part in value]
    if isinstance(value, str):
        return ("text", _weight(value))
    return repr(value)


_weights: dict[str, Any] = {}


def _weight(text: str) -> Any:
    connection = connections[WHOLE]
    if connection.vendor != "mysql":
        return text
    if text not in _weights:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT HEX(WEIGHT_STRING(RTRIM(CONVERT(%s USING utf8mb4)"
                " COLLATE utf8mb4_general_ci)))",
                [text],
            )
            _weights[text] = cursor.fetchone()[0]
    return _weights[text]


def _compare(rows: tuple[Any, Any], build: queries.Query, exact: bool = False) -> None:
    store(*rows)
    queryset = build(one_database(Sample))
    try:
        one = list(queryset)
    except ProgrammingError as error:  # For one, PostgreSQL has no MIN of UUIDs.
        with pytest.raises((type(error), ScatterNotSupported)):
            fetch(queryset)
        return
    try:
        many = fetch(queryset)
    except ScatterNotSupported as refusal:
        event(f"refused: {refusal}"[:90])
        return
    event("compared")
    show: Callable[[Any], Any] = _spelled if exact else _canonical
    assert show(many) == show(one)
    assert scatter.count(queryset, targets(queryset)) == len(one)
    assert scatter.exists(queryset, targets(queryset)) == bool(one)


def _spelled(rows: list[Any]) -> Any:
    return [
        {k: v for k, v in row.__dict__.items() if k != "_state"} if isinstance(row, Model) else row
        for row in rows
    ]


@differential
@given(_rows(), queries.row_queries())
def test_rows(rows: tuple[Any, Any], build: queries.Query) -> None:
    _compare(rows, build, exact=True)


@differential
@given(_rows(), queries.distinct_queries())
def test_distinct(rows: tuple[Any, Any], build: queries.Query) -> None:
    _compare(rows, build)


@differential
@given(_rows(), queries.group_queries())
def test_groups(rows: tuple[Any, Any], build: queries.Query) -> None:
    _compare(rows, build)


@differential
@given(_rows(), queries.counted_queries())
def test_rows_with_aggregates(rows: tuple[Any, Any], build: queries.Query) -> None:
    _compare(rows, build, exact=True)


@differential
@given(_rows(), queries.aggregations)
def test_aggregates(rows: tuple[Any, Any], asked: Any) -> None:
    store(*rows)
    where, made = asked
    queryset = one_database(Sample)
    if where is not None:
        queryset = queryset.filter(where)
    aggregates = {f"x{n}": make() for n, make in enumerate(made)}
    try:
        one = queryset.aggregate(**aggregates)
    except ProgrammingError as error:
        with pytest.raises((type(error), ScatterNotSupported)):
            scatter.aggregate(queryset, targets(queryset), aggregates)
        return
    try:
        many = scatter.aggregate(queryset, targets(queryset), aggregates)
    except ScatterNotSupported as refusal:
        event(f"refused: {refusal}"[:90])
        return
    assert _canonical(list(many.items())) == _canonical(list(one.items()))
