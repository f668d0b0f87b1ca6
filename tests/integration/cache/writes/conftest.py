"""Keys on known shards, and caches on each kind of store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from django.test import override_settings

from sharded_orm import runtime
from sharded_orm.cache.client import CacheClient
from sharded_orm.cache.closings import closing_queue
from sharded_orm.cache.stores.base import CacheServer
from sharded_orm.cache.stores.factory import open_servers
from sharded_orm.models.cached import cached_model

from .recording import Recorded, Recorder

ONE, NEAR, TWO = 1, 3, 2
SHARD = {ONE: "photos_00003", NEAR: "photos_00003", TWO: "photos_00012"}


@pytest.fixture
def placed(transactional_db: None) -> None:
    store = runtime.strategy("photos").store  # type: ignore[attr-defined]
    store.place("photos", {str(key): int(alias[-5:]) for key, alias in SHARD.items()})


@pytest.fixture(params=["local", "memcached", "redis"])
def entry(request: pytest.FixtureRequest) -> dict[str, Any]:
    """An entry of ``CACHES`` for each kind of store."""
    if request.param == "local":
        backend = "django.core.cache.backends.locmem.LocMemCache"
        return {"BACKEND": backend, "LOCATION": uuid.uuid4().hex}
    name = {"memcached": "memcached", "redis": "redis_server"}[request.param]
    settings: dict[str, Any] = request.getfixturevalue(name).django()
    return settings


@pytest.fixture
def local_entry() -> dict[str, Any]:
    backend = "django.core.cache.backends.locmem.LocMemCache"
    return {"BACKEND": backend, "LOCATION": uuid.uuid4().hex}


def make(
    caches: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> Iterator[Recorded]:
    events: list[tuple[str, str, tuple[str, ...]]] = []

    def opener(alias: str, addresses: Any) -> Sequence[CacheServer]:
        return [Recorder(server, events) for server in open_servers(alias, addresses)]

    with override_settings(CACHES=caches):
        configured = runtime.config().cache
        assert configured is not None
        addresses = {"objects": "default", "lists": "default", "prefix": uuid.uuid4().hex[:8]}
        cache = CacheClient(replace(configured, **{**addresses, **options}), opener)
        monkeypatch.setattr(runtime, "_cache", cache)
        cached_model.forget()
        closing_queue._renew()
        yield Recorded(cache, events)
        cache.close()
        closing_queue._renew()
    cached_model.forget()


@pytest.fixture
def recorded(
    entry: dict[str, Any], placed: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Recorded]:
    """One cache for objects and lists, on each kind of store."""
    yield from make({"default": entry}, monkeypatch)


@pytest.fixture
def local(
    local_entry: dict[str, Any], placed: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Recorded]:
    """One cache in memory, for tests where the store does not matter."""
    yield from make({"default": local_entry}, monkeypatch)
