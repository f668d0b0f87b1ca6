"""Saves a loaded row of a cached model by a plan: an UPDATE that was compiled once.

The cache must learn of a write before it is committed. In autocommit, the write is announced to the
cache *before* the UPDATE is sent, so no transaction is needed. The announcement names the keys that
the instance has. These keys are also conditions of the UPDATE: if one of them is wrong, no row
changes. The announcement is valid for a limited time only, and the UPDATE must be committed within
this time. So the database server is told to break off an UPDATE that takes longer.

All other saves run the UPDATE in a transaction, and announce it before COMMIT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sharded_orm import runtime
from sharded_orm.backends.group.shard_connections import connection_of
from sharded_orm.backends.write_hooks import compiled_update
from sharded_orm.backends.write_hooks.followers import is_followed
from sharded_orm.cache.keys import Scope
from sharded_orm.cache.markers import TransactionMarkers
from sharded_orm.models.cached.cached_model import CachedModel
from sharded_orm.models.cached.write_observer import transaction_markers
from sharded_orm.models.plans.saves import (
    SavedRows,
    known_plan,
    loaded_values,
    plan_of_save,
    saved_fields,
)
from sharded_orm.models.plans.updates import UpdatePlan
from sharded_orm.models.sharding.options import ShardOptions

_ABSENT: Any = object()


class SavedRow(NamedTuple):
    """The row that a save() changes, as the cache knows it.

    :param scope: the scope (set of rows) of the row's shard key.
    :param pk: the token (the form in names of cache entries) of the primary key.
    :param isolates: a tuple with the scope of the row's isolate key, which divides the rows of a
        shard key; an empty tuple if the model has no isolate key.
    """

    scope: Scope
    pk: str
    isolates: tuple[Scope, ...]

    def touch(self, markers: TransactionMarkers) -> None:
        """Record in ``markers`` that the row is written."""
        markers.touch(self.scope, (self.pk,), isolates=self.isolates)


def save_cached_row(
    cached: CachedModel,
    options: ShardOptions,
    rows: SavedRows,
    key: Any,
    pk: Any,
    new_values: Sequence[tuple[Any, Any, Any]],
    names: frozenset[str] | None,
    attributes: Mapping[str, Any],
) -> bool | None:
    """Update one row of a cached model by a plan, and return True if the row was updated.

    Return None, without having changed anything, if Django must update the row. For example, the
    first two saves of the same fields have no plan yet. Or no stored row has the keys of the
    instance.

    Costs one round trip to the database, and one to each cache server. When the write is over, a
    second message tells this to the cache, and the save does not wait for an answer. A save without
    a plan costs one more round trip to the database.

    :param attributes: the attributes of the instance. The other arguments are those of
        :func:`~sharded_orm.models.plans.saves.save_row`.
    :raises CacheUnavailable: a cache server does not answer, and ``ON_CACHE_FAILURE`` is "refuse".
        Nothing was written.
    """
    assert options.key is not None
    saved = {field.attname: value for field, _, value in new_values}
    conditions = _conditions(cached, options, key, pk, saved, attributes)
    if conditions is None:
        return None
    plan = plan_of_save(options, rows, conditions, new_values, names)
    if plan is None:
        return None
    saved_fields(options, rows.model, names)  # for save_loaded_cached_row()
    connection = connection_of(rows.alias)
    return _save(cached, plan, rows.model, connection, conditions, list(saved.values())) or None


def save_loaded_cached_row(
    cached: CachedModel, options: ShardOptions, row: Any, alias: str, names: frozenset[str] | None
) -> bool | None:
    """Update ``row`` by a plan that an earlier save has made, and return whether a row matched.

    Unlike :func:`save_cached_row`, this function also does what ``Model._save_table()`` and
    ``_do_update()`` do before the UPDATE. Return None, without having changed anything, if Django
    must save the row.

    :param alias: the shard of the row.
    """
    model = type(row)
    loaded = loaded_values(options, model, row, names)
    if loaded is None:
        return None
    key, pk, written = loaded
    saved = {field.attname: value for field, value in written}
    conditions = _conditions(cached, options, key, pk, saved, row.__dict__)
    if conditions is None:
        return None
    new_values = list(saved.values())
    shape = (len(conditions), names, *map(type, conditions.values()), *map(type, new_values))
    connection = connection_of(alias)
    plan = known_plan(options.model, shape, connection)
    return None if plan is None else _save(cached, plan, model, connection, conditions, new_values)


def _conditions(
    cached: CachedModel,
    options: ShardOptions,
    key: Any,
    pk: Any,
    saved: Mapping[str, Any],
    attributes: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Return the conditions of the UPDATE, such as ``{"user_id": 1, "pk": 10001, "album_id": 7}``.

    They are the shard key, the primary key and the isolate key of the instance. Return None if the
    isolate key is not loaded.

    :param saved: the new values, by the attnames of their fields.
    """
    assert options.key is not None
    conditions = {options.key.attname: key, "pk": pk}
    isolate = cached.isolate
    if isolate is not None:
        # Assume that this save does not change the isolate key. If the stored row has another
        # isolate key than the instance, the UPDATE finds no row.
        value = saved.get(isolate.attname, attributes.get(isolate.attname, _ABSENT))
        if value is _ABSENT or isolate.attname in conditions:
            return None
        conditions[isolate.attname] = value
    return conditions


