"""The same tests with pytest-django's fixtures and marks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.testing_support.project.cases import MIGRATED, committed, texts
from tests.integration.testing_support.project.notes.models import Note


@pytest.mark.django_db(databases=["default", "notes"])
@pytest.mark.parametrize("turn", [1, 2])
def test_rolls_back(turn: int) -> None:
    assert texts(1) == texts(6) == MIGRATED
    Note.objects.create(owner=1, text="x")
    Note.objects.create(owner=6, text="x")
    assert texts(1) == [*MIGRATED, "x"]
    assert committed(1) == MIGRATED


@pytest.mark.django_db(databases=["default", "notes"], transaction=True)
@pytest.mark.parametrize("turn", [1, 2])
def test_commits(turn: int) -> None:
    assert texts(1) == MIGRATED
    Note.objects.create(owner=1, text="x")
    assert committed(1) == [*MIGRATED, "x"]


@pytest.mark.django_db
def test_group_is_not_allowed() -> None:
    with pytest.raises(AssertionError, match="'notes'"):
        texts(1)


def test_database_is_not_allowed() -> None:
    with pytest.raises(RuntimeError, match="Database access not allowed"):
        texts(1)


@pytest.mark.django_db(databases=["default", "notes"])
def test_statements(django_assert_num_queries: Any) -> None:
    from django.db import connections

    texts(1)
    with django_assert_num_queries(1, connection=connections["notes"]):
        texts(1)
