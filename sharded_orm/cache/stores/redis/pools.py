"""Connection pools of redis-py, made from the settings of an alias of ``CACHES``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.module_loading import import_string
from redis import ConnectionPool
from redis.sentinel import SentinelConnectionPool


def pools_of_django_redis(location: Any, options: Mapping[str, Any]) -> list[ConnectionPool]:
    """Return one pool per server of an alias that uses django-redis.

    With ``ShardClient`` each URL in ``location`` is a server. With other clients the first URL is
    the server, and the other URLs are its replicas. Replicas are not used, because they lag behind.

    :param location: ``LOCATION`` of the alias.
    :param options: ``OPTIONS`` of the alias.
    """
    from django_redis.client import ShardClient
    from django_redis.pool import get_connection_factory

    urls = location.split(",") if isinstance(location, str) else list(location)
    client_class = import_string(options.get("CLIENT_CLASS", "django_redis.client.DefaultClient"))
    factory: Any = get_connection_factory(options=dict(options))
    # The method connect() of django-redis's factory is not used, because it would share a pool
    # among all aliases that name the same server.
    return [
        factory.get_connection_pool(factory.make_connection_params(url.strip()))
        for url in (urls if issubclass(client_class, ShardClient) else urls[:1])
    ]


def pools_of_django(location: Any, options: Mapping[str, Any]) -> list[ConnectionPool]:
    """Return a list with the pool of an alias that uses Django's own Redis backend.

    The first URL in ``location`` is the server; the others are replicas, which are not used.

    :param location: ``LOCATION`` of the alias.
    :param options: ``OPTIONS`` of the alias.
    """
    urls = location.replace(";", ",").split(",") if isinstance(location, str) else list(location)
    pool_options = {k: v for k, v in options.items() if k not in ("serializer", "pool_class")}
    pool_class = options.get("pool_class") or ConnectionPool
    if isinstance(pool_class, str):
        pool_class = import_string(pool_class)
    if isinstance(parser := pool_options.get("parser_class"), str):
        pool_options["parser_class"] = import_string(parser)
    return [pool_class.from_url(urls[0].strip(), **pool_options)]


def place_of(pool: ConnectionPool) -> str:
    """Return an address of the server of ``pool``. No two servers have the same address.

    The address becomes a part of the server's name, which identifies the server.
    """
    if isinstance(pool, SentinelConnectionPool):
        # Add the addresses of the sentinels, because other sentinels may monitor another server
        # under the same service name.
        watchers = [
            sentinel.connection_pool.connection_kwargs
            for sentinel in pool.sentinel_manager.sentinels
        ]
        places = sorted(f"{watcher.get('host')}:{watcher.get('port')}" for watcher in watchers)
        return f"{pool.service_name} of {','.join(places)}"
    options = pool.connection_kwargs
    return options.get("path") or f"{options.get('host')}:{options.get('port')}"


def cause_of(error: BaseException) -> str:
    """Return why a connection could not be opened, as in ``TimeoutError: timed out``.

    Return no texts of redis-py's errors: they may contain all options of a pool, and so the password.
    """
    origin: BaseException | None = error
    while origin is not None and not isinstance(origin, OSError):
        origin = origin.__cause__ or origin.__context__
    if origin is None:
        return type(error).__name__
    return f"{type(origin).__name__}: {origin}".removesuffix(": ")
