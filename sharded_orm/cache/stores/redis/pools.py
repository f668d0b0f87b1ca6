"""How the Redis servers of an alias of ``CACHES`` are reached: pools of the client libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.module_loading import import_string
from redis import ConnectionPool
from redis.sentinel import SentinelConnectionPool


def pools_of_django_redis(location: Any, options: Mapping[str, Any]) -> list[ConnectionPool]:
    """One pool per server of an alias of django-redis.

    The first URL is the server and the others are its replicas, which are not used, as they
    lag behind. With ``ShardClient`` each URL is a server.
    """
    from django_redis.client import ShardClient
    from django_redis.pool import get_connection_factory

    urls = location.split(",") if isinstance(location, str) else list(location)
    kind = import_string(options.get("CLIENT_CLASS", "django_redis.client.DefaultClient"))
    factory: Any = get_connection_factory(options=dict(options))
    # Not connect(): it shares pools among all aliases that name the same server.
    return [
        factory.get_connection_pool(factory.make_connection_params(url.strip()))
        for url in (urls if issubclass(kind, ShardClient) else urls[:1])
    ]


def pools_of_django(location: Any, options: Mapping[str, Any]) -> list[ConnectionPool]:
    """The same for Django's own backend, where the first URL is the server, too."""
    urls = location.replace(";", ",").split(",") if isinstance(location, str) else list(location)
    rest = {k: v for k, v in options.items() if k not in ("serializer", "pool_class")}
    kind = options.get("pool_class") or ConnectionPool
    if isinstance(kind, str):
        kind = import_string(kind)
    if isinstance(parser := rest.get("parser_class"), str):
        rest["parser_class"] = import_string(parser)
    return [kind.from_url(urls[0].strip(), **rest)]


def place_of(pool: ConnectionPool) -> str:
    """Where the server of ``pool`` is; differs for servers that are not the same.

    The names of what a server holds depend on it.
    """
    if isinstance(pool, SentinelConnectionPool):
        # Two sets of sentinels may each have a service of that name.
        watchers = [
            sentinel.connection_pool.connection_kwargs
            for sentinel in pool.sentinel_manager.sentinels
        ]
        places = sorted(f"{watcher.get('host')}:{watcher.get('port')}" for watcher in watchers)
        return f"{pool.service_name} of {','.join(places)}"
    options = pool.connection_kwargs
    return options.get("path") or f"{options.get('host')}:{options.get('port')}"