def _save(
    cached: CachedModel,
    plan: UpdatePlan,
    model: Any,
    connection: Any,
    conditions: Mapping[str, Any],
    new_values: Sequence[Any],
) -> bool | None:
    """Send the UPDATE of ``plan``, and return whether a row matched.

    Return None, without sending anything, if the plan cannot be used for this row.
    """
    values = list(conditions.values())
    row = _row_of(cached, connection.alias, *values)
    if row is None or is_followed(model, on_shard=True):
        return None
    prepared = values[:1]
    for part, value in zip(plan.conditions[1:], values[1:], strict=True):
        prepared.append(None if value is None else part.target.get_prep_value(value))
    bound = plan.bind(new_values, prepared, connection)
    if bound is None:
        return None
    sql, parameters = bound

    def send() -> int:
        return compiled_update.send(connection, sql, parameters)

    if not connection.get_autocommit():
        return _update_in_transaction(row, connection, send)
    changed = _update_alone(row, connection, send)
    if changed is not None:
        return changed
    with connection.write_transaction():
        return _update_in_transaction(row, connection, send)


def _row_of(cached: CachedModel, alias: str, key: Any, pk: Any, *isolate: Any) -> SavedRow | None:
    key_token, pk_token = cached.key_token(key), cached.pk_token(pk)
    tokens = list(map(cached.isolate_token, isolate))
    if key_token is None or pk_token is None or None in tokens or not cached.caches_alias(alias):
        return None
    place = cached.place(alias)
    scopes = tuple([cached.scope(place, key_token, token) for token in tokens])
    return SavedRow(cached.scope(place, key_token), pk_token, scopes)


def _update_in_transaction(row: SavedRow, connection: Any, send: Callable[[], int]) -> bool:
    markers = transaction_markers(connection)
    try:
        changed = send()
    except BaseException:
        # In spite of the exception, the database may have executed the statement. For example, the
        # handler of a Unix signal can raise after the statement was sent. So the row counts as
        # written.
        row.touch(markers)
        raise
    if changed:
        row.touch(markers)
    return bool(changed)


def _update_alone(row: SavedRow, connection: Any, send: Callable[[], int]) -> bool | None:
    """Announce the write, send the statement in autocommit, and return whether a row matched.

    Return None, without having changed anything, if the statement must run in a transaction
    instead. That is so if ``connection.limited_session()`` cannot limit the time of the statement,
    or if the announcement or the statement has taken too long.
    """
    cache = runtime.cache()
    assert cache is not None
    markers = TransactionMarkers(cache, connection)
    # The commit must begin within COMMIT_WITHIN seconds after the announcement was begun. Half of
    # this time is for the announcement and for the way of the statement to the server, and the
    # other half for the execution of the statement.
    limit = cache.options.commit_within / 2
    with connection.limited_session(limit) as is_limited:
        if not is_limited:
            return None
        row.touch(markers)
        connection.hold_session()
        try:
            changed = 0
            try:
                is_announced = markers.announce_within(limit)
                if is_announced:
                    changed = send()
            except BaseException as exc:
                # If the session is lost, the server may still execute the statement. Otherwise the
                # write is over, because the server has answered, or because the statement has not
                # reached the server.
                if not connection.session_id().connection:
                    markers.lost()
                    raise
                markers.over()
                if connection.is_statement_limit(exc):
                    return None
                raise
            markers.over()
            return bool(changed) if is_announced else None
        finally:
            connection.release_session()
