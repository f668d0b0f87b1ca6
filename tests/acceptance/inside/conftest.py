"""Tests that run with the settings of the site (``--ds=testproject.settings``)."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from sharded_orm import runtime
from testproject.photos.models import Photo
from testproject.photos.publication import publish

User = get_user_model()


@pytest.fixture(autouse=True)
def _quick_passwords(settings: Any) -> None:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture
def ada() -> Any:
    return User.objects.create_user("ada", password="secret", first_name="Ada", last_name="O.")


@pytest.fixture
def bela() -> Any:
    return User.objects.create_user("bela", password="secret")


@pytest.fixture
def dunes(ada: Any) -> Photo:
    return publish(ada, "Dunes <at> dawn", new_album="Coast", tags=["sand"])


@pytest.fixture
def lake(bela: Any) -> Photo:
    return publish(bela, "Lake", new_album="Coast")


@pytest.fixture
def apart(dunes: Photo) -> Any:
    """A user whose shard is not ada's."""
    for number in range(200):
        user = User.objects.create_user(f"user{number}")
        if runtime.place("photos", user.pk).alias != dunes.shard_alias:
            return user
    raise AssertionError("all users are on one shard")


@pytest.fixture
def elsewhere(apart: Any) -> Photo:
    return publish(apart, "Elsewhere", new_album="Coast", tags=["sand"])


@pytest.fixture
def browser() -> Client:
    return Client()


@pytest.fixture
def as_bela(bela: Any) -> Client:
    client = Client(enforce_csrf_checks=True)
    client.force_login(bela)
    return client
