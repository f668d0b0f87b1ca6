"""Reads by plans: the SQL for queries of one shape is compiled once, and reused with other values.

A new queryset records the calls that build it (see :mod:`sharded_orm.models.plans.shapes`). If the
rows are read when nothing else was done with the queryset, a plan sends the query. Every other use
needs :attr:`PlannedQuerySet.query`, which applies the recorded calls to an ordinary query. From
then on, the queryset is like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any, Generic, Self, overload

from django.apps import apps
from django.db import connections
from django.db.models.query import MAX_GET_RESULTS, ModelIterable, QuerySet

from sharded_orm import runtime
from sharded_orm.backends import key_guard
from sharded_orm.models.cached.cached_model import declares_cache
from sharded_orm.models.moves.confirmation import confirmed
from sharded_orm.models.plans.inserts import forget as forget_inserts
from sharded_orm.models.plans.plan import COUNT, EXISTS, GET, ROWS, Plan, compile_plan
from sharded_orm.models.plans.saves import forget as forget_saves
from sharded_orm.models.plans.shapes import Recording, Shape, logger
from sharded_orm.models.plans.shapes import forget as forget_shapes
from sharded_orm.models.plans.switch import are_plans_on
from sharded_orm.models.plans.switch import without_plans as without_plans
from sharded_orm.models.querysets.bound import BoundKeyQuerySet
from sharded_orm.models.querysets.guesses import shard_of
from sharded_orm.models.querysets.route import PLAIN_KEYS, has_one_table, is_scoped, plain_key
from sharded_orm.models.querysets.value_keys import ValueKeys
from sharded_orm.models.sharding import key_sources
from sharded_orm.models.sharding.bound_key import is_any_bound
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.models.sharding.query import ShardedQuery
from sharded_orm.models.sharding.type_variables import M
from sharded_orm.routing.where_clause import KeysOfRows
from sharded_orm.topology.model import Shard

# The value of ``_query`` as long as the recorded calls have not been applied to a query.
_UNBUILT: Any = object()
_build_lock = RLock()

# The attributes that are copied or set by _clone() of Django's QuerySet and of this package's
# querysets.
_COPIED = frozenset(QuerySet().__dict__) | {
    "_is_using_called", "_partial", "_recording", "_scatters", "_uncached",
}  # fmt: skip


class PlannedQuerySet(BoundKeyQuerySet[M]):
    """A mixin that reads by a plan where it can, and otherwise as its base class does.

    A plan is SQL that was compiled once for all queries which differ only in their values.
    """

    #: The calls that have built this queryset. None if its query was built in another way, or if
    #: a caller may have changed the query.
    _recording: Recording | None = None

    def __init__(
        self, model: Any = None, query: Any = None, using: str | None = None, hints: Any = None
    ) -> None:
        recording = None
        if query is None and using is None and not hints and are_plans_on():
            recording = _new_recording(type(self), model)
        if recording is None or is_any_bound():
            super().__init__(model, query, using, hints)
        else:
            super().__init__(model, _UNBUILT, using, hints)
            self._recording = recording

    if TYPE_CHECKING:
        _query: Any  # These attributes are missing in the stubs of Django's QuerySet.
    else:  # For type checkers, ``query`` is the attribute of Django's QuerySet.

        @property
        def query(self) -> Any:
            """The query, as in Django's QuerySet.

            Reading this attribute ends the recording of calls, because the caller may change the
            query.
            """
            if self._recording is not None:
                self._end_recording()
            return QuerySet.query.fget(self)

        @query.setter
        def query(self, value: Any) -> None:
            self._recording = None
            QuerySet.query.fset(self, value)

    def _end_recording(self) -> None:
        """Apply the recorded calls to an ordinary query, and stop recording."""
        if self._recording is None:
            return
        # Take a lock: another thread may use this queryset at the same time, and both must get the
        # same query.
        with _build_lock:
            recording = self._recording
            if recording is not None and self._query is _UNBUILT:
                query = ShardedQuery(self.model)
                recording.replay(query)
                self._query = query
            self._recording = None

    def _filter_or_exclude_inplace(self, negate: bool, args: Any, kwargs: Any) -> None:
        # Overrides QuerySet._filter_or_exclude_inplace(), which changes ``_query``. So the query is
        # built first.
        self._end_recording()
        super()._filter_or_exclude_inplace(negate, args, kwargs)  # type: ignore[misc]  # missing in Django's type stubs

    def __getstate__(self) -> Any:
        self._end_recording()
        return super().__getstate__()

    def __deepcopy__(self, memo: Any) -> Any:
        self._end_recording()
        return super().__deepcopy__(memo)

    def uncached(self) -> Self:
        clone = super().uncached()
        # Querysets of cached models record no calls, because a plan does not ask the cache. This one
        # will not ask it, either.
        if clone._recording is None and are_plans_on() and not is_any_bound():
            query: Any = clone.query
            if clone._has_no_options() and query.bound_key is None:
                recording = _new_recording(type(clone), clone.model, is_uncached=True)
                if recording is not None:
                    clone._query = _UNBUILT
                    clone._recording = recording
        return clone

    def _recorded(self) -> Recording | None:
        """Return the recorded calls; None if no call may be recorded and no plan may be used."""
        recording = self._recording
        if (
            recording is None
            or self._db is not None
            or self._hints
            or self._known_related_objects  # type: ignore[attr-defined]  # missing in Django's type stubs
            or self._iterable_class is not ModelIterable
            or not getattr(self, "_cloning_enabled", True)  # of Django 6.1
            or self._sticky_filter  # type: ignore[attr-defined]  # missing in Django's type stubs
            or self._defer_next_filter  # type: ignore[attr-defined]  # missing in Django's type stubs
            or self._deferred_filter is not None  # type: ignore[attr-defined]  # missing in Django's type stubs
            or is_any_bound()
            or not are_plans_on()
        ):
            return None
        return recording

    def _with_recording(self, recording: Recording) -> Self:
        clone: Self = object.__new__(type(self))
        attributes = clone.__dict__
        attributes.update(self.__dict__)
        if not attributes.keys() <= _COPIED:
            # Do not copy an attribute or method that the project has set on this one object.
            for name in attributes.keys() - _COPIED:
                del attributes[name]
        attributes["_recording"] = recording
        attributes["_query"] = _UNBUILT
        # Use a new dict, because QuerySet._add_hints() changes the dict in place. _recorded() has
        # made sure that there are no hints.
        attributes["_hints"] = {}
        attributes["_result_cache"] = None
        attributes["_prefetch_done"] = False
        return clone

    def _clone(self) -> Self:
        # Overrides QuerySet._clone(), which would copy the query. While calls are recorded, no
        # query is built, so copy only the recording.
        recording = self._recorded()
        return super()._clone() if recording is None else self._with_recording(recording)

    def filter(self, *args: Any, **kwargs: Any) -> Self:
        recording = self._recorded() if kwargs and not args else None
        if recording is None or recording.limits is not None:
            return super().filter(*args, **kwargs)
        longer = recording.filtered(kwargs)
        if longer is not None:
            return self._with_recording(longer)
        filtered = super().filter(**kwargs)
        recording.learn_filter(kwargs)
        filtered._recording = recording.filtered(kwargs)
        return filtered

    def order_by(self, *field_names: Any) -> Self:
        recording = self._recorded()
        if recording is None or recording.limits is not None:
            return super().order_by(*field_names)
        ordered = recording.ordered(field_names)
        if ordered is not None:
            return self._with_recording(ordered)
        in_order = super().order_by(*field_names)
        recording.learn_order(field_names)
        in_order._recording = recording.ordered(field_names)
        return in_order

    @overload
    def __getitem__(self, k: int) -> M: ...
    @overload
    def __getitem__(self, k: slice) -> Self: ...
    def __getitem__(self, k: Any) -> Any:
        if self._result_cache is None and type(k) is slice and k.step is None:
            start, stop = k.start or 0, k.stop
            if type(start) is type(stop) is int and 0 <= start < stop:
                recording = self._recorded()
                if recording is not None and recording.limits is None:
                    return self._with_recording(recording._replace(limits=(start, stop)))
        return super().__getitem__(k)

    # -- Reading ---------------------------------------------------------------------------

    def _fetch_all(self) -> None:
        recording = self._recorded() if self._result_cache is None else None
        if recording is not None:
            rows = self._read(ROWS, recording, recording.limits, super()._fetch_all)
            if self._result_cache is None:
                self._result_cache = rows
        super()._fetch_all()

    def get(self, *args: Any, **kwargs: Any) -> M:
        recording = self._recorded() if kwargs and not args else None
        # Only _fetch_all() prefetches.
        if recording is None or recording.limits is not None or self._prefetch_related_lookups:
            return super().get(*args, **kwargs)
        selected = recording.filtered(kwargs)
        if selected is None:
            matching = self.filter(**kwargs)
            if matching._recording is not None:
                matching._recording.shape.seen.add(GET)
            return self._only_row(matching._matches())
        matching = self._with_recording(selected)
        limits = (0, MAX_GET_RESULTS)
        return self._only_row(matching._read(GET, selected, limits, matching._matches))

    def first(self) -> M | None:
        recording = self._recording
        if recording is None or recording.shape.ordering is not None or self.ordered:
            return super().first()
        # Do the same as QuerySet.first(), but without ``query``, which would end the recording.
        for row in self.order_by("pk")[:1]:
            return row
        return None

    @property
    def ordered(self) -> bool:
        recording = self._recording
        if recording is None:
            return super().ordered
        ordering = recording.shape.ordering
        return bool(self.model._meta.ordering if ordering is None else ordering)

    def exists(self) -> bool:
        recording = self._recorded() if self._result_cache is None else None
        if recording is None or recording.limits is not None:
            return super().exists()
        return bool(self._read(EXISTS, recording, (0, 1), super().exists))

    def count(self) -> int:
        recording = self._recorded() if self._result_cache is None else None
        if recording is None or recording.limits is not None:
            return super().count()
        return int(self._read(COUNT, recording, None, super().count))

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
                _learn(kind, recording, connections[planned.alias])
        return result

    def _read_by_values(self, planned: _PlanRead) -> Any:
        """Read a query whose conditions have no shard key, on the shard that a source of keys finds.

        A source of keys is an object that looks up a row's shard key by a value in another column.

        If a source only remembers the key, reading the key's shard shows whether the key is right;
        see :mod:`sharded_orm.models.querysets.guesses`.
        """
        if not key_sources.has_key_sources() or self._scatters or is_scoped():
            return _UNKNOWN
        keys = ValueKeys(planned.recording)
        key_guess = None if planned.kind == COUNT else keys.guess()
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


def _learn(kind: str, recording: Recording, connection: Any) -> None:
    """Make the plan of a recorded query. Called after Django has run the query on ``connection``."""
    shape = recording.shape
    plan: Plan | None = None
    try:
        plan = _plan_of_example(kind, recording, connection)
    except Exception:
        # A field or the backend refuses the values of the example query. The read itself has
        # succeeded, so ignore the error. Django compiles such reads each time.
        logger.debug("%s has no plan", shape, exc_info=True)
    logger.debug("%s of %s: %s", kind, shape, "left to Django" if plan is None else "planned")
    shape.plans[kind] = plan


def _plan_of_example(kind: str, recording: Recording, connection: Any) -> Plan | None:
    shape, example = recording.shape, recording.example()
    if example is None:
        return None
    query = ShardedQuery(shape.options.model)
    example.replay(query)
    if not has_one_table(query, ordered=kind == ROWS):
        return None
    key = None if shape.shard_at is None else example.values[shape.shard_at]
    if plain_key(shape.options, query, ordered=kind == ROWS) != key:
        return None
    return compile_plan(kind, query, shape.conditions, example.values, connection)


# A read by a plan (stored SQL of an earlier, similar query) does not call these methods. So the
# querysets of a project that overrides one of them are not recorded and use no plans.
_SKIPPED = (
    "__init__", "__iter__", "__new__", "_chain", "_clone", "_fetch_all", "_filter_or_exclude",
    "_filter_or_exclude_inplace", "db", "filter", "query",
)  # fmt: skip
_METHODS = {n for n, m in vars(QuerySet).items() if callable(m) or isinstance(m, property)}
_new_recordings: dict[tuple[Any, Any, bool], Recording | None] = {}


def _forget() -> None:
    # The settings have changed, and with them perhaps which ids determine a shard. So drop all
    # shapes, the stored forms of queries.
    _new_recordings.clear()
    forget_shapes()
    forget_saves()
    forget_inserts()


runtime.on_reset(_forget)


def _new_recording(
    queryset_class: Any, model: Any, *, is_uncached: bool = False
) -> Recording | None:
    """Return an empty recording of calls for a new queryset; None if its class records no calls.

    :param is_uncached: whether the queryset does not read through the cache (default: it may).
    """
    try:
        return _new_recordings[queryset_class, model, is_uncached]
    except KeyError:
        pass
    if model is None or model._meta.apps is not apps or not apps.models_ready:
        # Do not store a historical model in the dict, because it must be possible to
        # garbage-collect it.
        return None
    options = shard_options(model)
    recording = None
    if (
        options is not None
        and options.key is not None
        and (is_uncached or not declares_cache(model))
        and _skips_nothing(queryset_class)
    ):
        recording = Recording(Shape(options))
    _new_recordings[queryset_class, model, is_uncached] = recording
    return recording


def _skips_nothing(queryset_class: Any) -> bool:
    """Whether all definitions of the methods in :data:`_SKIPPED` are Django's or this package's.

    All base classes are examined, also those that come after this package's classes in the method
    resolution order.
    """
    bases = [base for base in queryset_class.__mro__ if base not in (object, Generic)]
    # A class of the project that comes after PlannedQuerySet may override any method of Django's,
    # because the methods of PlannedQuerySet may not call it.
    behind = bases[bases.index(PlannedQuerySet) :]
    return all(
        _module_of(member).startswith(("django.db.models.", "sharded_orm.models."))
        for base in bases
        for name, member in vars(base).items()
        if name in _SKIPPED or (base in behind and name in _METHODS)
    )


def _module_of(member: Any) -> str:
    function = member.fget if isinstance(member, property) else member
    return str(getattr(function, "__module__", ""))
