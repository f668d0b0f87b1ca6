"""What reads through the cache need to know about the key fields of each cached model.

A :class:`LookupPlan` is for one model. It contains the columns of the primary key and of the shard
key, and their positions in a row. It also contains the column of ``ShardMeta.isolate_key``, a field
that divides the cached lists of a shard key.
"""

from __future__ import annotations

from typing import Any

from sharded_orm.cache.guards import digest
from sharded_orm.cache.process_cache import Decoded
from sharded_orm.cache.requests import RowAddress
from sharded_orm.cache.values import Row
from sharded_orm.models.cached.cached_model import CachedModel, cached_model
from sharded_orm.routing.base import Strategy

# The largest number of addresses that a plan remembers.
_MOST_ADDRESSES = 4096


class LookupPlan:
    """The positions and columns of the key fields of a cached model, for reads through the cache.

    Thread-safe.
    """

    def __init__(self, model: Any, cached: CachedModel) -> None:
        self.cached = cached
        self.model = model
        meta = model._meta
        fields = list(meta.concrete_fields)
        self.pk_positions = [fields.index(part.field) for part in cached.pk_fields]
        key = cached.key
        self.key_position = None if key is None else fields.index(key)
        #: The positions of the fields of the primary key and of the shard key.
        self.key_positions = {*self.pk_positions}
        if self.key_position is not None:
            self.key_positions.add(self.key_position)
        self.key_column = None if key is None else key.column
        self.isolate_column = None if cached.isolate is None else cached.isolate.column
        self.pk_columns = [part.field.column for part in cached.pk_fields]
        #: The columns of the shard key and the primary key. If a query compares each of these
        #: columns with one value by ``=``, it selects at most one row.
        self.object_columns = {*self.pk_columns, *([key.column] if key is not None else ())}
        self.key_is_pk = key is not None and len(cached.pk_fields) == 1 and key == cached.pk
        self._decoded: dict[tuple[str, str], Decoded] = {}
        self._addresses: tuple[Strategy | None, dict[Any, RowAddress]] = None, {}

    def addresses(self, strategy: Strategy) -> dict[Any, RowAddress]:
        """Return a dict in which callers remember the addresses of rows.

        The dict maps a primary key to the row's address (its shard and its name in the cache). If
        keys of the group can move, each call returns a new, empty dict, so nothing is remembered.

        :param strategy: the strategy of the group. After a change of the topology, the group has a
            new strategy, and the dict is a new, empty one.
        """
        if strategy.moves_keys:
            return {}
        found_by, addresses = self._addresses
        if found_by is not strategy or len(addresses) >= _MOST_ADDRESSES:
            addresses = {}
            self._addresses = strategy, addresses
        return addresses

    def fingerprint(self, vendor: str) -> str:
        """Return the fingerprint of the format in which a database of ``vendor`` returns rows.

        The format depends on the model's fields and the vendor's driver. Cached rows with another
        fingerprint are not used.

        :param vendor: Django's name of the vendor, such as ``"mysql"``.
        """
        return digest(self.cached.type.fingerprint, vendor)[:8]

    def decoded(self, vendor: str, timezone: str) -> Decoded:
        return self._decoded.setdefault((vendor, timezone), Decoded())

    def pk_token(self, values: Row) -> str | None:
        positions = self.pk_positions
        if len(positions) == 1:
            return self.cached.pk_token(values[positions[0]])
        return self.cached.pk_token(tuple(values[position] for position in positions))


_plans: dict[Any, LookupPlan | None] = {}


def plan_of(model: Any) -> LookupPlan | None:
    """Return the :class:`LookupPlan` of ``model``; None if reads of the model are not cached."""
    cached = cached_model(model)
    if cached is None:
        return None
    plan = _plans.get(model)
    if plan is None or plan.cached is not cached:
        if model._meta.apps is not cached.model._meta.apps:
            # ``model`` is a historical model of a migration. Migrations always read from the
            # database.
            return None
        plan = _plans[model] = LookupPlan(model, cached)
    return plan
