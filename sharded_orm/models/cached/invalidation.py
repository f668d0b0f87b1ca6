"""``Photo.cache``: what a program says to the cache itself."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from django.apps import AppConfig, apps
from django.db import connections
from django.db.models import Model

from sharded_orm import runtime
from sharded_orm.cache.invalidation import VoidRows, void
from sharded_orm.cache.statistics import FIELDS
from sharded_orm.cache.stores.base import ServerDown
from sharded_orm.exceptions import CacheUnavailable
from sharded_orm.models.cached.cached_model import CachedModel, cached_model, declares_cache
from sharded_orm.models.cached.write_observer import transaction_markers

logger = logging.getLogger("sharded_orm.cache")


class ModelCache:
    """The cache of one model. Thread-safe."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __repr__(self) -> str:
        name = self._model.__name__
        if self._model._meta.abstract or not declares_cache(self._model):
            return f"<cache of {name}: off>"
        found = cached_model(self._model)
        if found is None:
            return f"<cache of {name}: off, SHARDED_ORM has no CACHE>"
        isolate = f", isolated by {found.isolate.name!r}" if found.isolate is not None else ""
        counts = found_statistics(found)
        hits = counts["object_hits"] + counts["list_hits"] + counts["l1_hits"]
        return f"<cache of {name}{isolate}: {hits} hits in this process>"

    def invalidate(self, *, using: str | None = None, **where: Any) -> None:
        """Make entries void, after SQL that the library did not see (Yupoo, Y15).

        ::

            Photo.cache.invalidate(user_id=1)               # all rows of a key
            Photo.cache.invalidate(user_id=1, pk=10001)     # one row, and lists of its key
            Photo.cache.invalidate(user_id=1, album_id=7, pk=10001)  # and those of one album
            Photo.cache.invalidate()                        # everything, on every shard

        Call it after the SQL. Inside the transaction of that it takes part in it: entries are
        void when it commits. Outside they are void at once.

        :param using: the alias of one shard; by default the one of the shard key, or all.
        :param where: the shard key, the isolate key and ``pk``, by field name or attname, as
            values or as instances that a foreign key refers to. If
            the isolate key of a row changed, leave it out, or call once with each value.
        :raises TypeError: another name, or a name without the shard key.
        :raises ValueError: a value that is none of its field; an alias without such rows.
        :raises CacheUnavailable: a cache server is down, whatever ``ON_CACHE_FAILURE`` says; what
            it holds stays as it is. Repeat the call.

        Does nothing while the model is not cached.
        """
        found = cached_model(self._model)
        if found is None:
            return
        values = _values(found, where)
        now: list[VoidRows] = []
        for alias, rows in _rows(found, values, using):
            connection = _in_transaction(found, alias, only=len(values) > 0)
            writes = transaction_markers(connection) if connection is not None else None
            if writes is None:
                now.append(rows)
            else:
                # From now on it reads what it wrote, past the cache.
                connection.wrote = True
                writes.touch(rows.scope, rows.pks, wide=rows.wide)
        _void(now)

    def statistics(self) -> dict[str, int]:
        """What this process has counted for the model since its start; see ``cache_stats``."""
        found = cached_model(self._model)
        return found_statistics(found) if found is not None else dict.fromkeys(FIELDS, 0)


class CacheAttribute:
    """``Photo.cache``, on the class only, like a manager."""

    def __get__(self, instance: Any, owner: Any) -> ModelCache:
        if instance is not None:
            raise AttributeError(f"cache is not accessible via {owner.__name__} instances.")
        return ModelCache(owner)


def found_statistics(found: CachedModel) -> dict[str, int]:
    """The counts of a cached model in this process."""
    cache = runtime.cache()
    if cache is None:
        return dict.fromkeys(FIELDS, 0)
    return cache.statistics.counted(found.type.name)


def void_tables(models: Iterable[CachedModel], alias: str) -> None:
    """Make all entries of rows on ``alias`` void, now.

    :raises CacheUnavailable: a cache server is down.
    """
    _void(_whole(found, alias) for found in models)


def _void(rows: Iterable[VoidRows]) -> None:
    cache, rows = runtime.cache(), list(rows)
    if cache is None or not rows:
        return
    try:
        void(cache, rows)
    except ServerDown as exc:
        raise CacheUnavailable(
            f"Entries could not be made void ({exc}), and may be stale until they expire, after"
            f" {cache.options.ttl:g} s at most. Repeat this when the cache server answers."
        ) from exc


