"""Show the state of the cache, and invalidate cache entries, for operators and monitoring."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.core.exceptions import ValidationError
from django.db import connections

from sharded_orm import runtime
from sharded_orm.cache.client import CacheClient
from sharded_orm.cache.stores.base import CacheServer, ServerDown
from sharded_orm.exceptions import InvalidConfiguration
from sharded_orm.models.cached.cached_model import CachedModel, cached_model
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.operations.key_input import typed_key


@dataclass(frozen=True)
class ModelStatistics:
    """The cache hits, misses and other counts of one model, summed over all processes.

    :param counts: maps each name in :data:`sharded_orm.cache.statistics.FIELDS` to a number, such
        as ``{"object_hits": 912, …}``. None if the cache server that keeps the counters is down.
    """

    label: str
    counts: Mapping[str, int] | None

    @property
    def hit_ratio(self) -> float | None:
        """The share of reads, from 0 to 1, that queried no database.

        None if there were no reads, or if :attr:`counts` is None.
        """
        counts = self.counts
        if counts is None:
            return None
        hits = counts["object_hits"] + counts["list_hits"] + counts["l1_hits"]
        reads = hits + counts["object_misses"] + counts["list_misses"] + counts["bypasses"]
        return hits / reads if reads else None


@dataclass(frozen=True)
class CacheServerStatus:
    """The state of a cache server. An attribute is None if the server does not report it."""

    name: str
    #: Which cache entries the server stores: ``"objects"`` (single rows), ``"lists"`` (results
    #: of queries) or both.
    holds: tuple[str, ...]
    #: The reason why the server does not answer; None if it answers.
    error: str | None
    version: str | None = None
    items: int | None = None
    bytes: int | None = None
    evictions: int | None = None
    #: The duration of the fastest of three round trips, in milliseconds.
    round_trip_ms: float | None = None


@dataclass(frozen=True)
class CacheStatus:
    """The statistics of all cached models, and the states of all cache servers."""

    models: tuple[ModelStatistics, ...]
    servers: tuple[CacheServerStatus, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each cache server that does not answer."""
        return tuple(
            f"cache server {server.name} does not answer: {server.error}"
            for server in self.servers
            if server.error is not None
        )


def cached_models(labels: Iterable[str] = ()) -> list[CachedModel]:
    """Return the cached models that ``labels`` name, in the order of the labels.

    Without labels, return all cached models, sorted by label.

    :param labels: labels such as ``"photos.Photo"``.
    :raises LookupError: one of the labels is unknown, or its model is not cached.
    """
    labels = list(labels)
    if not labels:
        concrete = {model._meta.concrete_model for model in apps.get_models()}
        models = [cached for model in concrete if (cached := cached_model(model)) is not None]
        return sorted(models, key=lambda cached: cached.model._meta.label)
    models = []
    for label in labels:
        try:
            cached = cached_model(apps.get_model(label))
        except (LookupError, ValueError) as exc:
            raise LookupError(f"There is no model {label!r}: {exc}") from exc
        if cached is None:
            known = [cached.model._meta.label for cached in cached_models()]
            raise LookupError(f"{label!r} is not cached; cached models are {known!r}.")
        models.append(cached)
    return models


def cached_models_on(alias: str) -> list[CachedModel]:
    """Return the cached models that have their tables on the shard or database ``alias``.

    :return: at least one model.
    :raises LookupError: there is no such shard or database, or it has no tables of cached models.
    """
    topology = runtime.topology()
    if topology.resolve(alias) is None and alias not in connections.settings:
        raise LookupError(
            f"There is neither a shard nor a database {alias!r}; shards are {topology.alias_spans()}."
        )
    models = [cached for cached in cached_models() if cached.caches_alias(alias)]
    if not models:
        raise LookupError(f"{alias!r} holds rows of no cached model.")
    return models


def invalidate(cached: CachedModel, keys: Mapping[str, str], using: str | None = None) -> None:
    """Invalidate the cache entries of a model for the keys that an operator has typed.

    Converts the keys from text and calls :meth:`ModelCache.invalidate`.

    :param keys: maps field names to values as text, such as ``{"user_id": "7"}``.
    :param using: alias of the shard or database whose cache entries are invalidated; by default all
        databases that have rows of the model.
    :raises ValueError: no row can have one of the values, or ``using`` has no rows of the model.
    :raises TypeError: a field name is unknown.
    :raises CacheUnavailable: a cache server is down; repeat the call.
    """
    single = len(cached.pk_fields) == 1
    fields = {"pk": cached.pk} if single else {}
    for field in (cached.pk if single else None, cached.isolate, cached.key):
        if field is not None:
            fields |= {field.name: field, field.attname: field}
    values: dict[str, Any] = {}
    for name, text in keys.items():
        # Do not refuse names of fields that the model does not have. invalidate() of the model's
        # cache raises the error for them.
        values[name] = _typed(cached, fields[name], text) if name in fields else text
    model: Any = cached.model
    model.cache.invalidate(using=using, **values)


