"""Reads of cached models inside transactions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event
from typing import Any

import pytest
from django.db import connections, transaction

from tests.cached.models import CachedPhoto
from tests.patience import PATIENCE
from tests.photos.models import Photo
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, cache, queries

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(transaction=True, databases=DATABASES),
]

ALIAS = SHARD[ONE]


def uses_hits() -> bool:
    """Whether the isolation level lets a transaction see commits of others meanwhile."""
    return connections[ALIAS].vendor != "sqlite"


def read_all(pk: Any) -> int:
    """Read an object, a list and a count, and return the number of queries."""
    return sum(
        map(
            queries,
            (
                lambda: CachedPhoto.objects.get(user_id=ONE, pk=pk),
                lambda: list(CachedPhoto.objects.filter(user_id=ONE)),
                lambda: CachedPhoto.objects.filter(user_id=ONE).count(),
            ),
        )
    )


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
    def test_what_it_reads_is_stored_under_read_committed(self, photos, using):
        pk = photos[0].pk
        with transaction.atomic(using=using):
            assert read_all(pk) == 3
        expected = 0 if uses_hits() else 3
        assert read_all(pk) == expected
        with transaction.atomic(using=using):
            assert read_all(pk) == expected

    @pytest.mark.parametrize("in_savepoint", [False, True])
    def test_a_read_after_sql_of_the_project_is_not_stored(self, photos, in_savepoint):
        """The statement may be rolled back, and nobody else may see what it has changed."""
        photo = photos[0]
        with transaction.atomic(using=ALIAS):
            with transaction.atomic(using=ALIAS) if in_savepoint else nullcontext():
                with connections[ALIAS].cursor() as cursor:
                    cursor.execute(
                        f"UPDATE {CachedPhoto._meta.db_table} SET title = 'never' WHERE user_id = %s",
                        [ONE],
                    )
            assert CachedPhoto.objects.get(user_id=ONE, pk=photo.pk).title == "never"
            titles = [row.title for row in CachedPhoto.objects.filter(user_id=ONE)]
            assert set(titles) == {"never"}
            transaction.set_rollback(True, using=ALIAS)
        assert CachedPhoto.objects.get(user_id=ONE, pk=photo.pk).title == "p0"
        assert "never" not in {row.title for row in CachedPhoto.objects.filter(user_id=ONE)}

    def test_nothing_is_stored_by_a_session_of_another_isolation_level(self, photos):
        if not uses_hits():
            pytest.skip("SQLite has no levels")
        # PostgreSQL's settings of the node name a level, so each BEGIN names it.
        is_mysql = connections[ALIAS].vendor == "mysql"
        pk = photos[0].pk
        assert CachedPhoto.objects.get(user_id=ONE, pk=pk).title == "p0"

        def rename() -> None:
            CachedPhoto.objects.filter(user_id=ONE).update(title="new")
            connections.close_all()

        def set_level(scope: str) -> None:
            with connections[ALIAS].cursor() as cursor:
                cursor.execute(f"SET {scope} TRANSACTION ISOLATION LEVEL REPEATABLE READ")

        if is_mysql:
            set_level("SESSION")
        try:
            with transaction.atomic(using=ALIAS):
                if not is_mysql:
                    set_level("")
                Photo.objects.using(ALIAS).exists()  # begins the snapshot
                with ThreadPoolExecutor() as pool:
                    pool.submit(rename).result()
                assert CachedPhoto.objects.get(user_id=ONE, pk=pk).title == "p0"
        finally:
            connections[ALIAS].close()
        assert CachedPhoto.objects.get(user_id=ONE, pk=pk).title == "new"

    def test_nothing_is_stored_after_a_write(self, photos):
        pk = photos[0].pk
        before = cache().statistics.counted(cache().type_name("cached.CachedPhoto"))
        with transaction.atomic(using=ALIAS):
            Photo.objects.create(user_id=ONE, title="of a model that is not cached")
            read_all(pk)
        after = cache().statistics.counted(cache().type_name("cached.CachedPhoto"))
        assert after["fills"] == before["fills"]

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
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no levels")
    if connection.vendor == "postgresql":
        if level == "read uncommitted":
            pytest.skip("for PostgreSQL, it is READ COMMITTED")
        level = {"repeatable read": 3, "serializable": 4}.get(level)
    connection.close()
    pk = photos[0].pk
    CachedPhoto.objects.get(user_id=ONE, pk=pk)
    kept = connection.settings_dict["OPTIONS"]
    connection.settings_dict["OPTIONS"] = {**kept, "isolation_level": level}
    connection.__dict__.pop("_for_cache", None)
    try:
        with transaction.atomic(using=ALIAS):
            assert queries(lambda: CachedPhoto.objects.get(user_id=ONE, pk=pk)) == 1
        # Without a level, MariaDB and MySQL use the server's default, which may be READ UNCOMMITTED.
        may_be_uncommitted = connection.vendor == "mysql" and level in ("read uncommitted", None)
        expected = 1 if may_be_uncommitted else 0
        assert queries(lambda: CachedPhoto.objects.get(user_id=ONE, pk=pk)) == expected
    finally:
        connection.close()
        connection.settings_dict["OPTIONS"] = kept
        connection.__dict__.pop("_for_cache", None)


@pytest.mark.mysql_settings
def test_rows_that_are_rolled_back_on_a_server_whose_default_is_read_uncommitted(photos):
    connection = connections[ALIAS]
    kept = connection.settings_dict["OPTIONS"]

    def title() -> str:
        return CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk).title

    def set_default(level: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SET GLOBAL TRANSACTION ISOLATION LEVEL {level}")

    def rename_in_vain() -> None:
        with transaction.atomic(using=ALIAS):
            CachedPhoto.objects.filter(user_id=ONE).update(title="never")
            is_renamed.set()
            assert has_read.wait(PATIENCE)
            transaction.set_rollback(True, using=ALIAS)
        connections.close_all()

    is_renamed, has_read = Event(), Event()
    set_default("READ UNCOMMITTED")
    connection.close()
    connection.settings_dict["OPTIONS"] = {**kept, "isolation_level": None}
    connection.__dict__.pop("_for_cache", None)
    try:
        with ThreadPoolExecutor() as pool:
            writer = pool.submit(rename_in_vain)
            assert is_renamed.wait(PATIENCE)
            try:
                assert title() == "never"  # what this level promises
            finally:
                has_read.set()
            writer.result()
        assert title() == "p0"
    finally:
        set_default("REPEATABLE READ")
        connection.close()
        connection.settings_dict["OPTIONS"] = kept
        connection.__dict__.pop("_for_cache", None)
    assert title() == "p0"
