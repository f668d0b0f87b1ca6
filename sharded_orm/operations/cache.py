"""How the cache is, for operators and monitoring."""

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
    """What was counted for a cached model, by all processes.

    :param counts: see :data:`sharded_orm.cache.statistics.FIELDS`; None while the server that has
        them is down.
    """

    label: str
    counts: Mapping[str, int] | None

    @property
    def hit_ratio(self) -> float | None:
        """The share of reads that asked no database; None if there were none."""
        if self.counts is None:
            return None
        count = self.counts
        hits = count["object_hits"] + count["list_hits"] + count["l1_hits"]
        reads = hits + count["object_misses"] + count["list_misses"] + count["bypasses"]
        return hits / reads if reads else None


@dataclass(frozen=True)
class CacheServerStatus:
    """A cache server; None for what it does not tell."""

    name: str
    #: What it holds: ``"objects"``, ``"lists"``.
    holds: tuple[str, ...]
    #: Why it does not serve; None when it answers.
    error: str | None
    version: str | None = None
    items: int | None = None
    bytes: int | None = None
    evictions: int | None = None
    #: Of the fastest of three exchanges.
    round_trip_ms: float | None = None


@dataclass(frozen=True)
class CacheStatus:
    """All cached models and all cache servers."""

    models: tuple[ModelStatistics, ...]
    servers: tuple[CacheServerStatus, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """What an operator should mend."""
        return tuple(
            f"cache server {one.name} does not answer: {one.error}"
            for one in self.servers
            if one.error is not None
        )


def cached_models(labels: Iterable[str] = ()) -> list[CachedModel]:
    """The installed models that are cached, by label; or those of ``labels``.

    :raises LookupError: there is no such model, or it is not cached.
    """
    wanted = list(labels)
    if not wanted:
        known = {model._meta.concrete_model for model in apps.get_models()}
        every = [found for model in known if (found := cached_model(model)) is not None]
        return sorted(every, key=lambda one: one.model._meta.label)
    chosen = []
    for label in wanted:
        try:
            found = cached_model(apps.get_model(label))
        except (LookupError, ValueError) as exc:
            raise LookupError(f"There is no model {label!r}: {exc}") from exc
        if found is None:
            cached = [each.model._meta.label for each in cached_models()]
            raise LookupError(f"{label!r} is not cached; cached models are {cached!r}.")
        chosen.append(found)
    return chosen


def held_on(alias: str) -> list[CachedModel]:
    """The installed models that are cached and have rows on ``alias``; never none.

    :raises LookupError: there is no such shard or database, or it has rows of none of them.
    """
    if runtime.topology().resolve(alias) is None and alias not in connections.settings:
        raise LookupError(
            f"There is neither a shard nor a database {alias!r}; an alias is such as 'photos_00042'."
        )
    found = [one for one in cached_models() if one.home_alias_ok(alias)]
    if not found:
        raise LookupError(f"{alias!r} holds rows of no cached model.")
    return found


def invalidate(found: CachedModel, keys: Mapping[str, str], using: str | None = None) -> None:
    """Make void what is cached of a model, as :meth:`ModelCache.invalidate`, by keys as typed.

    :raises ValueError: a value that no row can have, or an alias that has no rows of the model.
    :raises TypeError: an unknown name.
    :raises CacheUnavailable: a cache server is down; call it again.
    """
    single = len(found.pk_fields) == 1
    fields = {"pk": found.pk} if single else {}
    for field in (found.pk if single else None, found.isolate, found.key):
        if field is not None:
            fields |= {field.name: field, field.attname: field}
    values: dict[str, Any] = {}
    for name, text in keys.items():
        # A name that is unknown is refused below.
        values[name] = _typed(found, fields[name], text) if name in fields else text
    model: Any = found.model
    model.cache.invalidate(using=using, **values)


def _typed(found: CachedModel, field: Any, text: str) -> Any:
    options = found.options
    alias = runtime.group(options.group).shard(0).alias if options else found.global_alias
    try:
        return typed_key(field, text, alias)
    except ValidationError as exc:
        raise ValueError(
            f"{text!r} is no value of {found.model.__name__}.{field.name}: {' '.join(exc.messages)}"
        ) from exc


def the_cache() -> CacheClient:
    """The cache.

    :raises InvalidConfiguration: there is none.
    """
    cache = runtime.cache()
    if cache is None:
        raise InvalidConfiguration(
            ['there is no CACHE, so nothing is cached; add "CACHE": {"OBJECTS": "<alias>"}']
        )
    return cache


def status() -> CacheStatus:
    """Ask all cache servers, one after the other; each has the ``TIMEOUT`` of the setting."""
    cache = the_cache()
    cache.statistics.flush()
    servers = []
    for server in cache.servers:
        holds = [
            what
            for what, several in (("objects", cache.object_servers), ("lists", cache.list_servers))
            if server in several
        ]
        servers.append(_ask(server, tuple(holds)))
    return CacheStatus(
        tuple(
            ModelStatistics(found.model._meta.label, _counts(cache, found))
            for found in cached_models()
        ),
        tuple(servers),
    )


def forget_key(model: type[Any], key: Any) -> list[str]:
    """Make void what is cached of a shard key, of all models that have it; returns their labels.

    Where keys carry their shard, each model has keys of its own: then of ``model`` alone.

    :param model: a sharded model.
    :param key: a value of its shard key, as its field makes it.
    :raises InvalidConfiguration: there is no cache.
    :raises CacheUnavailable: a cache server is down; call it again.
    """
    the_cache()
    options = shard_options(model)
    assert options is not None
    own = runtime.strategy(options.group).embedded is not None
    chosen = [
        found
        for found in cached_models()
        if found.options is not None
        and found.options.group == options.group
        and (not own or found.model is model._meta.concrete_model)
    ]
    for found in chosen:
        cached: Any = found.model
        cached.cache.invalidate(**{found.key.attname: key})
    return [found.model._meta.label for found in chosen]


def reset_statistics() -> None:
    """Let the counters of all models begin at 0 again.

    :raises ServerDown: a cache server is down; the counters of other models may have been reset.
    """
    cache = the_cache()
    cache.statistics.flush()
    cache.statistics.reset(found.type.name for found in cached_models())


def _counts(cache: CacheClient, found: CachedModel) -> dict[str, int] | None:
    try:
        return cache.statistics.overall(found.type.name)
    except ServerDown:
        return None


def _ask(server: CacheServer, holds: tuple[str, ...]) -> CacheServerStatus:
    try:
        info = server.info()
        fastest = min(_timed(server) for _ in range(3))
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


def _timed(server: CacheServer) -> float:
    started = time.perf_counter()
    server.counters(["@ping"])
    return time.perf_counter() - started


def _first(info: Mapping[str, Any], *names: str) -> str | None:
    return next((str(info[name]) for name in names if name in info), None)


def _items(info: Mapping[str, Any]) -> int | None:
    if "redis_version" in info:
        # db0:keys=3,expires=3,avg_ttl=0; an empty server has no such line.
        found = (re.match(r"keys=(\d+)", str(v)) for k, v in info.items() if re.match(r"db\d", k))
        return sum(int(match[1]) for match in found if match)
    return _number(_first(info, "curr_items", "entries"))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
