"""The cache options of ``ShardMeta``, and values as parts of names."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

import pytest
from django.apps.registry import Apps
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, models
from django.db.migrations.state import ModelState, ProjectState
from django.db.models import F
from django.test import override_settings
from django.test.utils import isolate_apps

import sharded_orm
from sharded_orm import runtime
from sharded_orm.backends.collations import (
    Collations,
    MySQLCollations,
    PostgreSQLCollations,
    SQLiteCollations,
)
from sharded_orm.cache.keys import token
from sharded_orm.models import ExactCharField, GlobalModel, ShardedModel
from sharded_orm.models.cached.cached_model import (
    NULL,
    CachedModel,
    cached_model,
    fingerprint,
    token_field,
)
from tests.cached.models import (
    CachedAlbum,
    CachedBoard,
    CachedCafe,
    CachedComment,
    CachedCountry,
    CachedNote,
    CachedPhoto,
    CachedPlace,
    CachedPost,
    PlainRow,
)
from tests.photos.models import Person, Photo

EXACT = SQLiteCollations()
COLLATIONS = {
    "sqlite": SQLiteCollations(),
    "mysql": MySQLCollations(),
    "postgresql": PostgreSQLCollations(),
    "oracle": Collations(),
}


def cached(model: Any) -> CachedModel:
    found = cached_model(model)
    assert found is not None
    return found


def test_a_sharded_model() -> None:
    found = cached(CachedPhoto)
    assert found is cached_model(CachedPhoto)
    assert found.type.sharded
    assert found.type.name.endswith("cached.CachedPhoto")
    assert (found.key.name, found.isolate.name, found.pk.name) == ("user_id", "album", "photo_id")
    assert found.options is not None
    assert found.options.group == "photos"
    assert found.place("photos_00003") == "photos_00003"
    assert len(found.aliases) == 16


def test_a_global_model() -> None:
    found = cached(CachedPost)
    assert not found.type.sharded
    assert (found.options, found.key) == (None, None)
    assert found.isolate.name == "topic"
    assert found.place("default") == found.type.name
    assert found.aliases == ("default",)
    assert found.key_token(1) is None
    assert cached(CachedCountry).isolate is None
    assert cached(CachedCountry).isolate_token(1) is None


def test_what_is_not_cached() -> None:
    for model in (Photo, Person, PlainRow, ShardedModel, CachedPhoto.tags.through, object):
        assert cached_model(model) is None


def test_a_child_is_not_cached_and_its_parent_is() -> None:
    assert cached_model(CachedCafe) is None
    assert cached(CachedPlace).model is CachedPlace


def test_nothing_is_cached_without_a_cache() -> None:
    configured = runtime.config()
    assert configured.cache is not None
    with override_settings(SHARDED_ORM={}):
        assert cached_model(CachedCountry) is None
    assert cached_model(CachedCountry) is not None


def test_a_proxy_is_its_concrete_model() -> None:
    with isolate_apps("tests.cached"):

        class PhotoProxy(CachedPhoto):
            class Meta:
                proxy = True
                app_label = "cached"
                apps = CachedPhoto._meta.apps

    try:
        assert cached_model(PhotoProxy) is cached_model(CachedPhoto)
    finally:
        del CachedPhoto._meta.apps.all_models["cached"]["photoproxy"]
        CachedPhoto._meta.apps.clear_cache()


def historical(model: Any) -> Any:
    state = ProjectState()
    plain = ModelState("cached", model.__name__, [("id", models.BigAutoField(primary_key=True))])
    state.add_model(plain)
    apps: Apps = state.apps
    return apps.get_model("cached", model.__name__)


def test_a_historical_model_is_the_installed_one_of_its_label() -> None:
    past = historical(CachedPhoto)
    assert past is not CachedPhoto
    assert cached_model(past) is cached_model(CachedPhoto)
    assert cached_model(historical(PlainRow)) is None
    gone = type("Gone", (), {})
    assert cached_model(historical(gone)) is None


@pytest.mark.django_db(databases="__all__")
def test_tokens_of_integers() -> None:
    found = cached(CachedPhoto)
    for value in (5, "5", True + 4):
        assert found.key_token(value) == "5"
        assert found.pk_token(value) == "5"
    assert found.key_token(-5) == token(-5) != token(5)
    for value in (None, "x", F("user_id"), object(), float("inf"), [5], (5,), CachedPhoto(pk=5)):
        assert found.key_token(value) is None


def test_tokens_of_isolate_keys() -> None:
    found = cached(CachedPhoto)
    assert found.isolate_token(7) == "7"
    assert found.isolate_token(CachedAlbum(pk=7)) == "7"
    # NULL is one of its values, and no other value has its token.
    assert found.isolate_token(None) == NULL
    assert found.isolate_token(CachedAlbum()) is None
    assert found.isolate_token(CachedCountry(pk=7)) is None
    assert found.isolate_token(F("album_id")) is None
    assert token(NULL) != NULL
    assert cached(CachedComment).isolate_token(CachedPhoto(photo_id=3)) == "3"


def test_tokens_of_text() -> None:
    found = cached(CachedNote)
    assert found.key_token("häns\u00a0x") == token("häns\u00a0x")
    assert found.key_token(5) == "5"
    assert found.key_token("") == token("")
    assert found.isolate_token("a-b") != found.isolate_token("a_b")
    assert found.pk_token("x" * 150) == token("x" * 150)
    assert found.key_token(F("account")) is None


def test_the_key_may_be_the_primary_key() -> None:
    found = cached(CachedBoard)
    assert found.key is found.pk
    assert found.key_token(12) == found.pk_token("12") == "12"


def test_scopes_are_remembered() -> None:
    found = cached(CachedPhoto)
    scope = found.scope("photos_00003", "5", "7")
    assert scope is found.scope("photos_00003", "5", "7")
    assert (scope.key, scope.isolate, scope.place) == ("5", "7", "photos_00003")
    assert [name.rpartition("cached.CachedPhoto")[2] for name in scope.guards] == [
        "-@photos_00003-revision",
        "-5-revision",
        "-5-7-revision",
    ]
    for number in range(5000):
        found.scope("photos_00003", str(number))
    assert found.scope.cache_info().currsize <= 2048  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("alias", "expected"),
    [
        ("photos_00003", True),
        ("photos_00015", True),
        ("photos", False),
        ("photos_template", False),
        ("photos_1", False),
        ("events_00003", False),
        ("default", False),
    ],
)
def test_aliases_with_cached_rows(alias: str, expected: bool) -> None:
    assert cached(CachedPhoto).caches_alias(alias) is expected


def test_the_alias_of_a_global_model_is_where_it_is_written() -> None:
    found = cached(CachedCountry)
    assert found.caches_alias("default")
    assert not found.caches_alias("directory")
    assert not found.caches_alias("photos_00003")


def test_an_isolate_key_that_is_no_field_is_named() -> None:
    @isolate_apps("tests.cached")
    def body() -> Any:
        class Wrong(GlobalModel):
            class Meta:
                app_label = "cached"

            class ShardMeta:
                cache = True
                isolate_key = "topics"

        return Wrong

    wrong = body()
    wrong._meta.apps = CachedPost._meta.apps
    with pytest.raises(ImproperlyConfigured, match=r"cached\.Wrong.*isolate_key names 'topics'"):
        cached_model(wrong)


def test_tokens_of_a_composite_primary_key() -> None:
    @isolate_apps("tests.cached")
    def body() -> Any:
        class Seat(GlobalModel):
            pk = models.CompositePrimaryKey("row", "number")
            row = models.DateField()
            number = models.IntegerField()

            class Meta:
                app_label = "cached"

            class ShardMeta:
                cache = True

        return Seat

    seat = body()
    seat._meta.apps = CachedPost._meta.apps
    found = cached(seat)
    day = date(2026, 1, 1)
    made = found.pk_token((day, 5))
    assert made is not None
    assert made == found.pk_token(["2026-01-01", "5"])
    assert len({made, found.pk_token((day, 51)), found.pk_token((date(2026, 1, 2), 5))}) == 3
    for value in (None, 5, (day,), (day, None), (day, 5, 6), (day, F("number"))):
        assert found.pk_token(value) is None


def field_of(field: Any) -> Any:
    @isolate_apps("tests.cached")
    def body() -> Any:
        class Some(models.Model):
            value = field

            class Meta:
                app_label = "cached"

        return Some

    return body()._meta.get_field("value")


MOMENT = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        (models.UUIDField(), uuid.UUID(int=5), uuid.UUID(int=5).hex),
        (models.UUIDField(), str(uuid.UUID(int=5)), uuid.UUID(int=5).hex),
        (models.BooleanField(), True, "1"),
        (models.BooleanField(), 1, "1"),
        (models.BooleanField(), False, "0"),
        (models.DateField(), date(2026, 1, 1), token(date(2026, 1, 1))),
        (models.DateField(), "2026-01-01", token(date(2026, 1, 1))),
        (models.SmallIntegerField(), "3", "3"),
        (models.DecimalField(max_digits=8, decimal_places=2), 3, None),
        (models.FloatField(), 3.0, None),
        (models.DateTimeField(), MOMENT, None),
        (models.BinaryField(), b"x", None),
        (models.GenericIPAddressField(), "::1", None),
        (models.JSONField(), 5, None),
    ],
)
def test_tokens_of_other_fields(field: Any, value: Any, expected: str | None) -> None:
    assert token_field(field_of(field), EXACT).token(value) == expected


@pytest.mark.parametrize(
    ("vendor", "collation", "exact", "pad"),
    [
        ("sqlite", None, True, False),
        ("sqlite", "BINARY", True, False),
        ("sqlite", "NOCASE", False, False),
        ("sqlite", "RTRIM", False, False),
        ("mysql", None, False, True),
        ("mysql", "utf8mb4_general_ci", False, True),
        ("mysql", "utf8mb4_bin", True, True),
        ("mysql", "utf8mb4_nopad_bin", True, False),
        ("mysql", "utf8mb4_0900_bin", True, False),
        ("mysql", "binary", True, False),
        ("postgresql", None, True, False),
        ("postgresql", "C", True, False),
        ("postgresql", "case_insensitive", False, False),
        ("oracle", None, False, False),
    ],
)
def test_equality_of_text(vendor: str, collation: str | None, exact: bool, pad: bool) -> None:
    field = field_of(models.CharField(max_length=20, db_collation=collation))
    found = token_field(field, COLLATIONS[vendor])
    assert found.exact is exact
    if exact:
        # Under a collation that pads, these are one value.
        assert (found.token("a ") == found.token("a")) is pad
        assert found.token("a") != found.token("A")
    else:
        assert found.token("a") is None


@pytest.mark.parametrize("vendor", ["sqlite", "mysql", "postgresql"])
def test_an_exact_field_is_exact_everywhere(vendor: str) -> None:
    found = token_field(field_of(ExactCharField(max_length=20)), COLLATIONS[vendor])
    assert len({found.token(text) for text in ("a", "A", "a ")} - {None}) == 3


@pytest.mark.mysql_settings
@pytest.mark.django_db
@pytest.mark.parametrize("collation", ["utf8mb4_bin", "utf8mb4_nopad_bin"])
def test_the_database_compares_like_that(collation: str) -> None:
    rules = MySQLCollations()
    field = field_of(models.CharField(max_length=20, db_collation=collation))
    made = token_field(field, rules)
    values = ["a", "A", "a ", " a", "a\t", "ä", "a\u0308", "ss", "ß", "", " "]
    with connection.cursor() as cursor:
        for one in values:
            for other in values:
                cursor.execute(
                    f"SELECT CONVERT(%s USING utf8mb4) COLLATE {collation}"
                    f" = CONVERT(%s USING utf8mb4) COLLATE {collation}",
                    [one, other],
                )
                assert bool(cursor.fetchone()[0]) == (made.token(one) == made.token(other)), (
                    one,
                    other,
                )


def declare(change: Callable[[dict[str, Any]], None]) -> str:
    """Return the fingerprint of a model with a changed declaration."""
    body: dict[str, Any] = {
        "title": models.CharField(max_length=100),
        "stars": models.IntegerField(default=0),
        "album": models.ForeignKey(CachedCountry, models.CASCADE, related_name="+"),
    }
    change(body)

    @isolate_apps("tests.cached")
    def make() -> Any:
        meta = type("Meta", (), {"app_label": "cached"})
        return type("Thing", (models.Model,), {"__module__": __name__, "Meta": meta, **body})

    return fingerprint(make())


def test_the_fingerprint_changes_with_the_columns_and_not_with_words() -> None:
    plain = declare(lambda body: None)
    assert plain == declare(lambda body: None)
    assert len(plain) == 8

    def described(body: dict[str, Any]) -> None:
        body["title"] = models.CharField("Title", max_length=100, help_text="x", blank=True)
        body["stars"] = models.IntegerField(default=5, choices=[(0, "none")], db_index=True)
        country = models.ForeignKey(CachedCountry, models.SET_NULL, related_name="+", blank=True)
        body["album"] = country

    assert declare(described) == plain
    changes: list[tuple[str, Any]] = [
        ("title", models.CharField(max_length=101)),
        ("title", models.TextField()),
        ("title", models.CharField(max_length=100, null=True)),
        ("title", models.CharField(max_length=100, db_column="other")),
        # Declared before the others, so it is the first: a row is a tuple in the order of the
        # fields.
        ("stars", models.IntegerField(default=0)),
        ("stars", models.BigIntegerField()),
        ("more", models.IntegerField()),
        ("album", models.ForeignKey(CachedNote, models.CASCADE, related_name="+")),
    ]
    others = {declare(lambda body, c=change: body.update([c])) for change in changes}  # type: ignore[misc]
    assert plain not in others
    assert len(others) == len(changes)


def test_a_field_may_be_called_cache() -> None:
    @isolate_apps("tests.cached")
    def body() -> Any:
        class Server(GlobalModel):
            cache = models.IntegerField()

            class Meta:
                app_label = "cached"

            class ShardMeta:
                cache = True

        return Server

    server = body()
    assert server(cache=5).cache == 5
    assert server._meta.get_field("cache").attname == "cache"


def test_names_of_the_package() -> None:
    from sharded_orm.cache.request_cache import cache_scope, uncached
    from sharded_orm.models.cached.queryset import fetch_together

    assert sharded_orm.cache_scope is cache_scope
    assert sharded_orm.uncached is uncached
    assert sharded_orm.fetch_together is fetch_together
    with pytest.raises(AttributeError, match="no attribute 'fetch'"):
        sharded_orm.fetch  # noqa: B018  the access is what raises
