"""get_or_create() and update_or_create() refuse an expression before they look the row up."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from django.core.exceptions import FieldError
from django.db import connections
from django.db.models import F, Subquery, Value
from django.db.models.functions import Upper
from django.test.utils import CaptureQueriesContext
from django.utils.functional import SimpleLazyObject

from sharded_orm.exceptions import CrossShardRelation
from tests.photos.models import Person, Photo
from tests.queries.conftest import DATABASES, ONE, SHARD, TWO

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

OF_ALL_KEYS = Subquery(Photo.objects.values("title")[:1])
OF_ANOTHER_KEY = Subquery(Photo.objects.filter(user_id=TWO).values("title")[:1])
OF_ONE_KEY = Subquery(Photo.objects.filter(user_id=ONE).order_by("stars").values("title")[:1])
WRITES = [
    {"defaults": {"title": OF_ALL_KEYS}},
    {"defaults": {"title": OF_ANOTHER_KEY}},
    {"defaults": {"title": Upper(OF_ANOTHER_KEY)}},
]
CREATE_DEFAULTS: dict[str, Any] = {
    "defaults": {"title": "new"},
    "create_defaults": {"title": OF_ALL_KEYS},
}


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize(
    ("method", "values"),
    [
        *[
            (method, values)
            for method in ("get_or_create", "update_or_create")
            for values in WRITES
        ],
        ("update_or_create", CREATE_DEFAULTS),
    ],
)
def test_a_refusal_comes_before_anything_is_sent(
    placed: None, method: str, values: dict[str, Any], *, is_stored: bool
) -> None:
    if is_stored:
        Photo.objects.create(user_id=ONE, stars=1)
        Person.objects.create(username="x")
    pinned = Photo.objects.using(SHARD[ONE])
    calls = [
        (Photo.objects, {"user_id": ONE, "stars": 1}),
        (pinned, {"user_id": ONE, "stars": 1}),
        (Person.objects, {"username": "x"}),
    ]
    for rows, lookup in calls:
        arguments = values
        if rows is Person.objects:
            arguments = {kind: {"username": each["title"]} for kind, each in values.items()}
        with ExitStack() as stack:
            sent = [
                stack.enter_context(CaptureQueriesContext(connections[alias]))  # type: ignore[arg-type]  # a shard's
                for alias in ("default", SHARD[ONE], SHARD[TWO])
            ]
            with pytest.raises(CrossShardRelation):
                getattr(rows, method)(**arguments, **lookup)
            assert not any(map(len, sent))


def test_what_the_shard_can_compute_is_written(placed: None) -> None:
    Photo.objects.create(user_id=ONE, stars=1, title="a")
    lookup = {"user_id": ONE, "stars": 2}
    for value, title in ((Upper(Value("b")), "B"), (OF_ONE_KEY, "a"), (Upper("title"), "A")):
        Photo.objects.update_or_create(
            **lookup, defaults={"title": value}, create_defaults={"title": Upper(Value("b"))}
        )
        assert Photo.objects.get(**lookup).title == title


def test_a_lazy_default_of_a_row_that_is_found_is_not_evaluated(placed: None) -> None:
    person = Person.objects.create(username="x")

    def read() -> str:
        raise AssertionError("the default was evaluated")

    defaults = {"username": SimpleLazyObject(read)}
    assert Person.objects.get_or_create(username="x", defaults=defaults) == (person, False)


def test_values_are_checked_again_for_another_shard(
    placed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is deleted after it was found. A new one belongs on the shard of its key."""
    shards = iter([SHARD[TWO], SHARD[ONE]])
    monkeypatch.setattr(Photo.objects.none().__class__, "_alias_of_lookup", lambda *_: next(shards))
    with (
        CaptureQueriesContext(connections[SHARD[ONE]]) as sent,  # type: ignore[arg-type]  # a shard's
        pytest.raises(CrossShardRelation),
    ):
        Photo.objects.get_or_create(stars=1, defaults={"user_id": ONE, "title": OF_ANOTHER_KEY})
    assert next(shards, None) is None
    assert len(sent) == 0


def test_columns_of_a_row_that_may_be_new_are_refused_by_django(placed: None) -> None:
    stored = Photo.objects.create(user_id=ONE, stars=1, title="a")
    found = Photo.objects.get_or_create(user_id=ONE, stars=1, defaults={"title": F("stars")})
    assert found == (stored, False)
    with pytest.raises(FieldError):
        Photo.objects.get_or_create(user_id=ONE, stars=2, defaults={"title": F("absent")})
    with pytest.raises(ValueError, match=r"F\(\) expressions can only be used to update"):
        Photo.objects.get_or_create(user_id=ONE, stars=2, defaults={"title": F("stars")})
