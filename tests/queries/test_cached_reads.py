"""Reads through the cache on any database, with the cache in this process's memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.core.exceptions import FieldError
from django.db import connections, transaction
from django.db.models import Exists, F, Func, Prefetch, Q, Sum, TextChoices, Value
from django.db.models.expressions import RawSQL
from django.db.models.functions import Abs, Lower, Now, Random
from django.db.models.lookups import IntegerFieldExact
from django.db.models.query import ModelIterable
from django.db.models.signals import post_init
from django.db.models.sql.where import AND, OR, WhereNode
from django.test.utils import CaptureQueriesContext

from sharded_orm.cache import request_cache
from sharded_orm.models import ShardedQuerySet
from sharded_orm.models.cached import cached_read, lookup_plan
from tests.cached.models import (
    CachedAlbum,
    CachedBoard,
    CachedCountry,
    CachedNote,
    CachedPhoto,
    CachedPost,
)
from tests.queries.conftest import (
    DATABASES,
    LATER,
    ONE,
    SHARD,
    START,
    TWO,
    is_cached,
    queries,
)

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(transaction=True, databases=DATABASES),
]


class TestObjects:
    def test_is_read_from_the_database_once(self, photos):
        def get() -> CachedPhoto:
            return CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk)

        assert queries(get) == 1
        assert queries(get) == 0
        found = get()
        plain = CachedPhoto.objects.uncached().get(user_id=ONE, pk=photos[0].pk)
        state, plain_state = vars(found).pop("_state"), vars(plain).pop("_state")
        assert vars(found) == vars(plain)
        assert (state.db, state.adding) == (plain_state.db, plain_state.adding)

    @pytest.mark.parametrize(
        "get",
        [
            lambda pk: CachedPhoto.objects.get(user_id=ONE, photo_id=pk),
            lambda pk: CachedPhoto.objects.all().get(pk=pk, user_id=ONE),
            lambda pk: CachedPhoto.objects.filter(user_id=ONE).get(pk=pk),
            lambda pk: CachedPhoto.objects.using(SHARD[ONE]).get(user_id=ONE, pk=pk),
            lambda pk: CachedPhoto.objects.filter(user_id=ONE, pk=pk).first(),
            lambda pk: CachedPhoto.objects.filter(user_id=ONE, pk=pk)[0],
            lambda pk: next(iter(CachedPhoto.objects.filter(user_id=ONE).filter(pk=pk))),
        ],
    )
    def test_every_way_reads_the_same_object(self, photos, get):
        pk = photos[0].pk
        CachedPhoto.objects.get(user_id=ONE, pk=pk)
        assert queries(lambda: get(pk)) == 0
        assert get(pk) == photos[0]

    def test_what_is_not_there(self, photos):
        for _ in range(2):
            with pytest.raises(CachedPhoto.DoesNotExist, match="CachedPhoto matching query"):
                CachedPhoto.objects.get(user_id=ONE, pk=10**9)
            with pytest.raises(CachedPhoto.DoesNotExist):
                CachedPhoto.objects.get(user_id=TWO, pk=photos[0].pk)

    def test_global(self, clock, db_all):
        country = CachedCountry.objects.create(name="Utopia")
        CachedCountry.objects.count()
        clock.ahead += LATER
        assert queries(lambda: CachedCountry.objects.get(pk=country.pk), "default") == 1
        assert queries(lambda: CachedCountry.objects.get(pk=country.pk), "default") == 0
        assert queries(lambda: CachedCountry.objects.get(id=country.pk), "default") == 0


class Title(TextChoices):
    ONE = "p1"


class TestLists:
    @pytest.mark.parametrize(
        "read",
        [
            lambda rows: list(rows),
            lambda rows: list(rows.filter(stars__gt=1).order_by("-stars")[:2]),
            lambda rows: list(rows.order_by("posted_at", "-pk")[1:3]),
            lambda rows: list(rows.filter(stars__in=[1, 2]).exclude(title="p1")),
            lambda rows: list(rows.filter(album=None)),
            lambda rows: list(rows.filter(posted_at__range=(START, START + timedelta(minutes=2)))),
            lambda rows: list(rows.filter(title__startswith="p", price=Decimal("1.5"))),
            lambda rows: list(rows.filter(stars__gt=100)),
            lambda rows: list(rows.filter(posted_at__year=2026)),
            lambda rows: list(rows.filter(posted_at__date=START.date())),
            lambda rows: list(rows.filter(stars__lt=F("user_id") + 2).order_by("pk")),
            lambda rows: list(rows.filter(title=Title.ONE)),
            lambda rows: list(rows.filter(title__in=[Title.ONE, "p2"])),
            lambda rows: list(rows.filter(posted_at__year=2026, title=Title.ONE)),
            lambda rows: list(rows.order_by(Lower("title").desc(), "pk")),
            lambda rows: list(rows.order_by(F("album_id").asc(nulls_last=True), "pk")),
            lambda rows: list(rows.filter(title__iregex="P[12]").order_by("album", "pk")),
            lambda rows: rows.order_by("stars").first(),
            lambda rows: rows.order_by("stars").last(),
            lambda rows: rows.latest("posted_at"),
            lambda rows: rows.get(stars=3),
            lambda rows: rows.count(),
            lambda rows: rows.filter(stars__lt=2).count(),
            lambda rows: rows.filter(stars__lt=2)[:1].count(),
            lambda rows: rows.exists(),
            lambda rows: rows.filter(stars=77).exists(),
            lambda rows: rows.in_bulk(),
        ],
    )
    def test_is_cached(self, photos, read):
        assert is_cached(lambda: read(CachedPhoto.objects.filter(user_id=ONE)))

    def test_rows_are_what_django_makes(self, photos):
        rows = CachedPhoto.objects.filter(user_id=ONE).order_by("pk")
        plain = [vars(photo) for photo in rows.uncached()]
        for _ in range(3):
            found = [vars(photo) for photo in rows.all()]
            for one, other in zip(found, plain, strict=True):
                assert list(one) == list(other)
                assert {**one, "_state": 0} == {**other, "_state": 0}
                states = [one["_state"], other["_state"]]
                assert [(s.db, s.adding, s.fields_cache) for s in states] == [
                    (SHARD[ONE], False, {})
                ] * 2

    def test_values_of_other_types_are_other_lists(self, photos):
        rows = CachedPhoto.objects.filter(user_id=ONE)
        reads: list[Any] = [
            rows.filter(stars=1),
            rows.filter(stars__gt=1),
            rows.filter(stars__in=[1]),
            rows.filter(stars__in=[1, 2]),
            rows.exclude(stars=1),
            rows.filter(title="1"),
            rows.filter(title__contains="1"),
            rows.filter(Q(stars=1) | Q(stars=2)),
            rows.filter(Q(stars=1) & Q(title="p2")),
            rows.filter(Q(stars=1) ^ Q(title="p2")),
            rows.filter(~(Q(stars=1) | Q(stars=2))),
            rows.order_by("stars"),
            rows.order_by("-stars"),
            rows.order_by("stars").reverse(),
            rows.order_by("stars")[:1],
            rows.order_by("stars")[1:2],
            rows.filter(album=None),
            rows.filter(album__isnull=False),
            rows.filter(album_id=photos[0].album_id),
            rows.filter(price=Decimal("1")),
            rows.filter(price=Decimal("1.5")),
        ]
        for _ in range(3):
            for query in reads:
                plain = list(query.uncached())
                assert list(query.all()) == plain, query.query
                assert query.count() == len(plain)
                assert query.exists() is bool(plain)

    def test_conditions_in_groups(self, photos):
        # Two groups, and two values that identify an object: they have nothing else in common.
        for stars in (0, 7):
            rows = CachedPhoto.objects.filter(user_id=ONE, pk=photos[0].pk)
            column = rows.query.where.children[0].lhs
            field = CachedPhoto._meta.get_field("stars")
            group = WhereNode([*rows.query.where.children], AND)
            other = WhereNode([IntegerFieldExact(field.get_col(column.alias), stars)], OR)
            rows.query.where.children = [group, other]
            for _ in range(3):
                assert list(rows.all()) == ([] if stars else photos[:1])

    def test_a_condition_without_columns(self, clock, db_all):
        country = CachedCountry.objects.create(name="Utopia")
        for condition in (Exists(CachedCountry.objects.all()), Q(Value(True))):
            rows = CachedCountry.objects.filter(condition)
            for _ in range(2):
                assert rows.count() == 1
                assert rows.exists()
                assert list(rows.all()) == [country]
                assert list(rows.filter(people=0)) == [country]

    def test_only_what_one_key_pins(self, photos):
        for query in (
            CachedPhoto.objects.filter(user_id__in=[ONE, TWO]).scatter(),
            CachedPhoto.objects.scatter(),
            CachedPhoto.objects.using(SHARD[ONE]).filter(stars=1),
            CachedPhoto.objects.filter(Q(user_id=ONE) | Q(stars=1)).scatter(),
            CachedPhoto.objects.using(SHARD[TWO]).filter(user_id=ONE),
        ):
            for _ in range(3):
                alias = SHARD[TWO] if query.db == SHARD[TWO] else SHARD[ONE]
                query = query.all()
                if not query._scatters:
                    assert queries(lambda query=query: list(query), alias) == 1

    @pytest.mark.parametrize(
        "read",
        [
            lambda rows: list(rows.order_by("?")),
            lambda rows: list(rows.filter(posted_at__lt=Now())),
            lambda rows: list(rows.order_by(Random())),
            lambda rows: list(rows.order_by(Func(F("stars"), function="ABS"))),
            lambda rows: list(rows.filter(stars__lt=Abs("stars", function="ABS"))),
            lambda rows: list(rows.values("title")),
            lambda rows: list(rows.values_list("title", flat=True)),
            lambda rows: list(rows.only("title")),
            lambda rows: list(rows.defer("title")),
            lambda rows: list(rows.annotate(double=F("stars") * 2)),
            lambda rows: list(rows.alias(double=F("stars") * 2).filter(double=2)),
            lambda rows: list(rows.distinct()),
            lambda rows: list(rows.select_related("album")),
            lambda rows: list(rows.filter(album__title="a")),
            lambda rows: list(rows.order_by("album__title")),
            lambda rows: list(rows.filter(Exists(CachedAlbum.objects.filter(user_id=ONE)))),
            lambda rows: list(rows.filter(album__in=CachedAlbum.objects.filter(user_id=ONE))),
            lambda rows: list(rows.extra(where=["stars > 0"])),
            lambda rows: list(rows.filter(stars__gt=RawSQL("0", ()))),
            lambda rows: list(rows.union(rows)),
            lambda rows: list(rows.iterator()),
            lambda rows: list(rows.uncached()),
            lambda rows: rows.uncached().count(),
            lambda rows: rows.aggregate(Sum("stars")),
            lambda rows: rows.filter(album__title="a").count(),
        ],
    )
    def test_is_never_cached(self, photos, read):
        for _ in range(3):
            assert queries(lambda: read(CachedPhoto.objects.filter(user_id=ONE))) == 1

    def test_of_a_global_model(self, clock, db_all):
        country = CachedCountry.objects.create(name="Utopia")
        for topic in (1, 2, None):
            CachedPost.objects.create(topic=topic, title=f"t{topic}", country=country)
        reads: list[Callable[[], Any]] = [
            lambda: list(CachedPost.objects.order_by("title")),
            lambda: list(CachedPost.objects.filter(topic=1)),
            lambda: list(CachedPost.objects.filter(topic=None)),
            lambda: CachedPost.objects.filter(topic=2).count(),
            lambda: list(country.posts.all()),
        ]
        for read in reads:
            read()
        clock.ahead += LATER
        for read in reads:
            assert queries(read, "default") == 1
            assert is_cached(read, "default")


class TestUncached:
    def test_of_a_block(self, photos):
        pk = photos[0].pk
        reads: list[Callable[[], Any]] = [
            lambda: CachedPhoto.objects.get(user_id=ONE, pk=pk),
            lambda: list(CachedPhoto.objects.filter(user_id=ONE)),
            lambda: CachedPhoto.objects.filter(user_id=ONE).count(),
        ]
        for read in reads:
            assert is_cached(read)
            with request_cache.uncached():
                assert queries(read) == 1
            assert queries(read) == 0

    def test_is_kept_by_later_calls(self, photos):
        rows = CachedPhoto.objects.uncached().filter(user_id=ONE)
        for _ in range(3):
            assert queries(lambda: list(rows.order_by("stars")[:3])) == 1
            assert queries(lambda: rows.get(pk=photos[0].pk)) == 1
            assert (
                queries(lambda: CachedPhoto.objects.uncached().get(user_id=ONE, pk=photos[0].pk))
                == 1
            )

    def test_refreshing_asks_the_database(self, photos):
        photo = CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk)
        with CaptureQueriesContext(connections[SHARD[ONE]]):
            with connections[SHARD[ONE]].cursor() as cursor:
                cursor.execute("UPDATE cached_cachedphoto SET title = 'new'")
        photo.refresh_from_db()
        assert photo.title == "new"

    def test_locking_reads(self, photos):
        assert is_cached(lambda: CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk))
        with transaction.atomic(using=SHARD[ONE]):
            rows = CachedPhoto.objects.select_for_update()
            assert queries(lambda: rows.get(user_id=ONE, pk=photos[0].pk)) == 1


class TestInstances:
    def test_are_independent(self, photos):
        for _ in range(3):
            found = CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk)
            assert found.title == "p0"
            found.title = "changed"
            rows = list(CachedPhoto.objects.filter(user_id=ONE).order_by("pk"))
            assert rows[0].title == "p0"
            rows[0].title = "changed"

    def test_signals(self, photos):
        seen: list[Any] = []

        def receive(instance: Any, **kwargs: Any) -> None:
            seen.append(instance.pk)

        pk = photos[0].pk
        CachedPhoto.objects.get(user_id=ONE, pk=pk)
        post_init.connect(receive, sender=CachedPhoto)
        try:
            assert queries(lambda: CachedPhoto.objects.get(user_id=ONE, pk=pk)) == 0
        finally:
            post_init.disconnect(receive, sender=CachedPhoto)
        assert seen == [pk]

    def test_known_related_objects(self, photos):
        album = CachedAlbum.objects.get(user_id=ONE, pk=photos[0].album_id)
        rows = album.photos.filter(user_id=ONE).order_by("pk")
        assert is_cached(lambda: list(rows.all()))
        for photo in rows.all():
            assert photo.album is album

    def test_prefetch(self, photos):
        rows = CachedAlbum.objects.filter(user_id=ONE).prefetch_related("photos")
        for _ in range(4):
            (album,) = rows.all()
            assert {photo.pk for photo in album.photos.all()} == {photos[0].pk, photos[1].pk}

    def test_pickle_and_copy(self, photos):
        rows = CachedPhoto.objects.filter(user_id=ONE).uncached()
        assert list(pickle.loads(pickle.dumps(rows))) == list(rows)
        assert copy.deepcopy(rows)._uncached
        restored = CachedPhoto.objects.all()
        restored.query = pickle.loads(pickle.dumps(CachedPhoto.objects.filter(user_id=ONE).query))
        assert is_cached(lambda: list(restored.all()))

    async def _get(self, pk: int) -> Any:
        rows = CachedPhoto.objects.filter(user_id=ONE)
        assert await rows.acount() == 5
        assert await rows.aexists()
        assert len([photo async for photo in rows]) == 5
        return await CachedPhoto.objects.aget(user_id=ONE, pk=pk)

    def test_async(self, photos):
        pk = photos[0].pk
        for _ in range(3):
            assert async_to_sync(self._get)(pk) == photos[0]
        assert queries(lambda: async_to_sync(self._get)(pk)) == 0

    def test_get_or_create(self, photos):
        def ask() -> Any:
            return CachedPhoto.objects.get_or_create(user_id=ONE, pk=photos[0].pk)

        ask()
        assert queries(ask) == 0
        assert ask() == (photos[0], False)


class TestWrites:
    def test_are_seen(self, photos):
        rows = CachedPhoto.objects.filter(user_id=ONE, stars__gt=2).order_by("pk")
        one = CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk)
        reads: list[Callable[[], Any]] = [
            lambda: CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk).stars,
            lambda: list(rows.all()),
            lambda: rows.count(),
            lambda: list(
                CachedPhoto.objects.filter(user_id=ONE, album_id=one.album_id).order_by("pk")
            ),
        ]
        for read in reads:
            assert is_cached(read)
        one.stars = 9
        one.save()
        assert [read() for read in reads] == [9, [one, *photos[3:]], 3, photos[:2]]
        CachedPhoto.objects.filter(user_id=ONE, stars=9).update(album=None, stars=0)
        assert [read() for read in reads] == [0, photos[3:], 2, photos[1:2]]
        photos[3].delete()
        assert [read() for read in reads] == [0, photos[4:], 1, photos[1:2]]
        for read in reads:
            assert is_cached(read)


@pytest.fixture
def proxies() -> Iterator[None]:
    """Forget the models that a test declares."""
    before = dict(apps.all_models["cached"])
    yield
    apps.all_models["cached"].clear()
    apps.all_models["cached"].update(before)
    apps.clear_cache()


class TestKeys:
    def test_the_key_is_the_primary_key(self, clock, db_all):
        board = CachedBoard.objects.create(name="b")
        alias = board._state.db
        CachedBoard.objects.filter(pk=board.pk, name="").first()
        clock.ahead += LATER
        for name in ("pk", "id"):
            get = partial(CachedBoard.objects.get, **{name: board.pk})
            assert is_cached(get, alias)
        assert is_cached(lambda: list(CachedBoard.objects.filter(id=board.pk, name="b")), alias)

    @pytest.mark.parametrize("key", ["a b", "ü\n", "x" * 100, "1", "-", "revision"])
    def test_text(self, clock, db_all, key):
        note = CachedNote.objects.create(slug=key, account=key, folder=key, text=key)
        other = CachedNote.objects.create(slug=f"{key}2", account=key, folder="", text=key)
        alias = note._state.db

        def rows() -> Any:
            return list(CachedNote.objects.filter(account=key).order_by("slug"))

        def isolated() -> Any:
            return list(CachedNote.objects.filter(account=key, folder=key))

        rows(), isolated()
        clock.ahead += LATER
        for read in (rows, isolated, lambda: CachedNote.objects.get(account=key, slug=key)):
            assert is_cached(read, alias)
        assert rows() == [note, other]
        assert isolated() == [note]
        # Django compares these with the text.
        with pytest.raises(CachedNote.DoesNotExist):
            CachedNote.objects.get(account=key, slug="nothing")

    def test_values_of_other_types(self, photos):
        pk = photos[0].pk
        for user, photo in ((str(ONE), pk), (ONE, str(pk)), (float(ONE), pk), (ONE, float(pk))):
            for _ in range(2):
                assert CachedPhoto.objects.get(user_id=user, pk=photo) == photos[0]
        for wrong in ("x", [1], object()):
            with pytest.raises((TypeError, ValueError)):
                CachedPhoto.objects.get(user_id=ONE, pk=wrong)
        for missing in (None, 2**70, -1):
            with pytest.raises(CachedPhoto.DoesNotExist):
                CachedPhoto.objects.get(user_id=ONE, pk=missing)
        with pytest.raises(FieldError):
            CachedPhoto.objects.get(user_id=ONE, pkk=1)

    def test_proxy_and_overridden_filter(self, photos, proxies):
        class Visible(CachedPhoto):
            class Meta:
                proxy = True
                app_label = "cached"

        class Hiding(ShardedQuerySet):
            def filter(self, *args: Any, **kwargs: Any) -> Any:
                return super().filter(*args, **kwargs).exclude(title="p0")

        CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk)
        found = Visible.objects.get(user_id=ONE, pk=photos[0].pk)
        assert type(found) is Visible
        assert queries(lambda: Visible.objects.get(user_id=ONE, pk=photos[0].pk)) == 0
        with pytest.raises(CachedPhoto.DoesNotExist):
            Hiding(CachedPhoto).get(user_id=ONE, pk=photos[0].pk)

    def test_a_copy_of_all_is_no_query_to_build(self, photos, monkeypatch):
        pk = photos[0].pk
        for _ in range(3):
            CachedPhoto.objects.get(user_id=ONE, pk=pk)
        monkeypatch.setattr(cached_read, "fingerprint_of", None)
        assert CachedPhoto.objects.all().all().get(user_id=ONE, pk=pk) == photos[0]

    def test_querysets_that_are_set_up_by_hand(self, photos):
        class Titles(ModelIterable):
            def __iter__(self) -> Any:
                return (photo.title for photo in super().__iter__())

        def fetching() -> Any:
            rows = CachedPhoto.objects.get_queryset()
            rows._prefetch_related_lookups = (Prefetch("comments", to_attr="said"),)
            return rows.get(user_id=ONE, pk=photos[0].pk).said

        def titles() -> Any:
            rows = CachedPhoto.objects.get_queryset()
            rows._iterable_class = Titles
            return rows.get(user_id=ONE, pk=photos[0].pk)

        for _ in range(2):
            assert fetching() == []
            assert titles() == "p0"


class TestMakers:
    """Instances of models that Django creates in another way than by setting attributes."""

    def test_from_db(self, photos, proxies):
        calls: list[Any] = []

        class Strict(CachedPhoto):
            class Meta:
                proxy = True
                app_label = "cached"

            @classmethod
            def from_db(cls, db: Any, field_names: Any, values: Any, **mode: Any) -> Any:
                calls.append((db, list(field_names), list(values), mode))
                return super().from_db(db, field_names, values, **mode)

        rows = Strict.objects.filter(user_id=ONE).order_by("pk")
        list(rows.uncached())
        plain, calls[:] = list(calls), []
        for _ in range(3):
            list(rows.all())
            assert calls == plain
            calls.clear()

    def test_a_mix_in_behind_the_model(self, photos, proxies):
        class Noted:
            def __init__(self) -> None:
                self.note = "made"

        class Mixed(CachedPhoto, Noted):
            class Meta:
                proxy = True
                app_label = "cached"

        for _ in range(3):
            assert Mixed.objects.get(user_id=ONE, pk=photos[0].pk).note == "made"

    def test_values_that_can_change(self, photos, proxies, monkeypatch):
        # Like a field of JSON.
        def from_db_value(self: Any, value: Any, expression: Any, connection: Any) -> Any:
            return [value]

        field = CachedPhoto._meta.get_field("title")
        monkeypatch.setattr(type(field), "from_db_value", from_db_value, raising=False)
        monkeypatch.setattr(lookup_plan, "_plans", {})

        class Listed(CachedPhoto):
            class Meta:
                proxy = True
                app_label = "cached"

        # The columns of a model remember their converters.
        for each in Listed._meta.concrete_fields:
            each.__dict__.pop("cached_col", None)
        with request_cache.cache_scope():
            for _ in range(3):
                found = Listed.objects.get(user_id=ONE, pk=photos[0].pk)
                assert found.title == ["p0"]
                found.title.append("changed")
                rows = list(Listed.objects.filter(user_id=ONE).order_by("pk"))
                assert rows[0].title == ["p0"]
                rows[0].title.append("changed")
