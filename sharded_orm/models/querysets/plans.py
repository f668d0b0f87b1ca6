"""Reads of sharded models by plans: SQL that was compiled once, and is reused with other values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from django.db import connections

from sharded_orm import runtime
from sharded_orm.backends import key_guard
from sharded_orm.models.cached.cached_model import declares_cache
from sharded_orm.models.moves.confirmation import confirmed
from sharded_orm.models.plans.plan import COUNT, GET, ROWS
from sharded_orm.models.plans.shapes import Recording, Shape
from sharded_orm.models.plans.switch import are_plans_on
from sharded_orm.models.plans.switch import without_plans as without_plans
from sharded_orm.models.querysets.bound import BoundKeyQuerySet
from sharded_orm.models.querysets.guesses import shard_of
from sharded_orm.models.querysets.plan_examples import learn
from sharded_orm.models.querysets.recorder import CallRecorder
from sharded_orm.models.querysets.route import PLAIN_KEYS, is_scoped, plain_key
from sharded_orm.models.querysets.value_keys import ValueKeys
from sharded_orm.models.sharding import key_sources
from sharded_orm.models.sharding.bound_key import is_any_bound
from sharded_orm.models.sharding.options import colocated_alias, shard_options
from sharded_orm.models.sharding.query import ShardedQuery
from sharded_orm.models.sharding.type_variables import M
from sharded_orm.routing.where_clause import KeysOfRows
from sharded_orm.topology.model import Shard


class PlannedQuerySet(CallRecorder[M], BoundKeyQuerySet[M]):
    """A mixin that reads by a plan where it can, and otherwise as its base class does.

    A plan is SQL that was compiled once for all queries which differ only in their values.
    """

    @classmethod
    def _first_shape(cls, model: Any, *, is_uncached: bool) -> Shape | None:
        options = shard_options(model)
        if options is None or options.key is None:
            return None
        return Shape(model, options) if is_uncached or not declares_cache(model) else None

    @classmethod
    def _new_query(cls, model: Any) -> Any:
        return ShardedQuery(model)

    @classmethod
    def _is_routed(cls, kind: str, example: Recording) -> bool:
        shape = example.shape
        # The conditions of exclude() do not determine the shard.
        query = ShardedQuery(shape.model)
        example.replay(query, excludes=False, selects=False)
        key = None if shape.shard_at is None else example.values[shape.shard_at]
        options = shape.options
        return options is not None and plain_key(options, query, ordered=kind == ROWS) == key

    def _records(self, using: str | None, hints: Any) -> bool:
        return using is None and not hints and not is_any_bound()

    def _may_read_by_plan(self) -> bool:
        return self._db is None and not is_any_bound()

    def uncached(self) -> Self:
        clone = super().uncached()
        # Querysets of cached models record no calls, because a plan does not ask the cache. This one
        # will not ask it, either.
        if clone._recording is None and are_plans_on() and clone._records(clone._db, clone._hints):
            query: Any = clone.query
            if clone._has_no_options() and query.bound_key is None:
                clone._start_recording(is_uncached=True)
        return clone

    def _read(
        self,
        kind: str,
        recording: Recording,
        limits: tuple[int, int | None] | None,
        read_by_django: Callable[[], Any],
    ) -> Any:
        """Read the recorded query by its plan, or by ``read_by_django`` if it has no plan.

        A plan is SQL that was compiled once for all such queries.

        :returns: the rows as a list, or for :data:`EXISTS` or :data:`COUNT` the value.
        """
        shape = recording.shape
        if (
            self._for_write
            or shape.plans.get(kind, _UNKNOWN) is None
            or not runtime.config().read_plans
        ):
            return read_by_django()
        planned = _PlanRead(self, kind, recording, limits)
        if shape.shard_at is None:
            result = self._read_by_values(planned)
        else:
            key = recording.values[shape.shard_at]
            if type(key) not in PLAIN_KEYS:
                return read_by_django()
            result = planned.at_shard(lambda: runtime.locate(shape.options.group, key))
        if result is _UNKNOWN:
            if planned.known_keys is not None:
                self._known_keys = planned.known_keys
            try:
                result = read_by_django()
            finally:
                self.__dict__.pop("_known_keys", None)
            if planned.alias is not None:
                learn(kind, kind, recording, type(self), connections[planned.alias])
        return result

    def _read_by_values(self, planned: _PlanRead) -> Any:
        """Read a query whose conditions have no shard key, on the shard that a source of keys finds.

        A source of keys is an object that looks up a row's shard key by a value in another column.

        If a source only remembers the key, reading the key's shard shows whether the key is right;
        see :mod:`sharded_orm.models.querysets.guesses`.
        """
        if not key_sources.has_key_sources() or self._scatters or self._hints or is_scoped():
            return _UNKNOWN
        keys = ValueKeys(planned.recording)
        excludes = planned.recording.shape.excludes
        key_guess = None if planned.kind == COUNT or excludes else keys.guess()
        if key_guess is not None and key_guess.key is not None:
            guessed, result = key_guess, None
            try:
                result = planned.at_shard(lambda: shard_of(keys.group, guessed))
            finally:
                if not result:
                    key_guess.forget()
            if result:  # The result is rows, True for exists(), or _UNKNOWN.
                return result
        planned.known_keys = keys.known_keys
        return planned.at_shards(keys.shards)


class _PlanRead:
    """One read of a recorded query by its plan, the SQL that was compiled once for such queries.

    Not thread-safe.
    """

    def __init__(
        self,
        queryset: PlannedQuerySet[Any],
        kind: str,
        recording: Recording,
        limits: tuple[int, int | None] | None,
    ) -> None:
        self.kind, self.recording = kind, recording
        self._queryset, self._limits = queryset, limits
        #: The alias of the shard on whose connection a plan is to be compiled, once Django has run
        #: the query; None if no plan is to be made.
        self.alias: str | None = None
        #: The shard keys that the sources of keys have found for the query's values. They are
        #: stored here so that the sources are not queried again.
        self.known_keys: KeysOfRows | None = None

    def at_shard(self, find: Callable[[], Shard | None]) -> Any:
        """Do the read on the shard that ``find()`` returns; return _UNKNOWN if Django must do it."""

        def read() -> Any:
            shard = find()
            return _UNKNOWN if shard is None else self._on(shard)

        return confirmed(self.recording.shape.options.group, read)

    def at_shards(self, find: Callable[[], Sequence[Shard] | None]) -> Any:
        """Do the read if ``find()`` returns a list of at most one shard; otherwise return _UNKNOWN."""

        def read() -> Any:
            shards = find()
            if shards is None or len(shards) > 1:
                return _UNKNOWN
            if shards:
                return self._on(shards[0])
            return [] if self.kind in (ROWS, GET) else 0  # No shard has rows.

        return confirmed(self.recording.shape.options.group, read)

    def _on(self, shard: Shard) -> Any:
        kind, recording = self.kind, self.recording
        shape = recording.shape
        connection: Any = connections[shard.alias]
        plan = shape.plans.get(kind)
        if plan is None or plan.backend is not type(connection):
            self.alias = shard.alias if kind in shape.seen else None
            shape.seen.add(kind)
            return _UNKNOWN
        for instance in recording.instances:
            if colocated_alias(shape.options, instance) != shard.alias:
                return _UNKNOWN
        parameters = plan.parameters(recording.values, connection)
        if parameters is None:
            return _UNKNOWN
        # Check the collation of text shard keys, as the compiler does for each statement (ReadMixin).
        if (own := getattr(connection, "shard", None)) is not None:
            key_guard.check(connection, (own,), plan.tables)
        if kind in (ROWS, GET):
            return plan.rows(parameters, connection, self._queryset, self._limits)
        return plan.scalar(parameters, connection, self._limits)


_UNKNOWN: Any = object()
