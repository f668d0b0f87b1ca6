"""Querysets that record the calls that build them, so that plans can read their rows.

A plan is SQL that was compiled once for all queries that differ only in their values. A new
queryset records the calls that build it (see :mod:`sharded_orm.models.plans.shapes`). If the rows
are read when nothing else was done with the queryset, a plan sends the query. Every other use needs
:attr:`CallRecorder.query`, which applies the recorded calls to an ordinary query. From then on, the
queryset is like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING, Any, Generic, Self, overload

from django.apps import apps
from django.db.models.query import (
    MAX_GET_RESULTS,
    ModelIterable,
    QuerySet,
    ValuesIterable,
)

from sharded_orm import runtime
from sharded_orm.models.plans.plan import COUNT, EXISTS, GET, ROWS
from sharded_orm.models.plans.selection import (
    DEFERRED,
    EVERYTHING,
    JOINED,
    LOADED,
    VALUES_LISTS,
    Selection,
)
from sharded_orm.models.plans.shapes import Recording, Shape
from sharded_orm.models.plans.shapes import forget as forget_shapes
from sharded_orm.models.plans.switch import are_plans_on
from sharded_orm.models.querysets.mixin_base import QuerySetMixin
from sharded_orm.models.querysets.one_row import matching_rows, only_row
from sharded_orm.models.sharding.type_variables import M

# The value of ``_query`` as long as the recorded calls have not been applied to a query.
_UNBUILT: Any = object()
_build_lock = RLock()

# The attributes that are copied or set by _clone() of Django's QuerySet and of this package's
# querysets.
_COPIED = frozenset(QuerySet().__dict__) | {
    "_is_using_called", "_partial", "_recording", "_scatters", "_uncached",
}  # fmt: skip


class CallRecorder(QuerySetMixin[M]):
    """A mixin that records the calls that build a queryset, for subclasses that read by plans.

    A subclass defines :meth:`_read`.
    """

    #: The calls that have built this queryset. None if its query was built in another way, or if
    #: a caller may have changed the query.
    _recording: Recording | None = None

    def __init__(
        self, model: Any = None, query: Any = None, using: str | None = None, hints: Any = None
    ) -> None:
        recording = None
        if query is None and are_plans_on() and self._records(using, hints):
            recording = _new_recording(type(self), model)
        if recording is None:
            super().__init__(model, query, using, hints)
        else:
            super().__init__(model, _UNBUILT, using, hints)
            self._recording = recording

    if not TYPE_CHECKING:  # For type checkers, ``query`` is the attribute of Django's QuerySet.

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

    # -- What a subclass decides -----------------------------------------------------------

    @classmethod
    def _first_shape(cls, model: Any, *, is_uncached: bool) -> Shape | None:
        """Return the shape of a queryset of all rows; None if no calls are recorded for ``model``.

        :param is_uncached: whether the queryset does not read through the cache (otherwise it may).
        """
        raise NotImplementedError

    @classmethod
    def _new_query(cls, model: Any) -> Any:
        """Return a query of all rows of ``model``."""
        raise NotImplementedError

    @classmethod
    def _is_routed(cls, kind: str, example: Recording) -> bool:
        """Whether a plan for the query of ``example`` would read the database that Django reads."""
        return True

    def _records(self, using: str | None, hints: Any) -> bool:
        """Whether a new queryset with these arguments may record its calls."""
        return True

    def _may_read_by_plan(self) -> bool:
        """Whether this queryset may be read by a plan, at this moment."""
        return True

    def _read(
        self,
        kind: str,
        recording: Recording,
        limits: tuple[int, int | None] | None,
        read_by_django: Callable[[], Any],
    ) -> Any:
        """Read the recorded query by its plan, or by ``read_by_django`` if it has no plan.

        :returns: the rows as a list, or for :data:`EXISTS` or :data:`COUNT` the value.
        """
        raise NotImplementedError

    # -- Recording -------------------------------------------------------------------------

    def _start_recording(self, *, is_uncached: bool) -> None:
        """Record the calls on this queryset of all rows from now on, if its class records calls."""
        recording = _new_recording(type(self), self.model, is_uncached=is_uncached)
        if recording is not None:
            self._query = _UNBUILT
            self._recording = recording

    def _end_recording(self) -> None:
        """Apply the recorded calls to an ordinary query, and stop recording."""
        if self._recording is None:
            return
        # Take a lock: another thread may use this queryset at the same time, and both must get the
        # same query.
        with _build_lock:
            recording = self._recording
            if recording is not None and self._query is _UNBUILT:
                if self._deferred_filter is not None:
                    # Django applies the deferred filter itself, with the values that the instance
                    # of a related manager has by then.
                    recording = recording._replace(filters=recording.filters[:-1])
                query = self._new_query(self.model)
                recording.replay(query)
                self._query = query
            self._recording = None

    def _filter_or_exclude_inplace(self, negate: bool, args: Any, kwargs: Any) -> None:
        # Overrides QuerySet._filter_or_exclude_inplace(), which changes ``_query``. So the query is
        # built first.
        self._end_recording()
        super()._filter_or_exclude_inplace(negate, args, kwargs)

    def __getstate__(self) -> Any:
        self._end_recording()
        return super().__getstate__()

    def __deepcopy__(self, memo: Any) -> Any:
        self._end_recording()
        return super().__deepcopy__(memo)

    def _recorded(self) -> Recording | None:
        """Return the recorded calls; None if no call may be recorded and no plan may be used."""
        recording = self._recording
        if (
            recording is None
            or self._iterable_class is not recording.shape.selection.iterable
            or not getattr(self, "_cloning_enabled", True)  # of Django 6.1
            or self._sticky_filter
            or self._defer_next_filter
            # The rows of a related manager may lack the field that refers to the known instance.
            or (self._known_related_objects and recording.shape.selection.defers)
            or not self._may_read_by_plan()
            or not are_plans_on()
        ):
            return None
        if self._deferred_filter is not None:
            # A related manager has filtered by its instance. Django reads the value of the instance
            # only now, so the recorded value must be the same.
            _, _, kwargs = self._deferred_filter
            if not recording.still_holds(kwargs):
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
        # Use a new dict, because QuerySet._add_hints() changes the dict in place.
        attributes["_hints"] = {**self._hints}
        attributes["_result_cache"] = None
        attributes["_prefetch_done"] = False
        attributes["_deferred_filter"] = None
        selection = recording.shape.selection
        if not selection.makes_instances:
            attributes["_iterable_class"] = selection.iterable
            attributes["_fields"] = selection.names
        return clone

    def _clone(self) -> Self:
        # Overrides QuerySet._clone(), which would copy the query. While calls are recorded, no
        # query is built, so copy only the recording.
        recording = self._recorded()
        return super()._clone() if recording is None else self._with_recording(recording)

    def _by_django(self, recording: Recording, method: str, *args: Any, **kwargs: Any) -> Any:
        """Make a call as Django does, but on a copy, so that this queryset goes on recording.

        :param recording: the calls that this queryset has recorded.
        """
        return getattr(super(CallRecorder, self._with_recording(recording)), method)(
            *args, **kwargs
        )

    def filter(self, *args: Any, **kwargs: Any) -> Self:
        is_recorded = kwargs and not args
        filtered = self._filtered("filter", kwargs) if is_recorded else None
        return super().filter(*args, **kwargs) if filtered is None else filtered

    def exclude(self, *args: Any, **kwargs: Any) -> Self:
        is_recorded = kwargs and not args
        filtered = self._filtered("exclude", kwargs) if is_recorded else None
        return super().exclude(*args, **kwargs) if filtered is None else filtered

    def _filtered(self, method: str, kwargs: dict[str, Any]) -> Self | None:
        """Return the queryset after a call of filter() or exclude(); None if it is not recorded."""
        is_deferred, self._defer_next_filter = self._defer_next_filter, False
        recording = self._recorded()
        if recording is None or recording.limits is not None:
            self._defer_next_filter = is_deferred
            return None
        excluded = method == "exclude"
        try:
            longer = recording.filtered(kwargs, excluded=excluded)
        except Exception:
            # A field does not accept its value. If the filter is deferred, Django raises the error
            # later.
            if not is_deferred:
                raise
            longer = None
        if longer is not None:
            clone = self._with_recording(longer)
            if is_deferred:
                clone._deferred_filter = excluded, (), kwargs
            return clone
        if is_deferred:
            recording.learn_filter(kwargs, excluded=excluded)
            self._defer_next_filter = True
            return None
        # As QuerySet._filter_or_exclude(), but without a second copy of the query.
        filtered = self._with_recording(recording)
        filtered._filter_or_exclude_inplace(excluded, (), kwargs)
        if recording.learn_filter(kwargs, excluded=excluded):
            filtered._recording = recording.filtered(kwargs, excluded=excluded)
        return filtered

    def order_by(self, *field_names: Any) -> Self:
        recording = self._recorded()
        if recording is None or recording.limits is not None:
            return super().order_by(*field_names)
        ordered = recording.ordered(field_names)
        if ordered is not None:
            return self._with_recording(ordered)
        in_order: Self = self._by_django(recording, "order_by", *field_names)
        recording.learn_order(field_names)
        in_order._recording = recording.ordered(field_names)
        return in_order

    def values(self, *fields: Any, **expressions: Any) -> Any:
        selection = None if expressions else Selection(ValuesIterable, fields)
        rows = self._selected(selection, "values", *fields)
        return super().values(*fields, **expressions) if rows is None else rows

    def values_list(self, *fields: Any, flat: bool = False, named: bool = False) -> Any:
        iterable = VALUES_LISTS.get((bool(flat), bool(named)))
        # If both arguments are true, Django raises an error.
        selection = None if iterable is None else Selection(iterable, fields)
        rows = self._selected(selection, "values_list", *fields, flat=flat, named=named)
        return super().values_list(*fields, flat=flat, named=named) if rows is None else rows

    def only(self, *fields: Any) -> Self:
        rows = self._selected(Selection(ModelIterable, fields, LOADED), LOADED, *fields)
        return super().only(*fields) if rows is None else rows

    def defer(self, *fields: Any) -> Self:
        rows = self._selected(Selection(ModelIterable, fields, DEFERRED), DEFERRED, *fields)
        return super().defer(*fields) if rows is None else rows

    def select_related(self, *fields: Any) -> Self:
        rows = self._selected(Selection(ModelIterable, fields, JOINED), JOINED, *fields)
        return super().select_related(*fields) if rows is None else rows

    def _selected(
        self, selection: Selection | None, method: str, *fields: Any, **options: Any
    ) -> Self | None:
        """Return the queryset after a call that selects fields; None if it is not recorded."""
        recording = None if selection is None else self._recorded()
        if selection is None or recording is None or recording.shape.selection is not EVERYTHING:
            return None
        chosen = recording.selected(selection)
        if chosen is not None:
            return self._with_recording(chosen)
        selected: Self = self._by_django(recording, method, *fields, **options)
        recording.learn_selection(selection)
        selected._recording = recording.selected(selection)
        return selected

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
        recording = None if args else self._recorded()
        # Only _fetch_all() prefetches.
        if recording is None or recording.limits is not None or self._prefetch_related_lookups:
            return super().get(*args, **kwargs)
        selected = recording.filtered(kwargs) if kwargs else recording
        if selected is None:
            matching = self.filter(**kwargs)
            if matching._recording is not None:
                matching._recording.shape.seen.add(GET)
            rows = matching_rows(matching)
        else:
            matching = self._with_recording(selected)
            limits = (0, MAX_GET_RESULTS)
            rows = matching._read(GET, selected, limits, lambda: matching_rows(matching))
        row: M = only_row(self.model, rows)
        return row

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


# A read by a plan (stored SQL of an earlier, similar query) does not call these methods. So the
# querysets of a project that overrides one of them are not recorded and use no plans.
_SKIPPED = (
    "__init__", "__iter__", "__new__", "_chain", "_clone", "_fetch_all", "_filter_or_exclude",
    "_filter_or_exclude_inplace", "_values", "db", "filter", "query",
)  # fmt: skip
_METHODS = {n for n, m in vars(QuerySet).items() if callable(m) or isinstance(m, property)}
_new_recordings: dict[tuple[Any, Any, bool], Recording | None] = {}


def _forget() -> None:
    # The settings have changed, and with them perhaps which ids determine a shard. So drop all
    # shapes, the stored forms of queries.
    _new_recordings.clear()
    forget_shapes()


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
    shape = None
    if _skips_nothing(queryset_class):
        shape = queryset_class._first_shape(model, is_uncached=is_uncached)
    recording = None if shape is None else Recording(shape)
    _new_recordings[queryset_class, model, is_uncached] = recording
    return recording


def _skips_nothing(queryset_class: Any) -> bool:
    """Whether all methods that a plan skips are Django's or this package's.

    All base classes are examined, also those that come after this package's classes in the method
    resolution order.
    """
    bases = [base for base in queryset_class.__mro__ if base not in (object, Generic)]
    # A class of the project that comes after CallRecorder may override any method of Django's,
    # because the methods of CallRecorder may not call it.
    behind = bases[bases.index(CallRecorder) :]
    return all(
        _module_of(member).startswith(("django.db.models.", "sharded_orm.models."))
        for base in bases
        for name, member in vars(base).items()
        if name in _SKIPPED or (base in behind and name in _METHODS)
    )


def _module_of(member: Any) -> str:
    function = member.fget if isinstance(member, property) else member
    return str(getattr(function, "__module__", ""))
