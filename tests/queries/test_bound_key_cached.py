"""Reads of cached models inside ``bound(user_id=…)``."""

from __future__ import annotations

import pytest

from sharded_orm import bound, fetch_together
from sharded_orm.exceptions import BoundKeyMismatch
from tests.cached.models import CachedPhoto
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES, NEAR, ONE, is_cached, queries

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(transaction=True, databases=DATABASES),
]


def test_reads_stay_cached(photos: list[CachedPhoto]) -> None:
    pk = photos[0].pk
    with bound(user_id=ONE):
        assert is_cached(lambda: CachedPhoto.objects.get(pk=pk))
        assert is_cached(lambda: list(CachedPhoto.objects.all()))
        assert is_cached(lambda: list(CachedPhoto.objects.filter(stars=1)))
        assert is_cached(lambda: CachedPhoto.objects.filter(user_id=ONE).count())
        assert is_cached(lambda: CachedPhoto.objects.exists())
    # The entries are those of the spelled-out conditions.
    assert queries(lambda: CachedPhoto.objects.get(user_id=ONE, pk=pk)) == 0
    assert queries(lambda: list(CachedPhoto.objects.filter(user_id=ONE))) == 0


def test_cached_rows_of_another_key_are_not_found(photos: list[CachedPhoto]) -> None:
    CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk)
    with bound(user_id=NEAR):
        with pytest.raises(CachedPhoto.DoesNotExist):
            CachedPhoto.objects.get(pk=photos[0].pk)
        assert list(CachedPhoto.objects.all()) == []


def test_fetch_together(photos: list[CachedPhoto]) -> None:
    outside = CachedPhoto.objects.all()
    with bound(user_id=ONE):
        for _ in range(3):
            some, plain = CachedPhoto.objects.filter(stars=1), Photo.objects.all()
            fetch_together(some, plain)
        assert queries(lambda: (len(some), len(plain))) == 0
        fetch_together(outside)
        assert ([row.title for row in some], len(outside)) == (["p1"], 5)
    with bound(user_id=NEAR), pytest.raises(BoundKeyMismatch):
        fetch_together(outside)
