"""Conditions on the shard that has certain model instances.

A shard key may move to another shard after the queryset was built. So these conditions look up the
shard of the instances each time a query is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharded_orm import runtime
from sharded_orm.exceptions import KeyMoved
from sharded_orm.models.sharding.current_shard import unwrapped
from sharded_orm.models.sharding.key_errors import describe
from sharded_orm.models.sharding.options import ShardOptions
from sharded_orm.models.sharding.row_placement import colocated_alias
from sharded_orm.routing.where_clause import OnlyOnShard, OnShard


def on_shard_of(
    options: ShardOptions, instances: Sequence[Any], *, ids_are_unique: bool = False
) -> OnShard:
    """Return a condition that is true for rows on the shard that has ``instances``.

    The shard is looked up when the query is sent, because the key of ``instances`` may move to
    another shard after the queryset was built.

    :param options: the options of the query's model.
    :param instances: at least one instance, all on one shard of the group of ``options``.
    :param ids_are_unique: as :attr:`OnShard.ids_are_unique`.
    """
    if runtime.strategy(options.group).moves_keys:
        return _OnShardOf(options, tuple(map(frozen, instances)), ids_are_unique=ids_are_unique)
    alias = str(colocated_alias(options, instances[0]))
    return OnShard(alias, ids_are_unique=ids_are_unique)


def only_on_shard_of(options: ShardOptions, instances: Sequence[Any]) -> OnlyOnShard:
    """Return a condition that makes its query raise an error if the query would be sent to another
    shard than that of ``instances``.

    The arguments are those of :func:`on_shard_of`.
    """
    if runtime.strategy(options.group).moves_keys:
        return _OnlyOnShardOf(options, tuple(map(frozen, instances)))
    return OnlyOnShard(str(colocated_alias(options, instances[0])))


def frozen(instance: Any) -> Any:
    """Return a copy of a model instance that stays on its shard if the program changes the instance.

    For example, a program may build ``Photo.objects.filter(album=album)``, then store ``album`` as
    a new row of another user, and then read the photos. The query must still find the photos of the
    former album. Only the shard of the copy and the values of its fields may be used.

    :param instance: an instance, or a lazy object that is one.
    """
    instance = unwrapped(instance)
    copy, state = object.__new__(type(instance)), object.__new__(type(instance._state))
    copy.__dict__.update(instance.__dict__)
    state.__dict__.update(instance._state.__dict__)
    # The shard of a row without a key is that of the rows to which it refers.
    state.fields_cache = {**instance._state.fields_cache}
    copy.__dict__["_state"] = state
    return copy


class _OnShardOf(OnShard):
    def __init__(
        self, options: ShardOptions, instances: tuple[Any, ...], *, ids_are_unique: bool = False
    ) -> None:
        self._options, self._instances = options, instances
        alias = str(colocated_alias(options, instances[0]))
        super().__init__(alias, ids_are_unique=ids_are_unique)

    @property
    def alias(self) -> str:
        aliases = {str(colocated_alias(self._options, row)) for row in self._instances}
        if len(aliases) > 1:
            rows = ", ".join(map(describe, self._instances[:3]))
            raise KeyMoved(
                f"A query compares with {rows}, which were on one shard. A shard key has moved since the"
                f" queryset was built, and they are on {sorted(aliases)!r} now. Build the queryset again."
            )
        return aliases.pop()

    @alias.setter
    def alias(self, alias: str) -> None:
        pass  # Do nothing: the shard is looked up for each query, so an assigned alias would be wrong.


class _OnlyOnShardOf(_OnShardOf, OnlyOnShard):
    pass
