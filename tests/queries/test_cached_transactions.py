"""Reads of cached models inside transactions."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connections, transaction

from tests.cached.models import CachedPhoto
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, cache, queries

pytestmark = pytest.mark.django_db(transaction=True, databases=DATABASES)

ALIAS = SHARD[ONE]


def uses_hits() -> bool:
    """Whether the isolation level lets a transaction see commits of others meanwhile."""
    return connections[ALIAS].vendor == "mysql"


class TestBeforeItWrites:
    @pytest.mark.parametrize("using", [ALIAS, "photos"])
    def test_a_hit_may_be_used(self, photos, using):
        def get() -> Any:
            return CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk)

        def rows() -> Any:
            return list(CachedPhoto.objects.filter(user_id=ONE))

        get(), rows(), rows()
        with transaction.atomic(using=using):
            assert queries(get) == (0 if uses_hits() else 1)
            assert queries(rows) == (0 if uses_hits() else 1)

    @pytest.mark.parametrize("using", [ALIAS, "photos"])
    def test_nothing_is_filled(self, photos, using):
        pk = photos[0].pk
        before = cache().statistics.counted(cache().type_name("cached.CachedPhoto"))
        with transaction.atomic(using=using):
            CachedPhoto.objects.get(user_id=ONE, pk=pk)
            list(CachedPhoto.objects.filter(user_id=ONE))
            CachedPhoto.objects.filter(user_id=ONE).count()
        after = cache().statistics.counted(cache().type_name("cached.CachedPhoto"))
        assert after["fills"] == before["fills"]
        # And others may store entries.
        CachedPhoto.objects.get(user_id=ONE, pk=pk)
        assert queries(lambda: CachedPhoto.objects.get(user_id=ONE, pk=pk)) == 0

    def test_of_another_shard_key_on_the_same_shard(self, photos):
        photo = CachedPhoto.objects.create(user_id=NEAR, title="n")
        with transaction.atomic(using=ALIAS):
            photos[0].save()
            assert queries(lambda: CachedPhoto.objects.get(user_id=NEAR, pk=photo.pk)) == 1

    def test_manual_transactions(self, photos):
        def get() -> Any:
            return CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk)

        get()
        transaction.set_autocommit(False, using=ALIAS)
        try:
            assert queries(get) == (0 if uses_hits() else 1)
        finally:
            transaction.rollback(using=ALIAS)
            transaction.set_autocommit(True, using=ALIAS)

    def test_a_broken_transaction(self, photos):
        pk = photos[0].pk
        CachedPhoto.objects.get(user_id=ONE, pk=pk)
        with transaction.atomic(using=ALIAS):
            transaction.set_rollback(True, using=ALIAS)
            with pytest.raises(transaction.TransactionManagementError):
                CachedPhoto.objects.get(user_id=ONE, pk=pk)


class TestAfterItWrote:
    def test_it_sees_what_it_wrote(self, photos):
        photo = photos[0]

        def title() -> str:
            return CachedPhoto.objects.get(user_id=ONE, pk=photo.pk).title

        def titles() -> list[str]:
            rows = CachedPhoto.objects.filter(user_id=ONE).order_by("pk")[:1]
            return [row.title for row in rows]

        assert (title(), titles()) == ("p0", ["p0"])
        with transaction.atomic(using=ALIAS):
            photo.title = "new"
            photo.save()
            assert (title(), titles()) == ("new", ["new"])
            transaction.set_rollback(True, using=ALIAS)
        assert (title(), titles()) == ("p0", ["p0"])
        with transaction.atomic(using=ALIAS):
            photo.save()
        assert (title(), titles()) == ("new", ["new"])

    def test_a_savepoint_that_is_rolled_back(self, photos):
        photo = photos[0]
        with transaction.atomic(using=ALIAS):
            with pytest.raises(ZeroDivisionError), transaction.atomic(using=ALIAS):
                photo.title = "new"
                photo.save()
                raise ZeroDivisionError
            assert CachedPhoto.objects.get(user_id=ONE, pk=photo.pk).title == "p0"
        for _ in range(2):
            assert CachedPhoto.objects.get(user_id=ONE, pk=photo.pk).title == "p0"


@pytest.mark.parametrize("level", ["repeatable read", "serializable", "read uncommitted", None])
def test_isolation_levels_that_see_something_else(photos, level):
    connection = connections[ALIAS]
    if connection.vendor != "mysql":
        pytest.skip("levels of MySQL")
    connection.close()
    pk = photos[0].pk
    CachedPhoto.objects.get(user_id=ONE, pk=pk)
    kept = connection.settings_dict["OPTIONS"]
    connection.settings_dict["OPTIONS"] = {**kept, "isolation_level": level}
    connection.__dict__.pop("_for_cache", None)
    try:
        with transaction.atomic(using=ALIAS):
            assert queries(lambda: CachedPhoto.objects.get(user_id=ONE, pk=pk)) == 1
        expected = 1 if level == "read uncommitted" else 0
        assert queries(lambda: CachedPhoto.objects.get(user_id=ONE, pk=pk)) == expected
    finally:
        connection.close()
        connection.settings_dict["OPTIONS"] = kept
        connection.__dict__.pop("_for_cache", None)
