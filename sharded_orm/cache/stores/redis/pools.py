"""How the Redis servers of an alias of ``CACHES`` are reached: pools of the client libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.module_loading import import_string
from redis import ConnectionPool
from redis.sentinel import SentinelConnectionPool


def pools_of_django_redis(location: Any, options: Mapping[str, Any]) -> list[ConnectionPool]:
    """One pool per server of an alias of django-redis.

    The first URL is the server. The others are its replicas, which are not used, as they lag
    behind. With ``ShardClient`` each URL is a server.
    """
    from django_redis.client import ShardClient
    from django_redis.pool import get_connection_factory

    urls = location.split(",") if isinstance(location, str) else list(location)
    client_class = import_string(options.get("CLIENT_CLASS", "django_redis.client.DefaultClient"))
    factory: Any = get_connection_factory(options=dict(options))
    # connect() would share pools among all aliases that name the same server.
    return [
        factory.get_connection_pool(factory.make_connection_params(url.strip()))
        for url in (urls if issubclass(client_class, ShardClient) else urls[:1])
    ]


def pools_of_django(location: Any, options: Mapping[str, Any]) -> list[ConnectionPool]:
    """The pool of an alias of Django's own backend, whose first URL is the server, too."""
    urls = location.replace(";", ",").split(",") if isinstance(location, str) else list(location)
    pool_options = {k: v for k, v in options.items() if k not in ("serializer", "pool_class")}
    pool_class = options.get("pool_class") or ConnectionPool
    if isinstance(pool_class, str):
        pool_class = import_string(pool_class)
    if isinstance(parser := pool_options.get("parser_class"), str):
        pool_options["parser_class"] = import_string(parser)
    return [pool_class.from_url(urls[0].strip(), **pool_options)]


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
