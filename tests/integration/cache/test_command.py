"""``manage.py cache_stats`` and ``cache_invalidate``: their output and exit status."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings

from sharded_orm import runtime
from sharded_orm.models.cached.cached_model import cached_model
from sharded_orm.testing import cache_isolation
from tests.cached.models import CachedCountry, CachedPhoto
from tests.queries.conftest import DATABASES, ONE, SHARD, TWO
from tests.services.memcached import MemcachedServer
from tests.services.redis import RedisServer

pytestmark = pytest.mark.django_db(databases=DATABASES, transaction=True)

WIDTH = 100
Run = Callable[..., str]


def run(command: str, *arguments: str, fails: str | None = None) -> str:
    """Run a command and return its output, which must fit the terminal."""
    out = io.StringIO()
    if fails is None:
        call_command(command, *arguments, stdout=out, no_color=True)
    else:
        with pytest.raises(CommandError, match=fails):
            call_command(command, *arguments, stdout=out, no_color=True)
    if "--json" not in arguments:
        assert max(map(len, out.getvalue().splitlines()), default=0) <= WIDTH
    return out.getvalue()


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.fixture
def stores(
    transactional_db: None, memcached: MemcachedServer, redis_server: RedisServer
) -> Iterator[None]:
    """Objects on memcached, lists on Redis; under names that nobody has used."""
    caches = {"default": memcached.django(), "lists": redis_server.django()}
    cache = {"OBJECTS": "default", "LISTS": "lists", "TIMEOUT": 1.9}
    with override_settings(CACHES=caches, SHARDED_ORM={**settings.SHARDED_ORM, "CACHE": cache}):
        cache_isolation.renew()
        yield


def count(model: Any, **counts: int) -> None:
    cache, found = runtime.cache(), cached_model(model)
    assert cache is not None
    assert found is not None
    cache.statistics.add(found.type.name, **counts)


def test_models_and_servers(stores: None, memcached: MemcachedServer) -> None:
    count(CachedPhoto, object_hits=1500, list_hits=100, l1_hits=300, object_misses=95, bypasses=5)
    count(CachedPhoto, fills=90, too_large=2, refusals=1)
    text = run("cache_stats")
    assert re.match("model +hits +in request +misses +hit ratio +bypassed +stored\n", text)
    found = lines(text)
    assert ["cached.CachedPhoto", "1,600", "300", "95", "95.0%", "5", "90"] in found
    assert ["cached.CachedCountry", "0", "0", "0", "0", "0"] in found
    troubles = [" ".join(line) for line in found if line and line[0] == "cached.CachedPhoto:"]
    assert troubles == [
        "cached.CachedPhoto: 2 entries too large for the server",
        "cached.CachedPhoto: 1 writes refused because the cache could not be told",
    ]
    head = next(number for number, line in enumerate(found) if line[:1] == ["server"])
    objects, lists = found[head + 1 :]
    assert objects[:3] == ["memcached", memcached.address, "objects"]
    assert lists[-6] == "lists"
    for server in (objects, lists):
        version, items, size, evictions, milliseconds = server[-5:]
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
        assert int(items.replace(",", "")) >= 0
        assert int(size.replace(",", "")) > 0
        assert evictions == "0"
        assert 0 < float(milliseconds) < 1000


def test_json(stores: None) -> None:
    count(CachedCountry, object_hits=3, object_misses=1)
    found = json.loads(run("cache_stats", "--json"))
    (country,) = [one for one in found["models"] if one["label"] == "cached.CachedCountry"]
    assert country["counts"]["object_hits"] == 3
    assert country["hit_ratio"] == 0.75
    assert [(one["holds"], one["error"]) for one in found["servers"]] == [
        (["objects"], None),
        (["lists"], None),
    ]


def test_reset(stores: None) -> None:
    count(CachedPhoto, object_hits=3)
    assert "begin at 0" in run("cache_stats", "--reset")
    assert ["cached.CachedPhoto", "0", "0", "0", "0", "0"] in lines(run("cache_stats"))
    count(CachedPhoto, object_hits=2)
    assert ["cached.CachedPhoto", "2", "0", "0", "100.0%", "0", "0"] in lines(run("cache_stats"))


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_server_that_is_down(
    transactional_db: None, own_redis: RedisServer, memcached: MemcachedServer, arguments: Any
) -> None:
    dead = {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": "redis://somebody:s3cret@127.0.0.1:1",
    }
    cache = {"OBJECTS": "default", "LISTS": "lists"}
    with override_settings(
        CACHES={"default": memcached.django(), "lists": dead},
        SHARDED_ORM={**settings.SHARDED_ORM, "CACHE": cache},
    ):
        found = run("cache_stats", *arguments, fails="cache server .*127.0.0.1:1.* does not answer")
    assert "s3cret" not in found
    if arguments:
        assert json.loads(found)["servers"][1]["error"]
    else:
        assert lines(found)[-1][-1] == "DOWN"
        assert memcached.address in found


def test_without_a_cache() -> None:
    without = {key: value for key, value in settings.SHARDED_ORM.items() if key != "CACHE"}
    with override_settings(SHARDED_ORM=without):
        run("cache_stats", fails="there is no CACHE")
        run("cache_invalidate", "--all", fails="there is no CACHE")


@pytest.fixture
def generations(stores: None, placed: None) -> Callable[[], dict[str, str]]:
    """Return the generations of the guards of ONE and TWO, which must exist."""
    from sharded_orm.cache.guards import header, parse

    found = cached_model(CachedPhoto)
    cache = runtime.cache()
    assert found is not None
    assert cache is not None
    scopes = [found.scope(SHARD[user], str(user)) for user in (ONE, TWO)]
    for scope in scopes:
        for server in (cache.objects(scope.place), cache.lists(scope.place)):
            server.add([(name, header(1.0)) for name in scope.guards], 60)

    def read() -> dict[str, str]:
        shown: dict[str, str] = {}
        for scope in scopes:
            for server in (cache.objects(scope.place), cache.lists(scope.place)):
                raws, _, _ = server.read(scope.guards)
                for name, raw in zip(scope.guards, raws, strict=True):
                    assert raw is not None
                    key = f"{server.name} {name.partition('CachedPhoto-')[2]}"
                    shown[key] = parse(raw).generation
        return shown

    return read


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """Return the guards whose generation has changed on both servers, without the server's name."""
    found = [name.rpartition(" ")[2] for name in before if before[name] != after[name]]
    assert all(found.count(name) == 2 for name in found)
    return set(found)