def after_migrate(sender: AppConfig, using: str, plan: Any = (), **kwargs: Any) -> None:
    """Receiver of ``post_migrate``: rows may have been changed by SQL of migrations.

    After any migration everything that is cached of the alias is void. That a cache server
    is down does not stop the migration: it is logged as an error, with what to run.
    """
    if not plan or runtime.config().cache is None:
        return
    models = [
        found
        for model in apps.get_models()
        if (found := cached_model(model)) is not None
        and found.model is model
        and found.home_alias_ok(using)
    ]
    try:
        void_tables(models, using)
    except CacheUnavailable as exc:
        names = " ".join(found.model._meta.label for found in models)
        logger.error(
            "%s was migrated, and what the cache has of it may be stale. %s To be sure, run"
            " 'manage.py cache_invalidate %s' when the cache server is up.",
            using, exc, names,
        )  # fmt: skip


def _values(found: CachedModel, where: dict[str, Any]) -> dict[str, Any]:
    """``where`` by role: ``key``, ``isolate`` and ``pk``."""
    roles: dict[str, str] = {}
    fields: dict[str, Any] = {}
    single = len(found.pk_fields) == 1
    for role, field in (
        ("pk", found.pk if single else None),
        ("isolate", found.isolate),
        ("key", found.key),
    ):
        if field is not None:
            roles |= {field.name: role, field.attname: role}
            fields |= {field.name: field, field.attname: field}
    roles["pk"] = "pk"
    values: dict[str, Any] = {}
    for name, value in where.items():
        if name not in roles:
            raise TypeError(
                f"{found.model.__name__}.cache.invalidate() got the unknown name {name!r}; valid"
                f" names are {sorted(roles)!r} and 'using'."
            )
        if isinstance(value, Model):
            # What a foreign key refers to, as in filter().
            target = getattr(fields.get(name), "target_field", value._meta.pk)
            value = getattr(value, target.attname)
        values[roles[name]] = value
    if found.key is not None and found.pk is found.key and "pk" in values:
        values.setdefault("key", values["pk"])
    if values and found.key is not None and "key" not in values:
        raise TypeError(
            f"{found.model.__name__}.cache.invalidate() needs {found.key.name!r} beside"
            f" {sorted(where)!r}: it is the shard key."
        )
    return values


def _rows(
    found: CachedModel, values: dict[str, Any], using: str | None
) -> Iterator[tuple[str, VoidRows]]:
    """What to make void, with the alias that holds it."""
    if using is not None and not _has_rows(found, using):
        why = ""
        if found.options is not None:
            group = runtime.group(found.options.group)
            why = (
                f": it is no shard of group {group.name!r}, whose shards are 0 to {group.count - 1}"
            )
        raise ValueError(f"{using!r} holds no cached rows of {found.model.__name__}{why}.")
    if not values or (found.options is not None and "key" not in values):
        for alias in found.aliases if using is None else (using,):
            yield alias, _whole(found, alias)
        return
    key = isolate = None
    if found.key is not None and found.options is not None:
        key = found.key_token(values["key"])
        if key is None:
            _refuse(found, found.key, found.key_field, values["key"])
        if using is None:
            shard = runtime.locate(found.options.group, found.key.get_prep_value(values["key"]))
            if shard is None:
                return  # It has no rows.
            using = shard.alias
    alias = found.aliases[0] if using is None else using
    if key is None and found.key is not None:
        yield alias, _whole(found, alias)  # An inexact key.
        return
    if "isolate" in values:
        isolate = found.isolate_token(values["isolate"])
        if isolate is None:
            _refuse(found, found.isolate, found.isolate_field, values["isolate"])
    pks = None
    if "pk" in values:
        pk = found.pk_token(values["pk"])
        if pk is None:
            _refuse(found, found.pk, found.pk_fields[0], values["pk"])
        else:
            pks = frozenset({pk})
    wide = found.isolate is not None and isolate is None
    yield alias, VoidRows(found.scope(found.place(alias), key, isolate), pks, wide)


def _has_rows(found: CachedModel, alias: str) -> bool:
    known = found.options is None or runtime.topology().resolve(alias) is not None
    return known and found.home_alias_ok(alias)


def _whole(found: CachedModel, alias: str) -> VoidRows:
    return VoidRows(found.scope(found.place(alias), None), wide=True)


def _in_transaction(found: CachedModel, alias: str, *, only: bool) -> Any:
    """The connection of ``alias`` if it is inside a transaction, else None.

    :param only: it is the only one that is asked; else a shard without a connection, which
        nothing was written on, gets none.
    """
    connection: Any
    if found.options is None or only:
        connection = connections[alias]
    else:
        group: Any = connections[found.options.group]
        connection = group.shards.wrappers.get(alias)
        if connection is None or connection.connection is None:
            return None
    # Not get_autocommit(), which would connect.
    in_transaction = connection.in_atomic_block or (
        connection.connection is not None and not connection.autocommit
    )
    return connection if in_transaction else None


def _refuse(found: CachedModel, field: Any, tokens: Any, value: Any) -> None:
    """Raise, unless the field is one of which nothing exact can be said."""
    if tokens is not None and tokens.exact:
        raise ValueError(f"{value!r} is no value of {found.model.__name__}.{field.name}.")
