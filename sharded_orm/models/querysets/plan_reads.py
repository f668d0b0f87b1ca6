"""The methods by which a queryset class says how it reads with plans (SQL that was compiled once)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sharded_orm.models.plans.shapes import Recording, Shape
from sharded_orm.models.querysets.mixin_base import QuerySetMixin
from sharded_orm.models.sharding.type_variables import M


class PlanReads(QuerySetMixin[M]):
    """The methods that a subclass of
    :class:`~sharded_orm.models.querysets.recorder.CallRecorder` overrides. Some need not be overridden.
    """

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

    @classmethod
    def _is_routed(cls, kind: str, example: Recording) -> bool:
        """Return whether a plan (SQL for all similar queries) would be sent to the right database.

        That is the database to which Django would send the query that ``example`` has recorded.
        """
        return True

    def _records(self, using: str | None, hints: Any) -> bool:
        """Return whether a new queryset with these arguments records its calls."""
        return True

    def _may_read_by_plan(self) -> bool:
        """Return whether this queryset can be read with a plan (stored SQL of a similar query)."""
        return True

    def _read(
        self,
        kind: str,
        recording: Recording,
        limits: tuple[int, int | None] | None,
        read_by_django: Callable[[], Any],
    ) -> Any:
        """Read the recorded query with its plan, or with ``read_by_django`` if it has no plan.

        :returns: the rows as a list; a bool if ``kind`` is :data:`EXISTS`; the number of rows if it
            is :data:`COUNT`.
        """
        raise NotImplementedError
