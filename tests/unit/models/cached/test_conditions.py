"""The conditions on columns that a where tree contains."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from django.db.models import F, Q, Value
from django.db.models.functions import Lower

from sharded_orm.models.cached.conditions import all_pinned
from tests.photos.models import Comment, Photo, Vote


def pinned(query: Any, column: str) -> list[Any] | None:
    return all_pinned(query, (column,)).get(column)


def photos(*args: Any, **kwargs: Any) -> Any:
    return Photo.objects.filter(*args, **kwargs).query


@pytest.mark.parametrize(
    ("query", "values"),
    [
        (photos(user_id=1), [1]),
        (photos(user_id="1"), [1]),
        (photos(user_id__in=[1, 2, "2", None]), [1, 2]),
        (photos(user_id=Value(3)), [3]),
        (photos(user_id=1, title="x"), [1]),
        (photos(Q(user_id=1) & Q(stars__gt=1) & (Q(title="a") | Q(title="b"))), [1]),
        (Photo.objects.filter(user_id__in=[1, 2]).filter(user_id=2).query, [2]),
        (Photo.objects.filter(user_id=1).none().query, []),
        (photos(user_id__in=[]), []),
    ],
)  # fmt: skip
def test_pinned(query: Any, values: list[int]) -> None:
    assert pinned(query, "user_id") == values


@pytest.mark.parametrize(
    "query",
    [
        Photo.objects.all().query,
        photos(title="x"),
        photos(user_id__gt=1),
        photos(user_id__isnull=True),
        photos(user_id=F("stars")),
        photos(user_id__in=[1, F("stars")]),
        photos(user_id__in=Photo.objects.filter(user_id=1).values("stars")),
        photos(Q(user_id=1) | Q(title="x")),
        photos(Q(user_id=1) ^ Q(title="x")),
        photos(~Q(user_id=1)),
        photos(Q(title="x") & ~(Q(user_id=1) & Q(stars=2))),
        photos(comments__user_id=1),  # of a joined table
        photos(album__owner=1),
    ],
)
def test_not_pinned(query: Any) -> None:
    assert pinned(query, "user_id") is None


def test_foreign_keys_and_what_is_no_column() -> None:
    comment = Comment.objects.filter(photo=Photo(pk=4), user_id=1).query
    assert pinned(comment, "photo_id") == [4]
    lowered = Photo.objects.annotate(low=Lower("title")).filter(low="a").query
    assert pinned(lowered, "title") is None


def test_values_are_as_the_field_prepares_them() -> None:
    assert pinned(photos(price="1.5"), "price") == [Decimal("1.5")]


def test_composite_primary_key() -> None:
    query = Vote.objects.filter(pk__in=[(1, 2), (3, 4)]).query
    assert all_pinned(query, ("user_id", "number")) == {"user_id": [1, 3], "number": [2, 4]}


def test_the_query_stays_as_it_is() -> None:
    query = Photo.objects.using("photos_00003").query
    assert pinned(query, "user_id") is None
    # Query.base_table would have remembered that there is none yet.
    assert query.get_initial_alias() == Photo._meta.db_table
    assert query.base_table == Photo._meta.db_table
