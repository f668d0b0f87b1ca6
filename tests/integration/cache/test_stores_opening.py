"""Servers from an entry of ``CACHES``."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.cache.backends.memcached import PyMemcacheCache
from django.core.exceptions import ImproperlyConfigured

from sharded_orm.cache.stores import factory
from sharded_orm.cache.stores.base import CacheEntry, CacheServer, ServerDown
from sharded_orm.cache.stores.factory import DJANGO_REDIS, LOCAL, MEMCACHED, REDIS
from sharded_orm.conf import CacheOptions
from tests.conftest import service_missing
from tests.services import ServiceMissing, find_program
from tests.services.memcached import MemcachedServer
from tests.services.redis import RedisServer
from tests.services.server import HOST, free_port

OPTIONS = CacheOptions(objects="tested", lists="tested", timeout=5.0)


class OwnCache(PyMemcacheCache):
    """A project's subclass."""


def opened(settings: Any, **entry: Any) -> list[CacheServer]:
    settings.CACHES = {"tested": entry}
    return list(factory.open_servers("tested", OPTIONS))


def names(settings: Any, **entry: Any) -> list[str]:
    return [server.name for server in opened(settings, **entry)]


def works(server: CacheServer) -> bool:
    try:
        return server.fill([CacheEntry("works", b"yes")], 5)[0] == [True]
    finally:
        server.close()


def test_memcached_may_be_several_servers(settings: Any) -> None:
    several = ["memcached 10.0.0.1:11211", "memcached cache.example:1", "memcached unix:/run/m"]
    given = [each.removeprefix("memcached ") for each in several]
    for location in (given, tuple(given), ",".join(given), "; ".join(given)):
        assert names(settings, BACKEND=MEMCACHED, LOCATION=location) == several


def test_services_of_other_sentinels_are_other_servers(settings: Any) -> None:
    def service(*sentinels: tuple[str, int]) -> list[str]:
        return names(
            settings,
            BACKEND=DJANGO_REDIS,
            LOCATION="redis://site/2",
            OPTIONS={
                "CLIENT_CLASS": "django_redis.client.SentinelClient",
                "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
                "SENTINELS": list(sentinels),
            },
        )

    assert service(("10.0.0.2", 26379), ("10.0.0.1", 26379)) == [
        "redis site of 10.0.0.1:26379,10.0.0.2:26379/2"
    ]
    assert service(("10.0.0.3", 26379)) == ["redis site of 10.0.0.3:26379/2"]


def test_a_subclass_of_a_backend_is_one(settings: Any) -> None:
    backend = f"{__name__}.{OwnCache.__qualname__}"
    sys.modules.setdefault(__name__, sys.modules[OwnCache.__module__])
    assert names(settings, BACKEND=backend, LOCATION="h:1") == ["memcached h:1"]


@pytest.mark.parametrize("backend", [DJANGO_REDIS, REDIS])
def test_further_urls_of_redis_are_replicas_which_are_not_used(settings: Any, backend: str) -> None:
    urls = ["redis://one:1/2", "redis://two:2/2"]
    for location in (urls, ",".join(urls), urls[0]):
        assert names(settings, BACKEND=backend, LOCATION=location) == ["redis one:1/2"]


def test_each_url_of_a_sharding_client_is_a_server(settings: Any) -> None:
    found = names(
        settings,
        BACKEND=DJANGO_REDIS,
        LOCATION=["redis://one:1/0", "unix:///run/redis?db=3"],
        OPTIONS={"CLIENT_CLASS": "django_redis.client.ShardClient"},
    )
    assert found == ["redis one:1/0", "redis /run/redis/3"]


def test_memory_is_one_per_location(settings: Any) -> None:
    (one,) = opened(settings, BACKEND=LOCAL, LOCATION="one", OPTIONS={"MAX_ENTRIES": 7})
    (again,) = opened(settings, BACKEND=LOCAL, LOCATION="one")
    (other,) = opened(settings, BACKEND=LOCAL)
    assert one is again
    assert one is not other
    assert one.info()["max_entries"] == 7


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"BACKEND": "django.core.cache.backends.db.DatabaseCache"}, "not one of"),
        ({"BACKEND": "no.such.Backend"}, "not one of"),
        ({"BACKEND": "json.loads"}, "not one of"),
        ({}, "not one of"),
        ({"BACKEND": MEMCACHED}, "no LOCATION"),
        ({"BACKEND": DJANGO_REDIS, "LOCATION": []}, "no LOCATION"),
    ],
)
def test_what_cannot_be_used_is_told(settings: Any, entry: Any, words: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=words):
        opened(settings, **entry)
    assert words in (factory.problem("tested") or "")


def test_an_alias_that_is_not_there(settings: Any) -> None:
    settings.CACHES = {"default": {"BACKEND": LOCAL}}
    assert factory.problem("tested") == "CACHES has 'default' only"
    assert factory.problem("default") is None


