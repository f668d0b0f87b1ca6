"""Rows of two shards that have the same primary key, because each shard counts its own ids."""

from __future__ import annotations

import pickle

import pytest

from tests.photos.models import Tag
from tests.queries.conftest import DATABASES, NEAR, ONE, TWO

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

ID = 7


@pytest.fixture
def tags(placed: None) -> list[Tag]:
    for key in (ONE, TWO):
        Tag.objects.create(id=ID, user_id=key, name=f"tag {key}")
    return list(Tag.objects.scatter().order_by("user_id"))


def test_they_are_different_rows(tags: list[Tag]) -> None:
    one, two = tags
    assert one != two
    assert len({one, two}) == 2
    assert one not in [two]
    assert not (rows := Tag.objects.filter(user_id=TWO)).contains(one)
    assert list(rows) == [two]
    assert not rows.contains(one)  # the queryset has its rows now
    assert one not in rows


def test_one_row_is_equal_to_itself(tags: list[Tag]) -> None:
    """As in Django, whatever has changed in memory."""
    one, _ = tags
    for again in (
        Tag.objects.get(user_id=ONE),
        Tag.objects.only("name").get(user_id=ONE),
        Tag.objects.defer("user_id").get(user_id=ONE),
        pickle.loads(pickle.dumps(one)),
        Tag(id=ID, user_id=TWO),
    ):
        assert again == one
        assert hash(again) == hash(one)
    again = Tag.objects.get(user_id=ONE)
    again.user_id = NEAR
    assert again == one
    assert one != Tag(id=ID + 1, user_id=ONE)
    assert one != "tag"
