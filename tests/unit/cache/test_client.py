"""The server of each entry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from sharded_orm import runtime
from sharded_orm.cache.client import CacheClient
from sharded_orm.cache.keys import node_index
from sharded_orm.cache.stores.base import CacheServer
from sharded_orm.cache.stores.local import LocalServer
from sharded_orm.conf import CacheOptions

LOCAL = "django.core.cache.backends.locmem.LocMemCache"
PLACES = [f"photos_{number:05d}" for number in range(64)]


def servers(count: int) -> Any:
    made: dict[str, list[CacheServer]] = {}

    def open_servers(alias: str, options: CacheOptions) -> Sequence[CacheServer]:
        return made.setdefault(alias, [LocalServer(f"{alias}{n}") for n in range(count)])

    return open_servers


def options(lists: str = "default", **others: Any) -> CacheOptions:
    return CacheOptions("default", lists, **others)


@pytest.fixture(autouse=True)
def _two_aliases() -> Iterator[None]:
    entry = {"BACKEND": LOCAL, "LOCATION": "service"}
    with override_settings(CACHES={"default": entry, "lists": {**entry, "LOCATION": "lists"}}):
        yield


def test_a_place_has_one_server_for_ever() -> None:
    cache = CacheClient(options(), servers(3))
    used = {cache.objects(place).name for place in PLACES}
    assert used == {"memory default0", "memory default1", "memory default2"}
    for place in PLACES:
        expected = f"memory default{node_index(place, 3)}"
        assert cache.objects(place).name == cache.objects(place).name == expected
        # In another process, and in one that located other entries before.
        assert CacheClient(options(), servers(3)).objects(place).name == expected


def test_objects_and_lists_on_one_store_share_their_servers() -> None:
    cache = CacheClient(options(), servers(2))
    assert cache.shares_store
    assert all(cache.objects(place) is cache.lists(place) for place in PLACES)
    assert [server.name for server in cache.servers] == ["memory default0", "memory default1"]


def test_objects_and_lists_on_two_stores() -> None:
    cache = CacheClient(options("lists"), servers(1))
    assert not cache.shares_store
    assert cache.objects("photos_00001").name == "memory default0"
    assert cache.lists("photos_00001").name == "memory lists0"
    assert [server.name for server in cache.servers] == ["memory default0", "memory lists0"]
    assert cache.guard_ttl == 2 * cache.options.ttl


def test_two_aliases_of_the_same_servers_share_them() -> None:
    def open_servers(alias: str, options: CacheOptions) -> Sequence[CacheServer]:
        return [LocalServer("a"), LocalServer("b")]

    cache = CacheClient(options("lists"), open_servers)
    assert cache.shares_store
    assert all(cache.objects(place) is cache.lists(place) for place in PLACES)


def test_the_same_servers_in_another_order_are_two_stores() -> None:
    def open_servers(alias: str, options: CacheOptions) -> Sequence[CacheServer]:
        return [LocalServer(name) for name in ("ab" if alias == "default" else "ba")]

    cache = CacheClient(options("lists"), open_servers)
    assert not cache.shares_store
    assert all(cache.objects(place).name != cache.lists(place).name for place in PLACES)


def test_names_begin_with_the_prefixes() -> None:
    assert CacheClient(options(), servers(1)).type_name("photos.Photo") == "photos.Photo"
    assert (
        CacheClient(options(prefix="a"), servers(1)).type_name("photos.Photo") == "a:photos.Photo"
    )
    # Two projects that share a server under Django's cache share it here, too.
    entry = {"BACKEND": LOCAL, "KEY_PREFIX": "shop", "VERSION": 2}
    with override_settings(CACHES={"default": entry}):
        found = CacheClient(options(prefix="a"), servers(1)).type_name("photos.Photo")
    assert found.endswith("a:photos.Photo")
    assert "shop" in found


def test_the_runtime_makes_it_once_and_anew_after_settings_change() -> None:
    made = runtime.cache()
    assert made is not None
    assert made is runtime.cache()
    assert made is runtime.used_cache()
    with override_settings(CACHES={"default": {"BACKEND": LOCAL, "LOCATION": "another"}}):
        other = runtime.cache()
        assert other is not None
        assert other is not made
        assert [server.name for server in other.servers] == ["memory another"]
    with override_settings(SHARDED_ORM={}):
        assert runtime.cache() is None
    assert runtime.cache() is not None


def test_an_alias_that_cannot_be_used_is_an_error_at_first_use() -> None:
    dummy = {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}
    with override_settings(CACHES={"default": dummy}):
        with pytest.raises(ImproperlyConfigured, match="DummyCache"):
            runtime.cache()
