"""get_or_create() and update_or_create() refuse an expression before they look the row up."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from django.core.exceptions import FieldError
from django.db import connections
from django.db.models import F, Subquery, Value
from django.db.models.functions import Upper
from django.db.models.signals import pre_save
from django.db.transaction import atomic
from django.test.utils import CaptureQueriesContext
from django.utils.functional import SimpleLazyObject

from sharded_orm.exceptions import CrossShardRelation
from tests.photos.models import Person, Photo
from tests.queries.conftest import DATABASES, ONE, SHARD, TWO

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

OF_ALL_KEYS = Subquery(Photo.objects.values("title")[:1])
OF_ANOTHER_KEY = Subquery(Photo.objects.filter(user_id=TWO).values("title")[:1])
OF_ONE_KEY = Subquery(Photo.objects.filter(user_id=ONE).order_by("stars").values("title")[:1])
WRITES = [
    {"defaults": {"title": OF_ALL_KEYS}},
    {"defaults": {"title": OF_ANOTHER_KEY}},
    {"defaults": {"title": Upper(OF_ANOTHER_KEY)}},
]
CREATE_DEFAULTS: dict[str, Any] = {
    "defaults": {"title": "new"},
    "create_defaults": {"title": OF_ALL_KEYS},
}


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize(
    ("method", "values"),
    [
        *[
            (method, values)
            for method in ("get_or_create", "update_or_create")
            for values in WRITES
        ],
        ("update_or_create", CREATE_DEFAULTS),
    ],
)
def test_a_refusal_comes_before_anything_is_sent(
    placed: None, method: str, values: dict[str, Any], *, is_stored: bool
) -> None:
    if is_stored:
        Photo.objects.create(user_id=ONE, stars=1)
        Person.objects.create(username="x")
    pinned = Photo.objects.using(SHARD[ONE])
    calls = [
        (Photo.objects, {"user_id": ONE, "stars": 1}),
        (pinned, {"user_id": ONE, "stars": 1}),
        (Person.objects, {"username": "x"}),
    ]
    for rows, lookup in calls:
        arguments = values
        if rows is Person.objects:
            arguments = {kind: {"username": each["title"]} for kind, each in values.items()}
        with ExitStack() as stack:
            sent = [
                stack.enter_context(CaptureQueriesContext(connections[alias]))  # type: ignore[arg-type]  # a shard's
                for alias in ("default", SHARD[ONE], SHARD[TWO])
            ]
            with pytest.raises(CrossShardRelation):
                getattr(rows, method)(**arguments, **lookup)
            assert not any(map(len, sent))


def test_what_the_shard_can_compute_is_written(placed: None) -> None:
    Photo.objects.create(user_id=ONE, stars=1, title="a")
    lookup = {"user_id": ONE, "stars": 2}
    for value, title in ((Upper(Value("b")), "B"), (OF_ONE_KEY, "a"), (Upper("title"), "A")):
        Photo.objects.update_or_create(
            **lookup, defaults={"title": value}, create_defaults={"title": Upper(Value("b"))}
        )
        assert Photo.objects.get(**lookup).title == title


def test_a_lazy_default_of_a_row_that_is_found_is_not_evaluated(placed: None) -> None:
    person = Person.objects.create(username="x")

    def read() -> str:
        raise AssertionError("the default was evaluated")

    defaults = {"username": SimpleLazyObject(read)}
    assert Person.objects.get_or_create(username="x", defaults=defaults) == (person, False)


def test_values_are_checked_again_for_another_shard(
    placed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is deleted after it was found. A new one belongs on the shard of its key."""
    shards = iter([SHARD[TWO], SHARD[ONE]])
    monkeypatch.setattr(Photo.objects.none().__class__, "_alias_of_lookup", lambda *_: next(shards))
    with (
        CaptureQueriesContext(connections[SHARD[ONE]]) as sent,  # type: ignore[arg-type]  # a shard's
        pytest.raises(CrossShardRelation),
    ):
        Photo.objects.get_or_create(stars=1, defaults={"user_id": ONE, "title": OF_ANOTHER_KEY})
    assert next(shards, None) is None
    assert len(sent) == 0


