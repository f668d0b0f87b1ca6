"""The short way to the shard of a query gives the same result as the long one."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import F, Q

from sharded_orm.models.querysets.route import only_shard
from sharded_orm.models.sharding.options import shard_options
from tests.cached.models import CachedAlbum, CachedPhoto
from tests.queries.conftest import DATABASES, ONE, SHARD, START, TWO

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(databases=DATABASES),
]


@pytest.mark.parametrize(
    ("conditions", "is_short"),
    [
        (Q(user_id=ONE), True),
        (Q(user_id=ONE, stars__gt=1), True),
        (Q(user_id=ONE, posted_at__lte=START, title__startswith="p"), True),
        (Q(user_id=ONE, album__isnull=True), True),
        (Q(user_id=ONE, user_id__gt=0), True),
        (Q(user_id=ONE, stars__gt=F("user_id")), False),
        (Q(user_id=ONE, stars__in=[1, 2]), True),
        (Q(user_id=ONE, stars__range=(1, 2), title__in=["a"]), True),
        (Q(user_id=ONE, stars__in=[1, F("user_id")]), False),
        (Q(user_id=ONE) & Q(user_id__in=[TWO]), False),
        (Q(user_id=ONE) & (Q(stars=1) | Q(stars=2)), False),
        (Q(user_id=ONE, album__title="a"), False),
        (Q(user_id=ONE, posted_at__year=2026), False),
        (Q(user_id=ONE, album__in=CachedAlbum.objects.filter(user_id=ONE)), False),
    ],
)
def test_short_and_long(placed: None, conditions: Any, is_short: bool) -> None:
    rows = CachedPhoto.objects.filter(conditions)
    options = shard_options(CachedPhoto)
    assert options is not None
    short = only_shard(options, rows.query)
    assert (short is not None) is is_short
    if short is not None:
        assert rows.explain_routing().aliases == (short.alias,) == (SHARD[ONE],)
    assert list(rows) == []