def test_what_is_named_is_void(generations: Callable[[], dict[str, str]]) -> None:
    before = generations()
    found = run("cache_invalidate", "cached.CachedPhoto", f"user_id={ONE}")
    assert found == f"cached.CachedPhoto: user_id={ONE} is void.\n"
    assert changed(before, generations()) == {f"{ONE}-revision"}


def test_a_shard_is_void(generations: Callable[[], dict[str, str]]) -> None:
    before = generations()
    run("cache_invalidate", "cached.CachedPhoto", "--using", SHARD[TWO])
    assert changed(before, generations()) == {f"@{SHARD[TWO]}-revision"}


@pytest.mark.parametrize("what", ["--all", "cached.CachedPhoto"])
def test_all_shards_are_void(generations: Callable[[], dict[str, str]], what: str) -> None:
    before = generations()
    connections["photos"].close()
    run("cache_invalidate", what)
    # No shard was connected to.
    shards = connections["photos"].shards  # type: ignore[attr-defined]
    assert [wrapper.alias for wrapper in shards if wrapper.connection is not None] == []
    tables = {f"@{SHARD[user]}-revision" for user in (ONE, TWO)}
    assert changed(before, generations()) == tables


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Name models, or use --all"),
        (["cached.CachedPhoto", "--all"], "Name models, or use --all"),
        (["--all", "user_id=1"], "name one"),
        (["cached.CachedPhoto", "cached.CachedTag", "user_id=1"], "name one"),
        (["cached.CachedPhoto", "user=1"], "unknown name 'user'"),
        (["cached.CachedPhoto", "user_id=x"], "'x' is no value"),
        (["cached.CachedPhoto", "pk=1"], "needs 'user_id'"),
        (["cached.Nothing"], r"no model 'cached\.Nothing'"),
        (["nonsense"], "no model 'nonsense'"),
        (["cached.PlainRow"], r"'cached\.PlainRow' is not cached; cached models are"),
        (["cached.CachedPhoto", f"user_id={10**22}"], "less than or equal to 9223372036854775807"),
        (["cached.CachedPhoto", "user_id=1", f"pk={10**22}"], "less than or equal to"),
        (["cached.CachedPhoto", "user_id=1", f"album_id={10**22}"], "less than or equal to"),
        (["cached.CachedPhoto", "--using", "default"], "'default' holds no cached rows"),
        *(
            (
                ["cached.CachedPhoto", "--using", alias],
                "no shard of group 'photos', whose .* 0 to 15",
            )
            for alias in (
                "photos_00099",
                "photos_\u0660\u0660\u0660\u0660\u0661",
                "photos_" + "9" * 5000,
            )
        ),
        (
            ["cached.CachedPhoto", "user_id=1", "--using", "photos_00099"],
            "no shard of group 'photos'",
        ),
        *(
            (["--all", "--using", alias], f"There is neither a shard nor a database {alias!r}")
            for alias in (
                "photos_00099",
                "nonesuch",
                "photos_1",
                "photos_\u0660\u0660\u0660\u0660\u0661",
            )
        ),
        (["--all", "--using", "tickets_1"], "'tickets_1' holds rows of no cached model"),
    ],
)
def test_what_is_refused(arguments: list[str], message: str) -> None:
    assert run("cache_invalidate", *arguments, fails=message) == ""


@pytest.mark.parametrize(
    "alias", ["photos_00099", "photos_\u0660\u0660\u0660\u0660\u0661", "photos_1"]
)
def test_neither_does_a_program_forget_rows_of_no_shard(stores: None, alias: str) -> None:
    with pytest.raises(ValueError, match="no shard of group 'photos'"):
        CachedPhoto.cache.invalidate(using=alias)


def test_a_server_that_is_down_when_it_should_forget(placed: None) -> None:
    dead = {
        "BACKEND": "django.core.cache.backends.memcached.PyMemcacheCache",
        "LOCATION": "127.0.0.1:1",
    }
    with override_settings(CACHES={"default": dead}):
        run(
            "cache_invalidate", "cached.CachedCountry",
            fails=r"(?s)127\.0\.0\.1:1.*Repeat this when the cache server answers",
        )  # fmt: skip