def test_columns_of_a_row_that_may_be_new_are_refused_by_django(placed: None) -> None:
    stored = Photo.objects.create(user_id=ONE, stars=1, title="a")
    found = Photo.objects.get_or_create(user_id=ONE, stars=1, defaults={"title": F("stars")})
    assert found == (stored, False)
    with pytest.raises(FieldError):
        Photo.objects.get_or_create(user_id=ONE, stars=2, defaults={"title": F("absent")})
    with pytest.raises(ValueError, match=r"F\(\) expressions can only be used to update"):
        Photo.objects.get_or_create(user_id=ONE, stars=2, defaults={"title": F("stars")})


def _lazy(expression: Any) -> Any:
    return SimpleLazyObject(lambda: expression)


@pytest.mark.parametrize("expression", [OF_ALL_KEYS, Upper(OF_ANOTHER_KEY)])
def test_a_lazy_object_of_an_expression_is_checked_as_the_expression(
    placed: None, expression: Any
) -> None:
    stored = Photo.objects.create(user_id=ONE, stars=1, title="a")
    person = Person.objects.create(username="x")
    one = {"user_id": ONE, "stars": 1}
    new = {"user_id": ONE, "stars": 2}

    def save() -> None:
        stored.title = _lazy(expression)
        stored.save(update_fields=["title"])

    def bulk_update() -> None:
        stored.title = _lazy(expression)
        Photo.objects.bulk_update([stored], ["title"])

    calls: list[Any] = [
        lambda: Photo.objects.get_or_create(**new, defaults={"title": _lazy(expression)}),
        lambda: Photo.objects.update_or_create(**one, defaults={"title": _lazy(expression)}),
        lambda: Photo.objects.update_or_create(
            **new, defaults={"title": "b"}, create_defaults={"title": _lazy(expression)}
        ),
        lambda: Photo.objects.create(**new, title=_lazy(expression)),
        lambda: Photo.objects.bulk_create([Photo(**new, title=_lazy(expression))]),
        lambda: Photo.objects.filter(**one).update(title=_lazy(expression)),
        save,
        bulk_update,
        lambda: Person.objects.create(username=_lazy(expression)),
        lambda: Person.objects.get_or_create(
            username="y", defaults={"username": _lazy(expression)}
        ),
        lambda: Person.objects.update_or_create(
            username="x", defaults={"username": _lazy(expression)}
        ),
        lambda: Person.objects.filter(pk=person.pk).update(username=_lazy(expression)),
    ]
    for call in calls:
        # save() evaluates the object inside its own block, as Django does.
        with pytest.raises(CrossShardRelation), atomic(), atomic(using=SHARD[ONE]):
            call()
    assert [photo.title for photo in Photo.objects.filter(user_id=ONE)] == ["a"]
    assert [each.username for each in Person.objects.all()] == ["x"]


def test_a_lazy_object_of_what_the_shard_can_compute_is_written(placed: None) -> None:
    Photo.objects.create(user_id=ONE, stars=1, title="a")
    for value, title in ((Value("b"), "b"), (OF_ONE_KEY, "a")):
        lookup = {"user_id": ONE, "stars": 2}
        Photo.objects.filter(**lookup).delete()
        Photo.objects.create(**lookup, title=_lazy(value))
        assert Photo.objects.get(**lookup).title == title
        Photo.objects.update_or_create(**lookup, defaults={"title": _lazy(value)})
        assert Photo.objects.get(**lookup).title == title


def test_a_lazy_object_beside_the_fields_is_not_evaluated(placed: None) -> None:
    def read() -> str:
        raise AssertionError("the attribute was evaluated")

    photo = Photo(user_id=ONE, stars=1, title="a")
    photo.other = SimpleLazyObject(read)  # type: ignore[attr-defined]  # no field of the model
    photo.save()
    photo.save()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_lazy_object_is_evaluated_after_pre_save(placed: None, is_new: bool) -> None:
    """A receiver may replace the object, which is not evaluated then, as in Django."""

    def read() -> str:
        raise AssertionError("the value was evaluated")

    def replace(instance: Any, **kwargs: Any) -> None:
        instance.__dict__[name] = "b"

    for model, name, values in (
        (Photo, "title", {"user_id": ONE, "stars": 1}),
        (Person, "username", {}),
    ):
        row = model(**values, **{name: "a"})
        if not is_new:
            row.save()
        row.__dict__[name] = SimpleLazyObject(read)
        pre_save.connect(replace, sender=model)
        try:
            row.save()
        finally:
            pre_save.disconnect(replace, sender=model)
        assert getattr(model.objects.get(**values, **{name: "b"}), name) == "b"
