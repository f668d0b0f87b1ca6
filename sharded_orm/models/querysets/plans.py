"""Reads by plans: the SQL of a shape of queries is compiled once, and bound to values afterwards.

A new queryset records the calls that build it, see :mod:`sharded_orm.models.plans.shapes`. If it is
read while it is nothing but recorded calls, a plan sends the query. Any other use of the queryset
reaches :attr:`PlannedQuerySet.query`, which makes the recorded calls on an ordinary query; from
then on it is like any queryset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock
from typing import TYPE_CHECKING, Any, Generic, Self, overload

from django.apps import apps
from django.db import connections
from django.db.models.query import MAX_GET_RESULTS, ModelIterable, QuerySet

from sharded_orm import runtime
from sharded_orm.backends import text_keys
from sharded_orm.models.cached.cached_model import declares_cache
from sharded_orm.models.moves.confirmation import confirmed
from sharded_orm.models.plans.plan import COUNT, EXISTS, GET, ROWS, Plan, compile_plan
from sharded_orm.models.plans.shapes import Recording, Shape, logger
from sharded_orm.models.plans.shapes import forget as forget_shapes
from sharded_orm.models.querysets.bound import BoundKeyQuerySet
from sharded_orm.models.querysets.route import PLAIN_KEYS, plain_key
from sharded_orm.models.sharding.bound_key import is_any_bound
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.models.sharding.query import ShardedQuery
from sharded_orm.models.sharding.type_variables import M

# Stands for the query of a queryset on which the recorded calls have not been made yet.
_UNBUILT: Any = object()
_build_lock = RLock()

# The attributes that QuerySet._clone() and those of this package copy or set.
_COPIED = frozenset(QuerySet().__dict__) | {
    "_is_using_called", "_partial", "_recording", "_scatters", "_uncached",
}  # fmt: skip

_are_plans_on: ContextVar[bool] = ContextVar("sharded_orm_plans", default=True)


@contextmanager
def without_plans() -> Iterator[None]:
    """Within the ``with`` block, let Django compile each query.

    This applies to the current context (:mod:`contextvars`).
    """
    token = _are_plans_on.set(False)
    try:
        yield
    finally:
        _are_plans_on.reset(token)


class PlannedQuerySet(BoundKeyQuerySet[M]):
    """A mixin that reads by plans where it can, and as its base class does everywhere else."""

    #: The calls that have built this queryset; None if its query was built otherwise, or if a
    #: caller may have changed it.
    _recording: Recording | None = None

    def __init__(
        self, model: Any = None, query: Any = None, using: str | None = None, hints: Any = None
    ) -> None:
        recording = None
        if query is None and using is None and not hints and _are_plans_on.get():
            recording = _new_recording(type(self), model)
        if recording is None or is_any_bound():
            super().__init__(model, query, using, hints)
        else:
            super().__init__(model, _UNBUILT, using, hints)
            self._recording = recording

    if TYPE_CHECKING:
        _query: Any  # Missing in the stubs of Django's QuerySet.
    else:  # For type checkers, it is the attribute of Django's class.

        @property
        def query(self) -> Any:
            """The query, as Django's. From now on, the caller may change it."""
            if self._recording is not None:
                self._end_recording()
            return QuerySet.query.fget(self)

        @query.setter
        def query(self, value: Any) -> None:
            self._recording = None
            QuerySet.query.fset(self, value)

    def _end_recording(self) -> None:
        """Make the recorded calls on an ordinary query."""
        if self._recording is None:
            return
        # Another thread may use this queryset at the same time. Both must get the same query.
        with _build_lock:
            recording = self._recording
            if recording is not None and self._query is _UNBUILT:
                query = ShardedQuery(self.model)
                recording.replay(query)
                self._query = query
            self._recording = None

    def _filter_or_exclude_inplace(self, negate: bool, args: Any, kwargs: Any) -> None:
        # Overrides QuerySet._filter_or_exclude_inplace(), which changes ``_query``.
        self._end_recording()
        super()._filter_or_exclude_inplace(negate, args, kwargs)  # type: ignore[misc]  # not in the stubs

    def __getstate__(self) -> Any:
        self._end_recording()
        return super().__getstate__()

    def __deepcopy__(self, memo: Any) -> Any:
        self._end_recording()
        return super().__deepcopy__(memo)

    def _recorded(self) -> Recording | None:
        """Return the recorded calls if one more call may be recorded, or a plan used; else None."""
        recording = self._recording
        if (
            recording is None
            or self._db is not None
            or self._hints
            or self._known_related_objects  # type: ignore[attr-defined]  # not in the stubs
            or self._iterable_class is not ModelIterable
            or not getattr(self, "_cloning_enabled", True)  # of Django 6.1
            or self._sticky_filter  # type: ignore[attr-defined]  # not in the stubs
            or self._defer_next_filter  # type: ignore[attr-defined]  # not in the stubs
            or self._deferred_filter is not None  # type: ignore[attr-defined]  # not in the stubs
            or is_any_bound()
            or not _are_plans_on.get()
        ):
            return None
        return recording

    def _with_recording(self, recording: Recording) -> Self:
        clone: Self = object.__new__(type(self))
        attributes = clone.__dict__
        attributes.update(self.__dict__)
        if not attributes.keys() <= _COPIED:
            # A project has set an attribute, or replaced a method, of this object only.
            for name in attributes.keys() - _COPIED:
                del attributes[name]
        attributes["_recording"] = recording
        attributes["_query"] = _UNBUILT
        # _recorded() has found no hints. QuerySet._add_hints() changes the dict in place.
        attributes["_hints"] = {}
        attributes["_result_cache"] = None
        attributes["_prefetch_done"] = False
        return clone

    def _clone(self) -> Self:
        # Overrides QuerySet._clone(), which would copy the query.
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
        return self._only_row(self._read(GET, selected, (0, MAX_GET_RESULTS), matching._matches))

    def first(self) -> M | None:
        recording = self._recording
        if recording is None or recording.shape.ordering is not None or self.ordered:
            return super().first()
        # As QuerySet.first(), without looking at the query.
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
        """Do a read of the recorded query by its plan; by ``read_by_django`` if it has none.

        :returns: the rows as a list, or the value of :data:`EXISTS` or :data:`COUNT`.
        """
        shape = recording.shape
        if (
            shape.shard_at is None
            or self._for_write
            or shape.plans.get(kind, _UNKNOWN) is None
            or not runtime.config().read_plans
        ):
            return read_by_django()
        key = recording.values[shape.shard_at]
        if type(key) not in PLAIN_KEYS:
            return read_by_django()
        alias: str | None = None

        def read_by_plan() -> Any:
            nonlocal alias
            shard = runtime.locate(shape.options.group, key)
            if shard is None:
                return _UNKNOWN
            connection: Any = connections[shard.alias]
            plan = shape.plans.get(kind)
            if plan is None or plan.backend is not type(connection):
                alias = shard.alias if kind in shape.seen else None
                shape.seen.add(kind)
                return _UNKNOWN
            parameters = plan.parameters(recording.values, connection)
            if parameters is None:
                return _UNKNOWN
            # As the compiler does before each statement, see ReadMixin.
            if (own := getattr(connection, "shard", None)) is not None:
                text_keys.check(connection, (own,), plan.tables)
            if kind in (ROWS, GET):
                return plan.rows(parameters, connection, self, limits)
            return plan.scalar(parameters, connection, limits)

        result = confirmed(shape.options.group, read_by_plan)
        if result is _UNKNOWN:
            result = read_by_django()
            if alias is not None:
                _learn(kind, recording, connections[alias])
        return result


