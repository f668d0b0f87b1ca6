"""Reads of querysets that have recorded their calls. They use plans, that is, SQL compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db.models.query import MAX_GET_RESULTS, QuerySet

from sharded_orm.models.plans.condition_trees import ConditionTree
from sharded_orm.models.plans.plan import COUNT, EXISTS, GET, ROWS
from sharded_orm.models.plans.shapes import Recording
from sharded_orm.models.querysets import original_methods as original
from sharded_orm.models.querysets.one_row import matching_rows, only_row
from sharded_orm.models.querysets.recorder import CallRecorder
from sharded_orm.models.sharding.type_variables import M


class RecordedReads(CallRecorder[M]):
    """A mixin that reads rows by the recorded calls of a queryset.

    Whatever cannot be read by them is left to Django.
    """

    @classmethod
    def _is_routed(cls, kind: str, example: Recording) -> bool:
        """Return whether a plan (SQL for all similar queries) would be sent to the right database.

        That is the database to which Django would send the query that ``example`` has recorded.
        """
        return True

    def _read(
        self,
        kind: str,
        recording: Recording,
        limits: tuple[int, int | None] | None,
        read_by_django: Callable[[], Any],
    ) -> Any:
        """Read the recorded query with its plan, or with ``read_by_django`` if it has no plan.

        A subclass defines this.

        :returns: the rows as a list; a bool if ``kind`` is :data:`EXISTS`; the number of rows if it
            is :data:`COUNT`.
        """
        raise NotImplementedError

    def _fetch_all(self) -> None:
        if self._result_cache is None:
            recording = self._recorded()
            if recording is not None:
                rows = self._read(ROWS, recording, recording.limits, super()._fetch_all)
                if self._result_cache is None:  # Otherwise Django has read the rows.
                    self._result_cache = rows
                    if (
                        not self._prefetch_related_lookups
                        and QuerySet._fetch_all is original.FETCH_ALL
                    ):
                        return
        elif (
            self._recording is not None
            and not self._prefetch_related_lookups
            and QuerySet._fetch_all is original.FETCH_ALL
            and self._may_read_by_plan()
        ):
            return  # Nothing is left to do.
        super()._fetch_all()

    def get(self, *args: Any, **kwargs: Any) -> M:
        recording = self._recorded(original.gets_as_django(type(self), CallRecorder))
        tree = ConditionTree.of(args, kwargs) if args and recording is not None else None
        # If the queryset has prefetches, leave the read to Django, because get() by a plan does not
        # prefetch.
        if (
            recording is None
            or recording.limits is not None
            or self._prefetch_related_lookups
            or (args and tree is None)
        ):
            return super().get(*args, **kwargs)
        selected: Recording | None = recording
        if tree is not None:
            selected = recording.filtered_by_tree(tree)
        elif kwargs:
            selected = recording.filtered(kwargs)
        if selected is None:
            matching = self.filter(*args, **kwargs)
            if matching._recording is not None:
                matching._recording.shape.seen.add(GET)
            rows = matching_rows(matching)
        else:
            limits = (0, MAX_GET_RESULTS)
            # Copy the queryset only if Django reads the rows.
            rows = self._read(
                GET, selected, limits, lambda: matching_rows(self._with_recording(selected))
            )
        row: M = rows[0] if len(rows) == 1 else only_row(self.model, rows)
        return row

    def first(self) -> M | None:
        recording = self._recording if QuerySet.first is original.FIRST else None
        if recording is None or recording.shape.ordering is not None or self.ordered:
            return super().first()
        # Do the same as QuerySet.first(), but do not use ``query``, because that ends the
        # recording.
        for row in self.order_by("pk")[:1]:
            return row
        return None

    @property
    def ordered(self) -> bool:
        recording = self._recorded(QuerySet.ordered is original.ORDERED)
        if recording is None:
            return super().ordered
        ordering = recording.shape.ordering
        return bool(self.model._meta.ordering if ordering is None else ordering)

    def exists(self) -> bool:
        recording = self._recorded(
            self._result_cache is None and QuerySet.exists is original.EXISTS
        )
        if recording is None or recording.limits is not None:
            return super().exists()
        return bool(self._read(EXISTS, recording, (0, 1), super().exists))

    def count(self) -> int:
        recording = self._recorded(self._result_cache is None and QuerySet.count is original.COUNT)
        if recording is None or recording.limits is not None:
            return super().count()
        return int(self._read(COUNT, recording, None, super().count))
