"""Objects that are found by a value that is given (P11)."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connections
from django.db.models.signals import post_save
from django.test.utils import isolate_apps

from sharded_orm.contrib.lookups.exceptions import LookupValueTaken
from sharded_orm.contrib.objects import ObjectLookup
from sharded_orm.contrib.objects.exceptions import (
    DamagedObject,
    InvalidObjectType,
    InvalidValue,
)
from tests.integration.objects.conftest import DATABASES, on, set_body
from tests.pinboards.models import FacebookUsers, User

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=[*DATABASES, "events"]),
]


def test_the_md5_of_a_value_names_its_shard() -> None:
    user = on(User, 3, name="Ada")
    FacebookUsers.objects.claim("1.2.3.4", user)
    row = FacebookUsers.objects.get(pk="1.2.3.4")
    # 1537 of 4096 shards; the published 1524 is not what md5 gives.
    assert (row._state.db, 1537 % 8) == ("events_00001", 1)
    assert FacebookUsers.objects.find("1.2.3.4") == user


def test_a_value_leads_to_one_object() -> None:
    ada, bob = on(User, 3, name="Ada"), on(User, 4, name="Bob")
    FacebookUsers.objects.claim("ada", ada)
    FacebookUsers.objects.claim("ada", ada)
    with pytest.raises(LookupValueTaken, match="'ada' is taken"):
        FacebookUsers.objects.claim("ada", bob)
    FacebookUsers.objects.claim("Ada", bob)  # compared exactly
    assert FacebookUsers.objects.find_many(["ada", "Ada", "eve"]) == {"ada": ada, "Ada": bob}
    assert not FacebookUsers.objects.release("ada", bob)
    assert FacebookUsers.objects.release("ada", ada)
    with pytest.raises(User.DoesNotExist):
        FacebookUsers.objects.find("ada")


def test_the_value_of_a_deleted_object_goes_to_a_new_one() -> None:
    first, created = FacebookUsers.objects.find_or_create("4711", name="Ada")
    assert created
    assert FacebookUsers.objects.find_or_create("4711", name="x") == (first, False)
    first.delete()
    with pytest.raises(User.DoesNotExist):
        FacebookUsers.objects.find("4711")
    second, created = FacebookUsers.objects.find_or_create("4711", name="Bob")
    assert (created, FacebookUsers.objects.find("4711").name) == (True, "Bob")
    assert second.pk != first.pk


def test_an_object_that_a_manager_hides_keeps_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    class LateManager(type(User.objects)):  # type: ignore[misc]  # the class is computed
        def get_queryset(self) -> Any:
            return super().get_queryset().filter(version__gt=1)

    late = LateManager()
    late.model, late.name = User, "objects"
    monkeypatch.setattr(User, "objects", late)
    ada, _ = FacebookUsers.objects.find_or_create("4711", name="Ada")
    assert FacebookUsers.objects.find_or_create("4711", name="Bob") == (ada, False)
    assert FacebookUsers.objects.find("4711") == ada
    assert FacebookUsers.objects.find_many(["4711"]) == {"4711": ada}


def test_the_object_of_a_faster_process_may_be_deleted_at_once() -> None:
    others: list[Any] = []

    def be_faster(**kwargs: Any) -> None:
        if not others:
            others.append(None)
            others[0], created = FacebookUsers.objects.find_or_create("4711", name="Bob")
            assert created
            others[0].delete()

    post_save.connect(be_faster, sender=User)
    try:
        ada, created = FacebookUsers.objects.find_or_create("4711", name="Ada")
    finally:
        post_save.disconnect(be_faster, sender=User)
    assert (ada.name, created, FacebookUsers.objects.find("4711")) == ("Ada", True, ada)
    assert set(User.objects.with_deleted().scatter()) == {ada, *others}


def test_a_damaged_object_keeps_its_value() -> None:
    user, _ = FacebookUsers.objects.find_or_create("4711", name="Ada")
    set_body(user, "[]")
    with pytest.raises(DamagedObject):
        FacebookUsers.objects.find_or_create("4711", name="Bob")
    found = FacebookUsers.objects.find_many(["4711"])
    assert (found, set(found.damaged)) == ({}, {"4711"})
    assert FacebookUsers.objects.get(pk="4711").target_id == user.pk


@pytest.mark.parametrize("value", ["x" * 256, "a\0b", "\ud800", None])
def test_a_value_that_cannot_be_stored_creates_no_object(value: str) -> None:
    with pytest.raises(InvalidValue, match="cannot lead to"):
        FacebookUsers.objects.find_or_create(value, name="Ada")
    assert not User.objects.scatter().exists()
    with pytest.raises(InvalidValue):
        FacebookUsers.objects.claim(value, on(User, 3, name="Ada"))
    with pytest.raises(User.DoesNotExist):
        FacebookUsers.objects.find(value)
    FacebookUsers.objects.claim("4711", ada := on(User, 3, name="Ada"))
    assert FacebookUsers.objects.find_many([value, "4711"]) == {"4711": ada}
    assert not FacebookUsers.objects.release(value, ada)


@isolate_apps("tests.pinboards")
def test_a_proxy_of_a_lookup_finds_the_same_objects() -> None:
    class NamedUsers(FacebookUsers):
        class Meta:
            proxy = True
            app_label = "pinboards"

    FacebookUsers.objects.claim("ada", ada := on(User, 3, name="Ada"))
    assert NamedUsers.objects.find("ada") == ada
    assert NamedUsers.objects.release("ada", ada)
    assert FacebookUsers.objects.find_many(["ada"]) == {}


@isolate_apps("tests.pinboards")
def test_a_lookup_inherits_from_an_abstract_one() -> None:
    class UserLookup(ObjectLookup):
        target = User

        class Meta:
            abstract = True

        class LookupMeta:
            group = "events"

    class GoogleUsers(UserLookup):
        class Meta:
            app_label = "pinboards"

    assert GoogleUsers.target is User
    with pytest.raises(InvalidObjectType, match="derives from GoogleUsers"):

        class MoreUsers(GoogleUsers):
            class Meta:
                app_label = "pinboards"


def test_a_value_that_is_released_meanwhile_can_be_claimed() -> None:
    ada, bob = on(User, 3, name="Ada"), on(User, 4, name="Bob")
    FacebookUsers.objects.claim("4711", ada)
    alias = FacebookUsers.objects.get(pk="4711")._state.db

    released = False

    def release_once(execute: Any, sql: str, *arguments: Any) -> Any:
        nonlocal released
        if sql.startswith("SELECT") and not released:
            released = True
            assert FacebookUsers.objects.release("4711", ada)
        return execute(sql, *arguments)

    with connections[alias].execute_wrapper(release_once):
        FacebookUsers.objects.claim("4711", bob)
    assert released and FacebookUsers.objects.find("4711") == bob
