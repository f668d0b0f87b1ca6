"""Querysets that record the calls that build them, so that their rows can be read with plans.

A plan is SQL that was compiled once for all queries that differ only in their values. A new
queryset has no query. Instead, it records the calls that build it (see
:mod:`sharded_orm.models.plans.shapes`). When its rows are read, the SQL of a plan is sent if there
is one. For any other use, :attr:`CallRecorder.query` builds the query from the recorded calls. From
then on, the queryset behaves like one that records no calls.
"""

from __future__ import annotations

from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple, Self, overload

from django.db.models.query import ModelIterable, Prefetch, QuerySet, ValuesIterable

from sharded_orm.models.plans.condition_trees import ConditionTree
from sharded_orm.models.plans.selection import (
    DEFERRED,
    EVERYTHING,
    JOINED,
    LOADED,
    VALUES_LISTS,
    Selection,
)
from sharded_orm.models.plans.shapes import Recording, Shape
from sharded_orm.models.plans.switch import are_plans_on
from sharded_orm.models.querysets import first_recordings
from sharded_orm.models.querysets import original_methods as original
from sharded_orm.models.querysets.first_recordings import COPIED, PLAIN_COUNT, first_recording
from sharded_orm.models.querysets.mixin_base import QuerySetMixin
from sharded_orm.models.sharding.type_variables import M

# The value of ``_query`` while the queryset records its calls and has no query yet.
_UNBUILT: Any = object()
_build_lock = RLock()


class _BuiltPart(NamedTuple):
    """The query of the first calls of a queryset that records its calls.

    When a shape of calls is new, Django makes the calls on a query. Later calls continue with a
    copy of it. Nobody changes the query itself, because several querysets share it.

    :param query: the query after the calls in ``recording``.
    """

    query: Any
    recording: Recording


