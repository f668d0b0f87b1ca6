"""``Photo.cache``: the public interface to the cache of a model, here ``Photo``."""

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
    """The cache of one model, available as ``Photo.cache``. Thread-safe."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __repr__(self) -> str:
        name = self._model.__name__
        if self._model._meta.abstract or not declares_cache(self._model):
            return f"<cache of {name}: off>"
        cached = cached_model(self._model)
        if cached is None:
            return f"<cache of {name}: off, SHARDED_ORM has no CACHE>"
        isolate = f", isolated by {cached.isolate.name!r}" if cached.isolate is not None else ""
        counts = statistics_of(cached)
        hits = counts["object_hits"] + counts["list_hits"] + counts["l1_hits"]
        return f"<cache of {name}{isolate}: {hits} hits in this process>"

    def invalidate(self, *, using: str | None = None, **where: Any) -> None:
        """Make cache entries void after SQL that the library did not see (Yupoo, Y15).

        For a model whose shard key is ``user_id`` and whose isolate key, the field that divides
        its cached lists, is ``album_id``::

            # All rows and lists of a user:
            Photo.cache.invalidate(user_id=1)
            # One row, and all lists of its user:
            Photo.cache.invalidate(user_id=1, pk=10001)
            # One row, the lists of its album, and its user's lists that do not filter by album:
            Photo.cache.invalidate(user_id=1, album_id=7, pk=10001)
            # Everything, on every shard:
            Photo.cache.invalidate()

        Call this method after the SQL. Inside a transaction, the entries become void when the
        transaction commits; otherwise they become void at once. Does nothing if the model is not
        cached.

        :param using: the alias of one shard. Default: the shard that has the given shard key; if no
            shard key is given, all shards.
        :param where: the shard key, the isolate key and ``pk``, by field name or attname. A value
            may be an instance that a foreign key refers to. If the SQL changed the isolate key of a
            row, leave the isolate key out, or call the method with the old and with the new value.
        :raises TypeError: a name in ``where`` is unknown, or ``where`` has keys but no shard key.
        :raises ValueError: a field does not accept its value, or ``using`` has no rows of the
            model.
        :raises CacheUnavailable: a cache server is down; entries on this server stay as they are,
            so repeat the call. Raised whatever value ``ON_CACHE_FAILURE`` has.
        """
        cached = cached_model(self._model)
        if cached is None:
            return
        values = _values(cached, where)
        immediate: list[VoidRows] = []
        for alias, rows in _rows(cached, values, using):
            connection = _in_transaction(cached, alias, only=len(values) > 0)
            if connection is None:
                immediate.append(rows)
            else:
                transaction_markers(connection).touch(rows.scope, rows.pks, wide=rows.wide)
        _void(immediate)

    def statistics(self) -> dict[str, int]:
        """Return how often each cache event (hit, miss, …) has happened for the model.

        The keys of the dict are the event names that ``cache_stats --json`` shows under ``counts``.
        The numbers are those of this process since it started.
        """
        cached = cached_model(self._model)
        return statistics_of(cached) if cached is not None else dict.fromkeys(FIELDS, 0)


class CacheAttribute:
    """The descriptor behind ``Photo.cache``. Like a manager, it works on the class only."""

    def __get__(self, instance: Any, owner: Any) -> ModelCache:
        if instance is not None:
            raise AttributeError(f"cache is not accessible via {owner.__name__} instances.")
        return ModelCache(owner)


def statistics_of(cached: CachedModel) -> dict[str, int]:
    """Return how often each cache event (hit, miss, …) has happened for a model in this process.

    The dict is keyed by the event's name. All numbers are 0 if no cache is configured.
    """
    cache = runtime.cache()
    if cache is None:
        return dict.fromkeys(FIELDS, 0)
    return cache.statistics.counted(cached.type.name)


def void_tables(models: Iterable[CachedModel], alias: str) -> None:
    """Make void all cache entries of the rows that ``models`` have on ``alias``.

    Effective immediately, even inside of a transaction. One round trip per cache server.

    :raises CacheUnavailable: a cache server is down.
    """
    _void(_whole(cached, alias) for cached in models)


def void_shards(cached: CachedModel, aliases: Iterable[str]) -> None:
    """Make void all cache entries of the rows that a model has on ``aliases``.

    Effective immediately, even inside of a transaction. One round trip per cache server.

    :raises CacheUnavailable: a cache server is down.
    """
    _void(_whole(cached, alias) for alias in aliases)


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
    """Make void all cache entries of rows in the migrated database. Receiver of ``post_migrate``.

    The SQL of a migration may have changed rows. Do nothing if no migration was run. If a cache
    server is down, do not let the migration fail, but log an error with the command that the
    operator must run later.
    """
    if not plan or runtime.config().cache is None:
        return
    models = [
        cached
        for model in apps.get_models()
        if (cached := cached_model(model)) is not None
        and cached.model is model
        and cached.caches_alias(using)
    ]
    try:
        void_tables(models, using)
    except CacheUnavailable as exc:
        names = " ".join(cached.model._meta.label for cached in models)
        logger.error(
            "%s was migrated, and what the cache has of it may be stale. %s To be sure, run"
            " 'manage.py cache_invalidate %s' when the cache server is up.",
            using, exc, names,
        )  # fmt: skip


def _values(cached: CachedModel, where: dict[str, Any]) -> dict[str, Any]:
    """Return the values in ``where``, keyed by the roles of the fields: ``key`` for the shard key,
    ``isolate`` for the isolate key, ``pk`` for the primary key.

    :param where: arguments of :meth:`ModelCache.invalidate`, keyed by field name or attname.
    :raises TypeError: a name in ``where`` is unknown, or ``where`` has keys but no shard key.
    """
    roles: dict[str, str] = {}
    fields: dict[str, Any] = {}
    single = len(cached.pk_fields) == 1
    for role, field in (
        ("pk", cached.pk if single else None),
        ("isolate", cached.isolate),
        ("key", cached.key),
    ):
        if field is not None:
            roles |= {field.name: role, field.attname: role}
            fields |= {field.name: field, field.attname: field}
    roles["pk"] = "pk"
    values: dict[str, Any] = {}
    for name, value in where.items():
        if name not in roles:
            raise TypeError(
                f"{cached.model.__name__}.cache.invalidate() got the unknown name {name!r}; valid"
                f" names are {sorted(roles)!r} and 'using'."
            )
        if isinstance(value, Model):
            # A foreign key may be given as a model instance, as in filter(). Take the value of the
            # field to which the foreign key refers.
            target = getattr(fields.get(name), "target_field", value._meta.pk)
            value = getattr(value, target.attname)
        values[roles[name]] = value
    if cached.key is not None and cached.pk is cached.key and "pk" in values:
        values.setdefault("key", values["pk"])
    if values and cached.key is not None and "key" not in values:
        raise TypeError(
            f"{cached.model.__name__}.cache.invalidate() needs {cached.key.name!r} beside"
            f" {sorted(where)!r}: it is the shard key."
        )
    return values


def _rows(
    cached: CachedModel, values: dict[str, Any], using: str | None
) -> Iterator[tuple[str, VoidRows]]:
    """Yield pairs: the alias of a database, and the rows there whose entries must become void.

    :param values: values of the model's keys; see :func:`_values`. Empty for all rows.
    :param using: the alias of one shard. None means the shard that has the shard key in ``values``,
        or all shards if ``values`` has no shard key.
    :raises ValueError: a field does not accept its value, or ``using`` has no rows of the model.
    """
    if using is not None and not _has_rows(cached, using):
        why = ""
        if cached.options is not None:
            group = runtime.group(cached.options.group)
            why = (
                f": it is no shard of group {group.name!r}, whose shards are 0 to {group.count - 1}"
            )
        raise ValueError(f"{using!r} holds no cached rows of {cached.model.__name__}{why}.")
    if not values or (cached.options is not None and "key" not in values):
        for alias in cached.aliases if using is None else (using,):
            yield alias, _whole(cached, alias)
        return
    key = isolate = None
    if cached.key is not None and cached.options is not None:
        key = cached.key_token(values["key"])
        if key is None:
            _refuse(cached, cached.key, cached.key_field, values["key"])
        if using is None:
            shard = runtime.locate(cached.options.group, cached.key.get_prep_value(values["key"]))
            if shard is None:
                return  # No shard is assigned to the key, so it has no rows.
            using = shard.alias
    alias = cached.aliases[0] if using is None else using
    if key is None and cached.key is not None:
        # The shard key has no token, because the database may consider values equal that are
        # written differently, such as "ann" and "Ann". So the names of the cache entries are
        # unknown. Make the entries of all rows of the model on this shard void.
        yield alias, _whole(cached, alias)
        return
    if "isolate" in values:
        isolate = cached.isolate_token(values["isolate"])
        if isolate is None:
            _refuse(cached, cached.isolate, cached.isolate_field, values["isolate"])
    pks = None
    if "pk" in values:
        pk = cached.pk_token(values["pk"])
        if pk is None:
            _refuse(cached, cached.pk, cached.pk_fields[0], values["pk"])
        else:
            pks = frozenset({pk})
    wide = cached.isolate is not None and isolate is None
    yield alias, VoidRows(cached.scope(cached.place(alias), key, isolate), pks, wide)


def _has_rows(cached: CachedModel, alias: str) -> bool:
    known = cached.options is None or runtime.topology().resolve(alias) is not None
    return known and cached.caches_alias(alias)


def _whole(cached: CachedModel, alias: str) -> VoidRows:
    return VoidRows(cached.scope(cached.place(alias), None), wide=True)


def _in_transaction(cached: CachedModel, alias: str, *, only: bool) -> Any:
    """Return the connection of ``alias`` if the connection is inside of a transaction, else None.

    :param only: True if the caller invalidates rows on this one alias. False if it calls this
        function for all shards of the group. Then return None, without making a connection object,
        for a shard to which this thread has no connection: no transaction can be open there.
    """
    connection: Any
    if cached.options is None or only:
        connection = connections[alias]
    else:
        group: Any = connections[cached.options.group]
        connection = group.shards.wrappers.get(alias)
        if connection is None or connection.connection is None:
            return None
    # get_autocommit() is not used, because it would open a database connection.
    in_transaction = connection.in_atomic_block or (
        connection.connection is not None and not connection.autocommit
    )
    return connection if in_transaction else None


def _refuse(cached: CachedModel, field: Any, tokens: Any, value: Any) -> None:
    """Raise ValueError if ``value`` is not valid for ``field``.

    Called if ``value`` has no *token*, which would represent it in names of cache entries. There
    are two possible reasons: ``field`` does not accept the value, or the tokens of ``field`` are
    not exact, so that no value has a token. In the second case, do nothing.

    :param tokens: the :class:`~sharded_orm.models.cached.cached_model.TokenField` of the field.
    :param value: a value for which ``tokens`` has returned None instead of a token.
    """
    if tokens is not None and tokens.exact:
        raise ValueError(f"{value!r} is no value of {cached.model.__name__}.{field.name}.")