_WITHOUT = """
import sys
for package in ("pymemcache", "redis", "django_redis"):
    sys.modules[package] = None  # as if it were not installed
from django.conf import settings
settings.configure(CACHES={
    "m": {"BACKEND": "%s", "LOCATION": "h:1"},
    "r": {"BACKEND": "%s", "LOCATION": "redis://h"},
    "d": {"BACKEND": "%s", "LOCATION": "redis://h"},
    "l": {"BACKEND": "%s"},
})
from sharded_orm.cache.stores.factory import problem
for alias in "mrdl":
    print(problem(alias))
"""


def test_a_missing_client_library_is_named_with_its_extra() -> None:
    script = _WITHOUT % (MEMCACHED, DJANGO_REDIS, REDIS, LOCAL)
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert output == [
        'pymemcache is not installed: pip install "sharded-orm[memcached]"',
        'django_redis is not installed: pip install "sharded-orm[redis]"',
        'redis is not installed: pip install "sharded-orm[redis]"',
        "None",
    ]


def test_prefix_and_version_of_an_alias_keep_projects_apart(settings: Any) -> None:
    settings.CACHES = {
        "plain": {"BACKEND": LOCAL},
        "a": {"BACKEND": LOCAL, "KEY_PREFIX": "shop"},
        "b": {"BACKEND": LOCAL, "KEY_PREFIX": "shop", "VERSION": 2},
        "odd": {"BACKEND": LOCAL, "KEY_PREFIX": "a b:\n"},
    }
    assert factory.name_prefix("plain") == factory.name_prefix("plain", "plain") == ""
    assert factory.name_prefix("a") == factory.name_prefix("a", "a") == "shop:"
    assert factory.name_prefix("b") == "shop:2::"
    assert factory.name_prefix("a", "b") == "shop:shop:2::"
    assert factory.name_prefix("odd") == "a%20b%3A%0A:"


# ##### Options that decide whether a connection can be opened #####


@pytest.mark.parametrize("where", ["url", "options", "pool"])
def test_the_password_of_redis(settings: Any, redis_server: RedisServer, where: str) -> None:
    secret, url = redis_server.password, redis_server.url
    options: dict[str, Any] = {}
    if where == "url":
        url = url.replace("//", f"//:{secret}@")
    elif where == "options":
        options = {"PASSWORD": secret}
    else:
        options = {"CONNECTION_POOL_KWARGS": {"password": secret, "username": "default"}}
    (server,) = opened(settings, BACKEND=DJANGO_REDIS, LOCATION=url, OPTIONS=options)
    assert works(server)
    assert secret not in server.name


@pytest.mark.parametrize("given", [None, "wrong-secret"])
def test_a_wrong_password_is_told_without_it(
    settings: Any, redis_server: RedisServer, given: str | None
) -> None:
    (server,) = opened(
        settings,
        BACKEND=DJANGO_REDIS,
        LOCATION=redis_server.url,
        OPTIONS={"PASSWORD": given} if given else {},
    )
    with pytest.raises(ServerDown, match=r"WRONGPASS|NOAUTH") as caught:
        server.read(["x"])
    error: BaseException | None = caught.value
    while error is not None:
        # The text that an error page or an error reporting service may show.
        stack = traceback.TracebackException.from_exception(error, capture_locals=True)
        ours = [frame for frame in stack.stack if __file__ != frame.filename]
        assert "wrong-secret" not in str(error)
        assert not any("wrong-secret" in str(frame.locals) for frame in ours)
        error = error.__cause__ or error.__context__
    server.close()


@pytest.mark.parametrize(
    ("place", "cause"),
    [
        ("127.0.0.1:1", r"ConnectionRefusedError: \[Errno 111\] Connection refused"),
        ("no.such.host.invalid:6379", r"gaierror: \[Errno -\d\] "),
    ],
)
def test_a_redis_that_cannot_be_reached_is_named_with_the_cause(
    settings: Any, place: str, cause: str
) -> None:
    (server,) = opened(settings, BACKEND=DJANGO_REDIS, LOCATION=f"redis://:wrong-secret@{place}")
    with pytest.raises(ServerDown, match=f"OSError: connecting to {place}: {cause}") as caught:
        server.read(["x"])
    assert "wrong-secret" not in str(caught.value)
    server.close()


def test_each_database_of_redis_is_another_one(settings: Any, redis_server: RedisServer) -> None:
    options = {"PASSWORD": redis_server.password}
    url = redis_server.url.removesuffix("/0")
    (one,) = opened(settings, BACKEND=DJANGO_REDIS, LOCATION=f"{url}/1", OPTIONS=options)
    (two,) = opened(settings, BACKEND=DJANGO_REDIS, LOCATION=f"{url}/2", OPTIONS=options)
    one.fill([CacheEntry("where", b"1")], 60)
    assert two.read(["where"])[0] == [None]
    assert one.read(["where"])[0] == [b"1"]
    one.close()
    two.close()