class CallRecorder(QuerySetMixin[M]):
    """A mixin that records the calls that build a queryset.

    :class:`~sharded_orm.models.querysets.recorded_reads.RecordedReads` reads the rows by these calls.
    """

    #: The calls that have built this queryset. None if its query was built in another way, or if
    #: a caller may have changed the query.
    _recording: Recording | None = None
    #: The query of the first of these calls; None if no query was built for any of them.
    _built_part: _BuiltPart | None = None
    # Since Django 6.1, a related manager sets this attribute of a queryset to False while it
    # filters the queryset in place. Earlier versions of Django do not have this attribute.
    _cloning_enabled = True

    def __init__(
        self, model: Any = None, query: Any = None, using: str | None = None, hints: Any = None
    ) -> None:
        recording = None
        # Read the global variable only once. If the settings change now, another thread assigns a
        # new dict to it. A template that was made from the old settings must not get into the new
        # dict.
        templates = first_recordings.templates
        if query is None and are_plans_on() and self._records(using, hints):
            attributes = templates.get((type(self), model))
            if attributes is not None and QuerySet.__init__ is original.INIT:
                # Copy the attributes of an earlier new queryset. This takes a fifth of the time of
                # __init__().
                own = self.__dict__
                own.update(attributes)
                own["_db"] = using
                own["_hints"] = hints or {}
                own["_known_related_objects"] = {}
                return
            recording = first_recording(type(self), model, CallRecorder)
        if recording is None:
            super().__init__(model, query, using, hints)
            return
        super().__init__(model, _UNBUILT, using, hints)
        self._recording = recording
        if QuerySet.__init__ is original.INIT and (type(self), model) not in templates:
            templates.setdefault((type(self), model), first_recordings.template(self))

    if not TYPE_CHECKING:  # For type checkers, ``query`` stays the attribute of Django's QuerySet.

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

    @classmethod
    def _first_shape(cls, model: Any) -> Shape | None:
        """Return the shape of a queryset without any calls, that is, of all rows of ``model``.

        Return None if querysets of ``model`` cannot record their calls.
        """
        raise NotImplementedError

    @classmethod
    def _new_query(cls, model: Any) -> Any:
        """Return a query of all rows of ``model``."""
        raise NotImplementedError

    def _records(self, using: str | None, hints: Any) -> bool:
        """Return whether a new queryset with these arguments records its calls."""
        return True

    def _may_read_by_plan(self) -> bool:
        """Return whether this queryset can be read with a plan (stored SQL of a similar query)."""
        return True

    def _new_recording(self) -> Recording | None:
        """Return an empty recording of calls; None if the class of this queryset records no calls."""
        return first_recording(type(self), self.model, CallRecorder)

    def _is_query_fresh(self) -> bool:
        # All new querysets of a class and model share one recording. A recorded call replaces it by
        # another one, so a queryset that still has it is fresh.
        recording = self._recording
        if recording is not None and recording is self._new_recording():
            return True
        return super()._is_query_fresh()

    def _end_recording(self) -> None:
        """Apply the recorded calls to an ordinary query, and stop recording."""
        if self._recording is None:
            return
        # Another thread may use this queryset at the same time. The lock ensures that both threads
        # get the same query.
        with _build_lock:
            recording = self._recording
            if recording is not None:
                if self._deferred_filter is not None:
                    # The last filter is that of a related manager, such as album.photos. Leave it
                    # out, because Django applies it later, with the primary key that album has
                    # then.
                    recording = recording._replace(filters=recording.filters[:-1])
                built = self._built_part
                if built is None:
                    query = self._new_query(self.model)
                    recording.replay(query)
                else:
                    query = built.query.chain()
                    recording.replay(query, after=built.recording)
                    self._built_part = None
                self._query = query
            self._recording = None

    def _filter_or_exclude_inplace(self, negate: bool, args: Any, kwargs: Any) -> None:
        # Overrides QuerySet._filter_or_exclude_inplace(), which changes ``_query``. So build the
        # query first.
        self._end_recording()
        super()._filter_or_exclude_inplace(negate, args, kwargs)

    def __getstate__(self) -> Any:
        self._end_recording()
        return super().__getstate__()

    def __deepcopy__(self, memo: Any) -> Any:
        self._end_recording()
        return super().__deepcopy__(memo)

    def _recorded(self, is_original: bool = True) -> Recording | None:
        """Return the recorded calls; None if Django must handle the next call or read.

        :param is_original: False if the method of Django that would handle it was replaced.
        """
        recording = self._recording
        if (
            recording is None
            or not is_original
            or self._iterable_class is not recording.shape.selection.iterable
            or not self._cloning_enabled
            or self._sticky_filter
            or self._defer_next_filter
            # Use no plan after only() or defer() on a related manager, such as album.photos. Django
            # sets album on the rows by their foreign key, and the rows may lack this foreign key.
            or (self._known_related_objects and recording.shape.selection.defers)
            or not self._may_read_by_plan()
            or not are_plans_on()
        ):
            return None
        deferred_filter = self._deferred_filter
        if deferred_filter is not None:
            # The filter of a related manager is deferred. So Django uses the value that the
            # manager's instance has now. The recording has the value at the time when the filter
            # was recorded. So use the recording only if the instance still has this value.
            _, _, kwargs = deferred_filter
            if not recording.still_holds(kwargs):
                return None
            # Each call and each read makes Django apply the filter to this queryset, too. So the
            # value that the instance gets later has no effect on it.
            with _build_lock:
                if self._recording is not None:
                    self._deferred_filter = None
        return recording

    def _with_recording(self, recording: Recording) -> Self:
        clone: Self = object.__new__(type(self))
        attributes = clone.__dict__
        attributes.update(self.__dict__)
        if len(attributes) != PLAIN_COUNT and not attributes.keys() <= COPIED:
            # The project has set an attribute on this queryset object. Do not copy it, because
            # Django's _clone() does not copy it either. (The number of attributes is compared
            # first, because that is faster and usually enough.)
            for name in attributes.keys() - COPIED:
                del attributes[name]
        attributes["_recording"] = recording
        attributes["_query"] = _UNBUILT
        # Use a new dict, because QuerySet._add_hints() changes the dict in place.
        attributes["_hints"] = {**self._hints}
        attributes["_result_cache"] = None
        attributes["_prefetch_done"] = False
        attributes["_deferred_filter"] = None
        shape = recording.shape
        if shape.value_iterable is not None:
            attributes["_iterable_class"] = shape.value_iterable
            attributes["_fields"] = shape.selection.names
        return clone

    def _recording_again(self, recording: Recording | None) -> Self:
        """Record again, after Django has made the last call, whose shape is known now.

        :param recording: all calls of this queryset. If it is None, record nothing.
        """
        if recording is not None:
            self._built_part = _BuiltPart(self.query, recording)
            self._query: Any = _UNBUILT
            self._recording = recording
        return self

    def _clone(self) -> Self:
        # Overrides QuerySet._clone(), which would copy the query. While calls are recorded, no
        # query is built, so copy only the recording.
        recording = self._recorded()
        return super()._clone() if recording is None else self._with_recording(recording)

    def _by_django(self, recording: Recording, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of Django on a copy, because it would end the recording of this queryset.

        :param recording: the calls that this queryset has recorded.
        """
        return getattr(super(CallRecorder, self._with_recording(recording)), method)(
            *args, **kwargs
        )

    def filter(self, *args: Any, **kwargs: Any) -> Self:
        is_planned = (args or kwargs) and QuerySet.filter is original.FILTER
        filtered = self._filtered("filter", args, kwargs) if is_planned else None
        return super().filter(*args, **kwargs) if filtered is None else filtered

    def exclude(self, *args: Any, **kwargs: Any) -> Self:
        is_planned = (args or kwargs) and QuerySet.exclude is original.EXCLUDE
        filtered = self._filtered("exclude", args, kwargs) if is_planned else None
        return super().exclude(*args, **kwargs) if filtered is None else filtered

    def _filtered(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self | None:
        """Return the result of filter() or exclude(); None if Django must execute the call."""
        if args:
            return self._filtered_by_tree(method, args, kwargs)
        is_deferred, self._defer_next_filter = self._defer_next_filter, False
        # Since Django 6.1, a related manager makes a queryset, turns cloning off on it, and calls
        # filter(). This call must change and return the same queryset, and not a copy.
        in_place = is_deferred and not self._cloning_enabled
        if in_place:
            self._cloning_enabled = True
        recording = self._recorded()
        if in_place:
            self._cloning_enabled = False
        if recording is None or recording.limits is not None:
            self._defer_next_filter = is_deferred
            return None
        excluded = method == "exclude"
        longer = recording.filtered(kwargs, excluded=excluded)
        if longer is not None:
            if in_place:
                self._recording, self._deferred_filter = longer, (excluded, (), kwargs)
                return self
            clone = self._with_recording(longer)
            if is_deferred:
                clone._deferred_filter = excluded, (), kwargs
            return clone
        if is_deferred:
            recording.learn_filter(kwargs, excluded=excluded)
            self._defer_next_filter = True
            return None
        # Do the same as QuerySet._filter_or_exclude(), but copy the query only once.
        filtered = self._with_recording(recording)
        filtered._filter_or_exclude_inplace(excluded, (), kwargs)
        if recording.learn_filter(kwargs, excluded=excluded):
            return filtered._recording_again(recording.filtered(kwargs, excluded=excluded))
        return filtered

    def _filtered_by_tree(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Self | None:
        """Return the queryset after a call with ``Q`` objects; None if Django must run the call."""
        # If Django defers the filter of a related manager, _recorded() returns None.
        recording = self._recorded()
        tree = None if recording is None else ConditionTree.of(args, kwargs)
        if recording is None or tree is None or recording.limits is not None:
            return None
        excluded = method == "exclude"
        longer = recording.filtered_by_tree(tree, excluded=excluded)
        if longer is not None:
            return self._with_recording(longer)
        filtered = self._with_recording(recording)
        filtered._filter_or_exclude_inplace(excluded, args, kwargs)
        if recording.learn_tree(tree, excluded=excluded):
            return filtered._recording_again(recording.filtered_by_tree(tree, excluded=excluded))
        return filtered

    def order_by(self, *field_names: Any) -> Self:
        recording = self._recorded(QuerySet.order_by is original.ORDER_BY)
        if recording is None or recording.limits is not None:
            return super().order_by(*field_names)
        ordered = recording.ordered(field_names)
        if ordered is not None:
            return self._with_recording(ordered)
        in_order: Self = self._by_django(recording, "order_by", *field_names)
        recording.learn_order(field_names)
        return in_order._recording_again(recording.ordered(field_names))

    def values(self, *fields: Any, **expressions: Any) -> Any:
        selection = None if expressions else Selection(ValuesIterable, fields)
        rows = self._selected(selection, "values", *fields)
        return super().values(*fields, **expressions) if rows is None else rows

    def values_list(self, *fields: Any, flat: bool = False, named: bool = False) -> Any:
        iterable = VALUES_LISTS.get((bool(flat), bool(named)))
        # If both ``flat`` and ``named`` are true, ``iterable`` is None, and super() raises an
        # error.
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
        """Record a call that selects fields, and return the queryset after this call.

        Return None if the call cannot be recorded. Django must then execute it.

        :param selection: a description of the fields; None if the call cannot be recorded.
        :param method: the name of the called method, such as ``only``; ``fields`` and ``options``
            are its arguments.
        """
        is_original = getattr(QuerySet, method) is original.SELECTING[method]
        recording = None if selection is None else self._recorded(is_original)
        if selection is None or recording is None or recording.shape.selection is not EVERYTHING:
            return None
        chosen = recording.selected(selection)
        if chosen is not None:
            return self._with_recording(chosen)
        selected: Self = self._by_django(recording, method, *fields, **options)
        recording.learn_selection(selection)
        return selected._recording_again(recording.selected(selection))

    def prefetch_related(self, *lookups: Any) -> Self:
        recording = self._recorded(QuerySet.prefetch_related is original.PREFETCH)
        if recording is None or not all(isinstance(lookup, str | Prefetch) for lookup in lookups):
            return super().prefetch_related(*lookups)
        # Do the same as QuerySet.prefetch_related(), but do not use ``query``, because that ends
        # the recording. Django also checks that the queryset has no union() or FilteredRelation.
        # This is not needed here, because a queryset with one of these records no calls.
        prefetching = self._with_recording(recording)
        prefetching._prefetch_related_lookups += lookups
        return prefetching

    @overload
    def __getitem__(self, k: int) -> M: ...
    @overload
    def __getitem__(self, k: slice) -> Self: ...
    def __getitem__(self, k: Any) -> Any:
        if self._result_cache is None and type(k) is slice and k.step is None:
            start, stop = k.start or 0, k.stop
            if type(start) is type(stop) is int and 0 <= start < stop:
                recording = self._recorded(QuerySet.__getitem__ is original.ITEM)
                if recording is not None and recording.limits is None:
                    return self._with_recording(recording.sliced((start, stop)))
        return super().__getitem__(k)