_UNKNOWN: Any = object()


def _learn(kind: str, recording: Recording, connection: Any) -> None:
    """Make a plan of a recorded query that Django has run on ``connection``."""
    shape = recording.shape
    plan: Plan | None = None
    try:
        plan = _plan_of_example(kind, recording, connection)
    except Exception:
        # A field or the backend does not take the values of the example. The read itself was done.
        logger.debug("%s has no plan", shape, exc_info=True)
    logger.debug("%s of %s: %s", kind, shape, "left to Django" if plan is None else "planned")
    shape.plans[kind] = plan


def _plan_of_example(kind: str, recording: Recording, connection: Any) -> Plan | None:
    shape, example = recording.shape, recording.example()
    if example is None:
        return None
    assert shape.shard_at is not None
    query = ShardedQuery(shape.options.model)
    example.replay(query)
    if plain_key(shape.options, query, ordered=kind == ROWS) != example.values[shape.shard_at]:
        return None
    return compile_plan(kind, query, shape.conditions, example.values, connection)


# The methods that a read by a plan does not call. If a project overrides one of them, its
# querysets are not recorded.
_SKIPPED = (
    "__init__", "__iter__", "__new__", "_chain", "_clone", "_fetch_all", "_filter_or_exclude",
    "_filter_or_exclude_inplace", "db", "filter", "query",
)  # fmt: skip
_new_recordings: dict[tuple[Any, Any], Recording | None] = {}


def _forget() -> None:
    # The routing strategies say which ids name a shard, and the settings have changed.
    _new_recordings.clear()
    forget_shapes()


runtime.on_reset(_forget)


def _new_recording(queryset_class: Any, model: Any) -> Recording | None:
    """Return the recording of a new queryset; None if querysets of the class are not recorded."""
    try:
        return _new_recordings[queryset_class, model]
    except KeyError:
        pass
    if model is None or model._meta.apps is not apps or not apps.models_ready:
        # A historical model must not be kept: it must be possible to delete its class.
        return None
    options = shard_options(model)
    recording = None
    if (
        options is not None
        and options.key is not None
        and not declares_cache(model)
        and _skips_nothing(queryset_class)
    ):
        recording = Recording(Shape(options))
    _new_recordings[queryset_class, model] = recording
    return recording


def _skips_nothing(queryset_class: Any) -> bool:
    """Whether each definition of the methods in :data:`_SKIPPED` is Django's or this package's.

    A class that stands behind this package's classes in the order of bases counts, too.
    """
    return all(
        _module_of(vars(base)[name]).startswith(("django.db.models.", "sharded_orm.models."))
        for base in queryset_class.__mro__
        if base not in (object, Generic)
        for name in _SKIPPED
        if name in vars(base)
    )


def _module_of(member: Any) -> str:
    function = member.fget if isinstance(member, property) else member
    return str(getattr(function, "__module__", ""))