def test_options_of_django_redis_that_concern_pickles_and_pools_are_left_alone(
    settings: Any, redis_server: RedisServer
) -> None:
    (server,) = opened(
        settings,
        BACKEND=DJANGO_REDIS,
        LOCATION=redis_server.url,
        OPTIONS={
            "PASSWORD": redis_server.password,
            "SOCKET_TIMEOUT": 3,
            "SOCKET_CONNECT_TIMEOUT": 3,
            "COMPRESSOR": "django_redis.compressors.zlib.ZlibCompressor",
            "SERIALIZER": "django_redis.serializers.json.JSONSerializer",
            "IGNORE_EXCEPTIONS": True,
            "CONNECTION_POOL_CLASS": "redis.connection.BlockingConnectionPool",
            "CONNECTION_POOL_KWARGS": {
                "max_connections": 1,
                "decode_responses": True,
                "retry_on_timeout": True,
                "protocol": 3,
                "health_check_interval": 30,
            },
        },
    )
    assert works(server)


def test_options_of_memcached_that_concern_pickles_and_pools_are_left_alone(
    settings: Any, memcached: MemcachedServer
) -> None:
    (server,) = opened(
        settings,
        **{
            **memcached.django(),
            "OPTIONS": {
                "no_delay": False,
                "ignore_exc": True,
                "max_pool_size": 4,
                "use_pooling": True,
                "connect_timeout": 1,
                "timeout": 1,
                "retry_attempts": 3,
            },
        },
    )
    assert works(server)


@pytest.fixture(scope="module")
def sockets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sockets")


def test_a_socket_of_the_file_system(settings: Any, sockets: Path) -> None:
    path = sockets / "redis"
    try:
        with RedisServer(unixsocket=str(path)) as redis:
            redis.wait_ready()
            (server,) = opened(
                settings,
                BACKEND=DJANGO_REDIS,
                LOCATION=f"unix://{path}?db=0",
                OPTIONS={"PASSWORD": redis.password},
            )
            assert works(server)
    except ServiceMissing as exc:
        service_missing(exc)


# ##### TLS #####


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key."""
    folder = tmp_path_factory.mktemp("tls")
    try:
        program = find_program("OpenSSL", "openssl")
    except ServiceMissing as exc:
        service_missing(exc)
    subprocess.run(
        [
            program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
            "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
            "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return folder


class TLSMemcachedServer(MemcachedServer):
    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), timeout=5):
            return True
        return False


@pytest.fixture(scope="module")
def secure_memcached(certificate: Path) -> Iterator[str]:
    files = f"ssl_chain_cert={certificate / 'cert.pem'},ssl_key={certificate / 'key.pem'}"
    try:
        with TLSMemcachedServer(Z=None, o=files) as server:
            server.wait_ready()
            yield server.address
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.fixture(scope="module")
def secure_redis(certificate: Path) -> Iterator[str]:
    port = free_port()
    try:
        with RedisServer(
            tls_port=str(port),
            tls_cert_file=str(certificate / "cert.pem"),
            tls_key_file=str(certificate / "key.pem"),
            tls_auth_clients="no",
        ) as server:
            server.wait_ready()
            yield f"rediss://:{server.password}@{HOST}:{port}/0"
    except ServiceMissing as exc:
        service_missing(exc)


@pytest.mark.parametrize("trusted", [True, False])
def test_memcached_over_tls(
    settings: Any, secure_memcached: str, certificate: Path, trusted: bool
) -> None:
    context = ssl.create_default_context()
    if trusted:
        context.load_verify_locations(certificate / "cert.pem")
    (server,) = opened(
        settings,
        BACKEND=MEMCACHED,
        LOCATION=secure_memcached,
        OPTIONS={"tls_context": context},
    )
    check_secure(server, trusted)


@pytest.mark.parametrize("trusted", [True, False])
def test_redis_over_tls(settings: Any, secure_redis: str, certificate: Path, trusted: bool) -> None:
    options = {"ssl_ca_certs": str(certificate / "cert.pem")} if trusted else {}
    (server,) = opened(
        settings,
        BACKEND=DJANGO_REDIS,
        LOCATION=secure_redis,
        OPTIONS={"CONNECTION_POOL_KWARGS": options},
    )
    check_secure(server, trusted)


def check_secure(server: CacheServer, trusted: bool) -> None:
    value = b"\r\n".join([bytes(range(256))] * 3000)  # many TLS records
    if trusted:
        assert server.fill([CacheEntry("secure", value)], 5)[0] == [True]
        assert server.read(["secure", "missing"])[0] == [value, None]
        names = [f"{'long-name-' * 20}{number}" for number in range(300)]
        entries = [CacheEntry(name, value[: 200 * index]) for index, name in enumerate(names, 1)]
        assert all(server.fill(entries, 5, ["secure"])[0])
        assert server.read(names)[0] == [entry.value for entry in entries]
        server.mark([(name, b"+") for name in names], b"=", 5)
        server.finish(names[1:], [(names[0], b"-")])
        assert server.read(names[:2])[0] == [entries[0].value + b"+-", None]
    else:
        with pytest.raises(ServerDown):
            server.read(["secure"])
    server.close()
