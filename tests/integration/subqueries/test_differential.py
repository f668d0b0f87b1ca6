"""A query or write with subqueries has the result of one database on shards, or is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest
from django.core.exceptions import FieldError, MultipleObjectsReturned
from django.db import DatabaseError, connections, reset_queries, transaction
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, event, given, note, settings

from sharded_orm.exceptions import ShardedOrmError
from tests.integration.subqueries import programs
from tests.integration.subqueries.conftest import DATABASES, PLAIN, SHARDED, rows_of, store

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

differential = settings(
    max_examples=int(os.environ.get("SUBQUERY_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# Errors that one database may raise as well.
FAILURES = (DatabaseError, FieldError, MultipleObjectsReturned, TypeError, ValueError)


class Failed:
    """A statement that one database refuses as well."""

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Failed)

    __hash__ = None  # type: ignore[assignment]


def _one(program: programs.Program) -> Any:
    """Run a program on one database; its statements are shown with a failure."""
    reset_queries()
    try:
        with CaptureQueriesContext(connections["default"]) as sent, transaction.atomic():
            found = program(PLAIN)
        for query in sent:
            note(query["sql"])
        return found
    except FAILURES as error:
        event(f"fails everywhere: {type(error).__name__}")
        return Failed()


def _many(program: programs.Program) -> Any:
    try:
        return program(SHARDED)
    except ShardedOrmError as refusal:
        event(f"refused: {type(refusal).__name__}")
        return refusal
    except FAILURES:
        return Failed()


@differential
@given(programs.forests(), programs.reads())
def test_reads(forest: Any, program: programs.Program) -> None:
    store(*forest)
    many = _many(program)
    if isinstance(many, ShardedOrmError):
        return
    event("compared")
    assert many == _one(program)


@differential
@given(programs.forests(), programs.writes())
def test_writes(forest: Any, program: programs.Program) -> None:
    store(*forest)
    before = rows_of(SHARDED)
    many = _many(program)
    if isinstance(many, ShardedOrmError):
        assert rows_of(SHARDED) == before
        return
    one = _one(program)
    if isinstance(one, Failed):
        # Where one database fails in the middle, shards fail as well: each is atomic by itself.
        assert isinstance(many, Failed)
        return
    event("compared")
    assert many == one
    assert rows_of(SHARDED) == rows_of(PLAIN)
