"""A time of the database that is written on several shards is one time, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db.models import Case, DateTimeField, ExpressionWrapper, F, When
from django.db.models.functions import Coalesce, Now
from django.test import TestCase
from django.utils import timezone

from sharded_orm.exceptions import ScatterNotSupported
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES, NEAR, ONE, TWO

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

assert_queries = TestCase().assertNumQueries


def with_time(rows: list[Photo]) -> list[Photo]:
    for row in rows:
        row.posted_at = Now()  # type: ignore[assignment]  # an expression, as in update()
    return rows


WRITES: dict[str, Callable[[list[Photo]], Any]] = {
    "update": lambda rows: Photo.objects.scatter().update(posted_at=Now()),
    "update of keys": lambda rows: Photo.objects.filter(user_id__in=[ONE, TWO]).update(
        posted_at=Now()
    ),
    "inside an expression": lambda rows: Photo.objects.scatter().update(
        posted_at=Case(
            When(title="p1", then=Coalesce(F("posted_at"), Now())), default=F("posted_at")
        )
    ),
    "an annotation": lambda rows: (
        Photo.objects.scatter()
        .annotate(now=ExpressionWrapper(Now(), output_field=DateTimeField()))
        .update(posted_at=F("now"))
    ),
    "bulk_update": lambda rows: Photo.objects.bulk_update(with_time(rows), ["posted_at"]),
}


@pytest.mark.parametrize("name", WRITES)
def test_on_several_shards(rows: list[Photo], name: str) -> None:
    before = {row.pk: row.posted_at for row in rows}
    with (
        assert_queries(0, using="photos"),
        pytest.raises(ScatterNotSupported, match=r"Now\(\).*Remedy: pass the time as a value"),
    ):
        WRITES[name](rows)
    assert dict(Photo.objects.scatter().values_list("pk", "posted_at")) == before


def test_on_one_shard(rows: list[Photo]) -> None:
    assert Photo.objects.filter(user_id__in=[ONE, NEAR]).update(posted_at=Now()) == 4
    times = Photo.objects.filter(user_id__in=[ONE, NEAR]).values_list("posted_at", flat=True)
    assert len(set(times)) == 1
    stored = [row.posted_at for row in rows]
    of_two = [row for row in rows if row.user_id == TWO]
    assert Photo.objects.bulk_update(with_time(of_two), ["posted_at"]) == 2
    assert not Photo.objects.filter(user_id=TWO, posted_at__in=stored).exists()


def test_the_remedy(rows: list[Photo]) -> None:
    now = timezone.now()
    assert Photo.objects.scatter().update(posted_at=now) == len(rows)
    assert set(Photo.objects.scatter().values_list("posted_at", flat=True)) == {now}


def test_conditions(rows: list[Photo]) -> None:
    """A time that is only compared is not refused."""
    assert Photo.objects.scatter().filter(posted_at__lt=Now()).update(stars=9) == len(rows)
