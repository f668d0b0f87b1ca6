"""The cache servers behind an alias of ``CACHES``."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from sharded_orm.cache.keys import token
from sharded_orm.cache.stores.base import CacheServer
from sharded_orm.cache.stores.local import LocalServer
from sharded_orm.conf import CacheOptions

MEMCACHED = "django.core.cache.backends.memcached.PyMemcacheCache"
DJANGO_REDIS = "django_redis.cache.RedisCache"
REDIS = "django.core.cache.backends.redis.RedisCache"
LOCAL = "django.core.cache.backends.locmem.LocMemCache"

#: Backends whose servers can be used, themselves or through a subclass.
BACKENDS = (MEMCACHED, DJANGO_REDIS, REDIS, LOCAL)
#: The libraries that each needs, and the extra that brings them.
_LIBRARIES = {
    MEMCACHED: (("pymemcache",), "memcached"),
    DJANGO_REDIS: (("django_redis", "hiredis"), "redis"),
    REDIS: (("redis", "hiredis"), "redis"),
}

_local: dict[str, LocalServer] = {}
_local_lock = threading.Lock()


def problem(alias: str) -> str | None:
    """Why an alias of ``CACHES`` cannot be used, without a full stop; None if it can."""
    if alias not in settings.CACHES:
        return f"CACHES has {', '.join(map(repr, sorted(settings.CACHES)))} only"
    entry = settings.CACHES[alias]
    kind = _kind(entry)
    if kind is None:
        return f"its BACKEND is {entry.get('BACKEND')!r}, not one of {', '.join(BACKENDS)}"
    if kind in _LIBRARIES:
        packages, extra = _LIBRARIES[kind]
        for package in packages:
            if find_spec(package) is None:
                return f'{package} is not installed: pip install "sharded-orm[{extra}]"'
        if not entry.get("LOCATION"):
            return "it has no LOCATION"
    return None


def open_servers(
    alias: str, options: CacheOptions, *, clock: Callable[[], float] = time.monotonic
) -> Sequence[CacheServer]:
    """The servers behind an alias of ``CACHES``, in the order of its ``LOCATION``.

    Calls none of them. All calls with one ``LOCATION`` of the local backend share one server.

    :param options: ``timeout`` and ``backoff`` of the servers; the others do not count.
    :param clock: of the backoff.

    :raises ImproperlyConfigured: see :func:`problem`.
    """
    if (wrong := problem(alias)) is not None:
        raise ImproperlyConfigured(f"The cache {alias!r} cannot be used: {wrong}.")
    entry = settings.CACHES[alias]
    kind, location = _kind(entry), entry.get("LOCATION", "")
    alias_options: Mapping[str, Any] = entry.get("OPTIONS") or {}
    if kind == LOCAL:
        with _local_lock:
            name = str(location)
            if name not in _local:
                # As Django's own backend reads it.
                max_entries = entry.get("MAX_ENTRIES", alias_options.get("MAX_ENTRIES", 300))
                _local[name] = LocalServer(name, int(max_entries))
            return [_local[name]]
    limits: dict[str, Any] = {
        "timeout": options.timeout,
        "backoff": options.backoff,
        "clock": clock,
    }
    if kind == MEMCACHED:
        from sharded_orm.cache.stores.memcached import MemcachedServer

        addresses = re.split("[;,]", location) if isinstance(location, str) else location
        return [MemcachedServer(address.strip(), alias_options, **limits) for address in addresses]
    from sharded_orm.cache.stores.redis import pools
    from sharded_orm.cache.stores.redis.server import RedisServer

    pools_of = pools.pools_of_django_redis if kind == DJANGO_REDIS else pools.pools_of_django
    return [RedisServer(pool, **limits) for pool in pools_of(location, alias_options)]


def name_prefix(*aliases: str) -> str:
    """The prefix of every name, from ``KEY_PREFIX`` and ``VERSION`` of aliases; empty by default.

    It keeps projects apart that share a server. The stores do not add it, as it counts for the
    length of a name.
    """
    parts = []
    for alias in aliases:
        entry = settings.CACHES[alias]
        prefix, version = entry.get("KEY_PREFIX", ""), entry.get("VERSION", 1)
        # A token has no colon.
        part = f"{token(prefix)}:" if prefix else ""
        part += f"{token(version)}::" if version != 1 else ""
        parts.append(part)
    return "".join(dict.fromkeys(parts))


def _kind(entry: Mapping[str, Any]) -> str | None:
    """The one of :data:`BACKENDS` that ``entry`` uses, itself or through a subclass."""
    path = str(entry.get("BACKEND", ""))
    if path in BACKENDS:
        return path
    try:
        backend = import_string(path)
    except ImportError:
        return None
    # By name, as the modules need client libraries that may not be installed.
    for base in getattr(backend, "__mro__", ()):
        name = f"{base.__module__}.{base.__qualname__}"
        if name in BACKENDS:
            return name
    return None
