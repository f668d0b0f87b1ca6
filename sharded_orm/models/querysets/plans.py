"""Reads with plans, for sharded models.

A plan is SQL that was compiled once for all queries that differ only in their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

from django.db import connections
from django.db.models.query import MAX_GET_RESULTS

from sharded_orm import runtime
from sharded_orm.backends.group.shard_connections import connection_of
from sharded_orm.models.cached.lookup_plan import plan_of
from sharded_orm.models.moves.confirmation import confirmed
from sharded_orm.models.plans.kept_shapes import plan_uses as plan_uses
from sharded_orm.models.plans.plan import COUNT, GET, ROWS, UNREAD
from sharded_orm.models.plans.shapes import Recording, Shape
from sharded_orm.models.plans.switch import are_plans_on
from sharded_orm.models.plans.switch import without_plans as without_plans
from sharded_orm.models.querysets.bound import BoundKeyQuerySet
from sharded_orm.models.querysets.guesses import shard_of
from sharded_orm.models.querysets.one_row import only_row
from sharded_orm.models.querysets.original_methods import gets_as_django
from sharded_orm.models.querysets.plan_examples import learn
from sharded_orm.models.querysets.recorded_reads import RecordedReads
from sharded_orm.models.querysets.route import PLAIN_KEYS, Route, is_scoped, plain_key
from sharded_orm.models.querysets.value_keys import ValueKeys
from sharded_orm.models.sharding import key_sources
from sharded_orm.models.sharding.bound_key import is_any_bound, key_in_force, last_binding
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.models.sharding.query import ShardedQuery
from sharded_orm.models.sharding.row_placement import colocated_alias
from sharded_orm.models.sharding.type_variables import M
from sharded_orm.routing.where_clause import KeysOfRows
from sharded_orm.topology.model import Shard


class PlannedQuerySet(RecordedReads[M], BoundKeyQuerySet[M]):
    """A mixin that reads with a plan if there is one, and otherwise as its base class does.

    A plan is SQL that was compiled once for all queries which differ only in their values.
    """

    def _with_bound_key(self) -> Self:
        if self._recording is not None and (
            last_binding() is None or key_in_force(self.model) is None
        ):
            # No key is bound now. None was bound when the queryset was built either, because a
            # queryset that is built under a bound key records no calls. Return here, because
            # super() would build the query.
            return self
        return super()._with_bound_key()

    @classmethod
    def _first_shape(cls, model: Any) -> Shape | None:
        options = shard_options(model)
        return None if options is None or options.key is None else Shape(model, options)

    @classmethod
    def _new_query(cls, model: Any) -> Any:
        return ShardedQuery(model)

    @classmethod
    def _is_routed(cls, kind: str, example: Recording) -> bool:
        shape = example.shape
        # Leave the conditions of exclude() out of this query, because they never determine the
        # shard.
        query = ShardedQuery(shape.model)
        example.replay(query, excludes=False, selects=False)
        key = None if shape.shard_at is None else example.values[shape.shard_at]
        options = shape.options
        return options is not None and plain_key(options, query, ordered=kind == ROWS) == key

    def _records(self, using: str | None, hints: Any) -> bool:
        return using is None and not hints and (last_binding() is None or not is_any_bound())

    def _may_read_by_plan(self) -> bool:
        if last_binding() is not None and is_any_bound():
            return False
        # A related manager or db_manager() can set an alias, too. Then the checks of
        # _destination() are needed, so Django must do the read.
        return self._db is None or self._is_using_called

    def get(self, *args: Any, **kwargs: Any) -> M:
        recording = None
        if (
            self._recording is None
            and kwargs
            and not args
            and gets_as_django(type(self), RecordedReads)
        ):
            recording = self._recording_under_bound_key()
        if recording is None:
            return super().get(*args, **kwargs)
        # Add the bound key (set by bound()) to the conditions, so that a plan can read the row.
        named = self._naming_bound_key(kwargs)
        selected = recording.filtered(named)
        if selected is None:
            found = super().get(**kwargs)
            recording.learn_filter(named)
            return found
        by_django = super().get
        limits = (0, MAX_GET_RESULTS)
        row: M = only_row(
            self.model, self._read(GET, selected, limits, lambda: [by_django(**kwargs)])
        )
        return row

    def _recording_under_bound_key(self) -> Recording | None:
        """Return an empty recording if this queryset is ``objects.all()`` inside of ``bound()``.

        A recording is a list of the calls that build a queryset. With it, ``get()`` can read by a
        plan. Return None if the queryset has a condition other than the bound key, or if the model
        is not cached.
        """
        key = key_in_force(self.model) if is_any_bound() else None
        if key is None or plan_of(self.model) is None or not are_plans_on():
            return None
        query: Any = self.query
        return self._new_recording() if query.bound_key == key and self._has_no_options() else None

    def explain_routing(self) -> Route:
        # Ask a copy, because Django's part needs a query. This queryset keeps its recorded calls,
        # so its rows can still be read by a plan.
        recording = self._recorded()
        if recording is None:
            return replace(super().explain_routing(), plan="Django compiles this query")
        route: Route = self._by_django(recording, "explain_routing")
        if route.outside is not None:
            return replace(route, plan="Django compiles queries of other databases")
        return replace(route, plan=_plan_phrase(recording.shape))

    def _read(
        self,
        kind: str,
        recording: Recording,
        limits: tuple[int, int | None] | None,
        read_by_django: Callable[[], Any],
    ) -> Any:
        shape = recording.shape
        plan = shape.plans.get(kind, UNREAD)
        if self._for_write or plan is None or not runtime.config().read_plans:
            return read_by_django()
        if shape.shard_at is not None:
            key = recording.values[shape.shard_at]
            if type(key) not in PLAIN_KEYS:
                return read_by_django()
            group = shape.options.group
            if (
                plan is not UNREAD
                and self._db is None
                and not recording.instances
                and not (strategy := runtime.strategy(group)).moves_keys
                and (shard := runtime.located(group, strategy, key)) is not None
            ):
                # A shortcut for the commonest read. It does the same as _PlanRead, but without the
                # cost of making such an object.
                connection = connection_of(shard.alias)
                if plan.fits(connection):
                    result = plan.read(kind, self, recording.values, limits, connection)
                    return read_by_django() if result is UNREAD else result
        planned = _PlanRead(self, kind, recording, limits)
        if self._is_pinned():
            result = confirmed(shape.options.group, planned.at_alias)
        elif shape.shard_at is None:
            result = self._read_by_values(planned)
        else:
            result = confirmed(shape.options.group, planned.at_key)
        if result is UNREAD:
            if planned.known_keys is None:
                result = read_by_django()
            else:
                with key_sources.hand_over(planned.known_keys):
                    result = read_by_django()
            planned.learn()
        return result

    def _prepared(self) -> Any:
        # Overrides _prepared(). It does not check that no key has moved, because its caller,
        # fetch_together(), checks this afterwards.
        recording = self._recorded() if self._result_cache is None else None
        planned = None if recording is None else self._planned_by_key(recording)
        if planned is None:
            return super()._prepared()
        read = (planned.at_alias if self._is_pinned() else planned.at_key)(prepares=True)
        if read is UNREAD:
            read = super()._prepared()
            planned.learn()
        return read

    def _planned_by_key(self, recording: Recording) -> _PlanRead | None:
        """Return a :class:`_PlanRead` for the recorded query.

        Return None if the query cannot be read with a plan on the shard of a key.
        """
        shape = recording.shape
        if (
            shape.shard_at is None
            or type(recording.values[shape.shard_at]) not in PLAIN_KEYS
            or self._for_write
            or shape.plans.get(ROWS, UNREAD) is None
            or not runtime.config().read_plans
        ):
            return None
        return _PlanRead(self, ROWS, recording, recording.limits)

    def _read_by_values(self, planned: _PlanRead) -> Any:
        """Read a query without a condition on the key, on the shard that a source of keys finds.

        A source of keys is an object that looks up a row's shard key by a value in another column.

        A source may remember the key from an earlier look-up. The query is then sent to the shard
        of this key. If it finds no row, the key may be out of date, and the source is queried; see
        :mod:`sharded_orm.models.querysets.guesses`.
        """
        if not key_sources.has_key_sources() or self._scatters or self._hints or is_scoped():
            return UNREAD
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
            if result:  # ``result`` is a list of rows, True for exists(), or UNREAD.
                return result
        planned.known_keys = keys.known_keys
        return planned.at_shards(keys.shards)


def _plan_phrase(shape: Shape) -> str:
    """Return whether the rows of queries of this shape are read with a plan, as a phrase."""
    if not runtime.config().read_plans:
        return "plans are switched off by READ_PLANS"
    plan = shape.plans.get(ROWS, UNREAD)
    if plan is None:
        return "Django compiles queries of this shape"
    if plan is UNREAD:
        return "no plan yet, the second read of this shape makes it"
    return f"rows are read by a plan, which was used {plan.uses} times"


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
        #: The alias of the shard whose connection compiles the plan (SQL for all similar queries).
        #: None if no plan is to be compiled. It is compiled after Django has run the query.
        self.alias: str | None = None
        #: A function that returns the shard keys that the sources of keys (such as a lookup table)
        #: have found. Django's read uses it, so that the sources are not queried twice.
        self.known_keys: KeysOfRows | None = None

    def at_key(self, *, prepares: bool = False) -> Any:
        """Do the read on the shard of the recorded shard key.

        Return UNREAD if Django must do the read. The caller must check that the key has not moved
        during the call.

        :param prepares: if True, do not read, but only prepare a read through the cache. The result
            is then the prepared read, or None if the cache is not used.
        """
        shape, values = self.recording.shape, self.recording.values
        assert shape.shard_at is not None
        shard = runtime.locate(shape.options.group, values[shape.shard_at])
        return UNREAD if shard is None else self._on(shard, prepares=prepares)

    def at_alias(self, *, prepares: bool = False) -> Any:
        """Do the read on the shard that ``using()`` names, even if the key is on another one.

        Return UNREAD if Django must do the read, because the plan is not made yet, or because
        ``using()`` does not name a shard of the model's group. The caller must check that the key
        has not moved during the call, because a cached read looks up the shard of the key.

        :param prepares: as in :meth:`at_key`.
        """
        shard = runtime.topology().resolve(str(self._queryset._db))
        if shard is None or shard.group != self.recording.shape.options.group:
            return UNREAD
        return self._on(shard, prepares=prepares)

    def at_shard(self, find: Callable[[], Shard | None]) -> Any:
        """Do the read on the shard that ``find()`` returns; return UNREAD if Django must do it."""

        def read() -> Any:
            shard = find()
            return UNREAD if shard is None else self._on(shard)

        return confirmed(self.recording.shape.options.group, read)

    def at_shards(self, find: Callable[[], Sequence[Shard] | None]) -> Any:
        """Do the read on the only shard that ``find()`` returns.

        If ``find()`` returns an empty list, no row exists, and nothing is sent. If it returns
        several shards, or None, return UNREAD. Django must then do the read.
        """

        def read() -> Any:
            shards = find()
            if shards is None or len(shards) > 1:
                return UNREAD
            if shards:
                return self._on(shards[0])
            return [] if self.kind in (ROWS, GET) else 0  # No shard has rows.

        return confirmed(self.recording.shape.options.group, read)

    def learn(self) -> None:
        """Make the plan, if this was at least the second query of this kind that Django has run."""
        if self.alias is not None:
            learn(
                self.kind,
                self.kind,
                self.recording,
                type(self._queryset),
                connections[self.alias],
            )

    def _on(self, shard: Shard, *, prepares: bool = False) -> Any:
        kind, recording = self.kind, self.recording
        shape = recording.shape
        connection: Any = connections[shard.alias]
        plan = shape.plans.get(kind)
        if plan is None or not plan.fits(connection):
            self.alias = shard.alias if kind in shape.seen else None
            shape.seen.add(kind)
            return UNREAD
        for instance in recording.instances:
            if colocated_alias(shape.options, instance) != shard.alias:
                return UNREAD
        queryset, values = self._queryset, recording.values
        if plan.cache is not None and queryset._is_pinned() and not self._is_cached_on(shard):
            queryset = queryset.uncached()
        if prepares:
            return plan.prepare(queryset, values, self._limits, connection)
        return plan.read(kind, queryset, values, self._limits, connection)

    def _is_cached_on(self, shard: Shard) -> bool:
        """Return whether a read on ``shard``, which ``using()`` names, may use the cache.

        Only rows on the shard of their key are cached. The key is not looked up for a read that
        does not use the cache, because then the directory need not answer.
        """
        shape = self.recording.shape
        if shape.shard_at is None or self._queryset._is_uncached():
            return False
        home = runtime.locate(shape.options.group, self.recording.values[shape.shard_at])
        return home is not None and home.alias == shard.alias
