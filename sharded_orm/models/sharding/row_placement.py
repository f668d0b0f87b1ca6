"""The shard of a row: where it is stored, or where a new row is to be stored.

To *place* a key means to choose its shard and record the shard permanently. Strategies that compute
the shard from the key do not need this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.db.models import Model

from sharded_orm import runtime
from sharded_orm.exceptions import UnplacedKey
from sharded_orm.models.sharding.current_shard import current_alias, unwrapped
from sharded_orm.models.sharding.kept_shard import find_shard
from sharded_orm.models.sharding.key_errors import describe
from sharded_orm.models.sharding.new_keys import refuse_dangling_keys
from sharded_orm.models.sharding.options import ShardOptions, options_of
from sharded_orm.topology.model import Shard


def locate(options: ShardOptions, instance: Model) -> Shard | None:
    """Return the shard of ``instance``, or None if it has no shard yet. Never chooses a shard.

    Usually, the shard key determines the shard. If the model has no key, or the key is not
    generated yet, ``instance`` belongs on the shard of the row that was passed as ``near=``. If
    there is no such row, it belongs on the shard of a row of the same group to which it refers.
    """
    if options.key is None or options.awaits_key(instance):
        return _shard_of_relations(options, instance)
    return find_shard(instance, options.group, options.key_of(instance), runtime.locate)


def place(options: ShardOptions, instance: Model, *, check_key: bool = True) -> Shard:
    """Return the shard on which ``instance`` is about to be stored.

    If its shard key has no shard yet, the group's strategy chooses a shard and records it.

    If the model has no key, or the key is not generated yet, the shard is found as by
    :func:`locate`. If no other row determines the shard, a row whose key will be generated gets a
    random open shard. ``instance`` keeps this shard until it is stored. But if the node of the
    shard cannot be reached, the next call chooses another shard.

    :param check_key: whether a new key that is a foreign key to the global database must refer to
        an existing row.
    :raises ShardKeyRequired: the shard key is missing, or the model has no key and no other row
        determines the shard.
    :raises DanglingShardKey: the row to which a new key refers does not exist.
    :raises NoOpenShard: no shard is open for new keys.
    :raises UnplacedKey: the row passed as ``near=`` is on no shard yet.
    :raises InvalidShardKey: the shard key, or an id in a foreign key of ``instance``, is a value
        that no row can have.
    """
    shard = None
    if options.key is None or options.awaits_key(instance):
        shard = _shard_of_relations(options, instance, for_write=True)
    if shard is not None:
        return shard
    if not options.awaits_key(instance):
        placed = find_shard(
            instance,
            options.group,
            options.key_of(instance),
            (lambda _, key: place_key(options, key)) if check_key else runtime.place,
        )
        assert placed is not None
        return placed
    state: Any = instance._state
    if (near := getattr(state, "near", None)) is not None:
        raise UnplacedKey(
            f"near={describe(near)} is on no shard of group {options.group!r} yet: save it first."
        )
    strategy = runtime.strategy(options.group)
    drawn: int | None = getattr(state, "drawn_shard", None)
    if drawn is not None:
        shard = runtime.shard(options.group, drawn)
        if strategy.node_failure(shard) is None:
            return shard
        # Draw another shard, because the node of the earlier one cannot be reached. An attempt to
        # store the row there may have failed already.
    drawn = state.drawn_shard = strategy.draw()
    return runtime.shard(options.group, drawn)


def place_key(options: ShardOptions, key: Any) -> Shard:
    """Return the shard of ``key`` in the group of ``options``.

    If the key has no shard yet, choose a shard and record it.

    :raises DanglingShardKey: the key is new, and the row to which it refers does not exist.
    """
    shard = runtime.locate(options.group, key)
    return shard or runtime.shard(options.group, _place_new(options, [key])[key])


def place_keys(options: ShardOptions, keys: Iterable[Any]) -> dict[Any, int]:
    """Map each key to the number of its shard.

    If a key has no shard yet, a shard is chosen and recorded, as in :func:`place_key`.
    """
    numbers = runtime.strategy(options.group).locate_many(keys)
    placed = {key: number for key, number in numbers.items() if number is not None}
    return placed | _place_new(options, [key for key in numbers if key not in placed])


def _place_new(options: ShardOptions, keys: list[Any]) -> dict[Any, int]:
    strategy = runtime.strategy(options.group)
    refuse_dangling(options, keys)
    return strategy.place_new(keys)


def refuse_dangling(options: ShardOptions, keys: Sequence[Any]) -> None:
    """Raise an error if one of the new shard keys ``keys`` refers to a row that does not exist.

    Sends one query per 500 keys. Does nothing if :attr:`ShardOptions.checks_keys` is false: then the
    keys need not refer to rows of the global database.
    """
    if options.checks_keys:
        refuse_dangling_keys(options.group, options.global_foreign_key, keys)


def _shard_of_relations(
    options: ShardOptions, instance: Any, *, for_write: bool = False
) -> Shard | None:
    others = [getattr(instance._state, "near", None), *instance._state.fields_cache.values()]
    for other in others:
        alias = colocated_alias(options, other) if other is not None else None
        if alias is not None:
            return runtime.topology().resolve(alias)
    for field in options.model._meta.concrete_fields:
        value = instance.__dict__.get(field.attname)
        if hasattr(value, "resolve_expression"):
            continue  # Skip a value that the database computes: it determines no shard yet.
        if value is not None and options.names_shard(field):
            # ``value`` is the key of a row to which ``instance`` refers. Before a write, call
            # runtime.place() if the strategy computes the shard, because it refuses an id that no
            # row can have. If the strategy records the shard of each key, call runtime.locate():
            # place() would record a shard for this key, although no row with it is written now.
            must_exist = for_write and not runtime.strategy(options.group).places
            look_up = runtime.place if must_exist else runtime.locate
            return find_shard(instance, options.group, field.get_prep_value(value), look_up)
    return None


def colocated_alias(options: ShardOptions, instance: Any) -> str | None:
    """Return the alias of the shard of ``instance`` if that shard is in the group of ``options``.

    Return None if ``instance`` is global, of another group, or not on a shard yet.
    """
    instance = unwrapped(instance)
    other = options_of(instance)
    if other is None or other.group != options.group:
        return None
    alias = instance._state.db
    if alias is not None and alias != options.group and not instance._state.adding:
        return current_alias(other, instance)
    # Read __dict__ instead of the attribute. While Model.__init__() runs, a relation may be set
    # before the shard key. Django would take the missing key for a deferred field, and would query
    # it.
    if other.key is not None and instance.__dict__.get(other.key.attname) is None:
        return None
    shard = locate(other, instance)
    return shard.alias if shard is not None else None
