"""Objects that are found by a value that is given (P11)."""

from __future__ import annotations

import pytest

from sharded_orm.contrib.lookups.exceptions import LookupValueTaken
from sharded_orm.contrib.objects.exceptions import DamagedObject, InvalidValue
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
