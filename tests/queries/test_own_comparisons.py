"""Lookups of a project that derive from Django's and compare differently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db.models import CharField, IntegerField
from django.db.models.lookups import Exact, In
from django.test.utils import register_lookup

from sharded_orm import reads_own_row
from sharded_orm.exceptions import ShardKeyRequired
from tests.photos.models import Event, Photo
from tests.queries.conftest import DATABASES, ONE, SHARD, TWO

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


@reads_own_row
class NotEqual(Exact):
    lookup_name = "ne"

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        one, its = self.process_lhs(compiler, connection)
        other, theirs = self.process_rhs(compiler, connection)
        return f"{one} <> {other}", [*its, *theirs]


@reads_own_row
class NotIn(In):
    lookup_name = "notin"

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        sql, values = super().as_sql(compiler, connection)
        return f"NOT ({sql})", values


@pytest.fixture(autouse=True)
def lookups() -> Iterator[None]:
    with (
        register_lookup(CharField, NotEqual, NotIn),
        register_lookup(IntegerField, NotEqual, NotIn),
    ):
        yield


@pytest.mark.parametrize(
    ("condition", "others"),
    [({"account__ne": "k0"}, {"k0"}), ({"account__notin": ["k0", "k1"]}, {"k0", "k1"})],
)
def test_they_do_not_tell_the_shard(
    placed: None, condition: dict[str, Any], others: set[str]
) -> None:
    for number in range(8):
        Event.objects.create(account=f"k{number}")
    found = Event.objects.scatter().filter(**condition)
    expected = {f"k{number}" for number in range(8)} - others
    assert set(found.values_list("account", flat=True)) == expected
    assert found.count() == len(expected)
    with pytest.raises(ShardKeyRequired):
        list(Event.objects.filter(**condition))


def test_they_narrow_what_another_condition_tells(rows: list[Photo]) -> None:
    photos = Photo.objects.filter(user_id__in=[ONE, TWO])
    assert set(photos.filter(user_id__notin=[ONE])) == {rows[1], rows[4]}
    assert set(photos.filter(user_id__ne=ONE)) == {rows[1], rows[4]}
    assert set(Photo.objects.filter(user_id=ONE, stars__ne=0)) == {rows[3]}
    assert not Photo.objects.using(SHARD[ONE]).filter(user_id=ONE, user_id__ne=ONE).exists()