def _typed(cached: CachedModel, field: Any, text: str) -> Any:
    options = cached.options
    alias = runtime.group(options.group).shard(0).alias if options else cached.global_alias
    try:
        return typed_key(field, text, alias)
    except ValidationError as exc:
        raise ValueError(
            f"{text!r} is no value of {cached.model.__name__}.{field.name}: {' '.join(exc.messages)}"
        ) from exc


def require_cache() -> CacheClient:
    """Return the client of the project's cache.

    :raises InvalidConfiguration: the project has no cache.
    """
    cache = runtime.cache()
    if cache is None:
        raise InvalidConfiguration(
            ['there is no CACHE, so nothing is cached; add "CACHE": {"OBJECTS": "<alias>"}']
        )
    return cache


def status() -> CacheStatus:
    """Return the state of all cached models and cache servers.

    The servers are queried one after the other. The time limit for a call to a server is the
    ``TIMEOUT`` in the ``CACHE`` setting.
    """
    cache = require_cache()
    cache.statistics.flush()
    servers = []
    for server in cache.servers:
        holds = [
            kind
            for kind, servers_of in (
                ("objects", cache.object_servers),
                ("lists", cache.list_servers),
            )
            if server in servers_of
        ]
        servers.append(_server_status(server, tuple(holds)))
    return CacheStatus(
        tuple(
            ModelStatistics(cached.model._meta.label, _counts(cache, cached))
            for cached in cached_models()
        ),
        tuple(servers),
    )


def forget_key(model: type[Any], key: Any) -> list[str]:
    """Invalidate the cache entries of a shard key, for all cached models of ``model``'s shard
    group.

    If the group has the strategy ``embedded``, each model may have keys of its own, and equal keys
    of two models have nothing to do with each other. Then only the entries of ``model`` are
    invalidated.

    :param model: a sharded model.
    :param key: a value of the model's shard key, already converted by the key's field.
    :returns: the labels of the models whose entries were invalidated.
    :raises InvalidConfiguration: the project has no cache.
    :raises CacheUnavailable: a cache server is down; repeat the call.
    """
    require_cache()
    options = shard_options(model)
    assert options is not None
    has_own_keys = runtime.strategy(options.group).embedded is not None
    models = [
        cached
        for cached in cached_models()
        if cached.options is not None
        and cached.options.group == options.group
        and (not has_own_keys or cached.model is model._meta.concrete_model)
    ]
    for cached in models:
        concrete: Any = cached.model
        concrete.cache.invalidate(**{cached.key.attname: key})
    return [cached.model._meta.label for cached in models]


def reset_statistics() -> None:
    """Set the counters of all models to 0.

    :raises ServerDown: a cache server is down. The counters of some models may have been reset.
    """
    cache = require_cache()
    cache.statistics.flush()
    cache.statistics.reset(cached.type.name for cached in cached_models())


def _counts(cache: CacheClient, cached: CachedModel) -> dict[str, int] | None:
    try:
        return cache.statistics.overall(cached.type.name)
    except ServerDown:
        return None


def _server_status(server: CacheServer, holds: tuple[str, ...]) -> CacheServerStatus:
    try:
        info = server.info()
        fastest = min(_round_trip(server) for _ in range(3))
    except ServerDown as exc:
        return CacheServerStatus(server.name, holds, str(exc) or type(exc).__name__)
    return CacheServerStatus(
        server.name,
        holds,
        None,
        _first(info, "version", "redis_version"),
        _items(info),
        _number(_first(info, "bytes", "used_memory")),
        _number(_first(info, "evictions", "evicted_keys")),
        round(fastest * 1000, 3),
    )


def _round_trip(server: CacheServer) -> float:
    """Return the seconds that one round trip to ``server`` takes."""
    started = time.perf_counter()
    server.counters(["@ping"])
    return time.perf_counter() - started


def _first(info: Mapping[str, Any], *names: str) -> str | None:
    return next((str(info[name]) for name in names if name in info), None)


def _items(info: Mapping[str, Any]) -> int | None:
    if "redis_version" in info:
        # Redis reports a line for each of its databases with keys, such as
        # db0:keys=3,expires=3,avg_ttl=0. Add up the keys of all these lines.
        matches = (re.match(r"keys=(\d+)", str(v)) for k, v in info.items() if re.match(r"db\d", k))
        return sum(int(match[1]) for match in matches if match)
    return _number(_first(info, "curr_items", "entries"))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
