"""Creates the server objects for an alias of ``CACHES``: one for each server that it names.

For example, an alias for memcached with two addresses in ``LOCATION`` has two server objects.
"""

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

#: The Django cache backends that the library can use. An alias may also use a subclass of one of them.
BACKENDS = (MEMCACHED, DJANGO_REDIS, REDIS, LOCAL)
#: The packages that each backend needs, and the extra of sharded-orm that installs them.
_LIBRARIES = {
    MEMCACHED: (("pymemcache",), "memcached"),
    DJANGO_REDIS: (("django_redis", "hiredis"), "redis"),
    REDIS: (("redis", "hiredis"), "redis"),
}

_local: dict[str, LocalServer] = {}
_local_lock = threading.Lock()


def problem(alias: str) -> str | None:
    """Return the reason why an alias of ``CACHES`` cannot be used; None if it can be used.

    The reason completes a sentence such as "The alias cannot be used: …", so it has no full stop.
    """
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
    """Return the servers of an alias of ``CACHES``, in the order of its ``LOCATION``.

    No server is called. For the local-memory backend, all aliases with the same ``LOCATION``
    share one server object.

    :param options: the options of the cache. Only ``timeout`` and ``backoff`` are used.
    :param clock: returns monotonic time in seconds, to measure the backoff after a failure.
    :raises ImproperlyConfigured: the alias cannot be used; see :func:`problem`.
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
                # MAX_ENTRIES may be given in the alias itself or in its OPTIONS.
                max_entries = entry.get("MAX_ENTRIES", alias_options.get("MAX_ENTRIES", 300))
                _local[name] = LocalServer(name, int(max_entries))
            return [_local[name]]
    limits: dict[str, Any] = {
        "timeout": options.timeout,
        "backoff": options.backoff,
        "clock": clock,
    }
    if kind == MEMCACHED:
        from sharded_orm.cache.stores.memcached.server import MemcachedServer

        addresses = re.split("[;,]", location) if isinstance(location, str) else location
        return [MemcachedServer(address.strip(), alias_options, **limits) for address in addresses]
    from sharded_orm.cache.stores.redis import pools
    from sharded_orm.cache.stores.redis.server import RedisServer

    pools_of = pools.pools_of_django_redis if kind == DJANGO_REDIS else pools.pools_of_django
    return [RedisServer(pool, **limits) for pool in pools_of(location, alias_options)]


def name_prefix(*aliases: str) -> str:
    """Return the prefix with which the names of all cache entries must begin, so that several
    projects can share a server.

    The prefix is made of ``KEY_PREFIX`` and ``VERSION`` of the ``aliases`` in ``CACHES``. It is
    empty if these settings have their defaults. The server objects do not add the prefix. The
    caller must add it to a name before the name is shortened to the length that servers allow.
    """
    parts = []
    for alias in aliases:
        entry = settings.CACHES[alias]
        prefix, version = entry.get("KEY_PREFIX", ""), entry.get("VERSION", 1)
        # A colon marks the end of each part of the prefix. The mark is unambiguous, because the
        # text from token() never contains a colon.
        part = f"{token(prefix)}:" if prefix else ""
        part += f"{token(version)}::" if version != 1 else ""
        parts.append(part)
    return "".join(dict.fromkeys(parts))


def _kind(entry: Mapping[str, Any]) -> str | None:
    """Return the backend in :data:`BACKENDS` that an alias uses directly or through a subclass.

    Return None if the alias uses none of these backends.

    :param entry: the settings of the alias in ``CACHES``.
    """
    path = str(entry.get("BACKEND", ""))
    if path in BACKENDS:
        return path
    try:
        backend = import_string(path)
    except ImportError:
        return None
    # Base classes are compared by name: importing all of BACKENDS would need client libraries
    # that may not be installed.
    for base in getattr(backend, "__mro__", ()):
        name = f"{base.__module__}.{base.__qualname__}"
        if name in BACKENDS:
            return name
    return None
