"""Reads with plans, for models that are not sharded.

A plan is SQL that was compiled once for all queries that differ only in their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.db import connections, models, router
from django.db.models.sql import Query

from sharded_orm.models.plans.plan import UNREAD
from sharded_orm.models.plans.shapes import Recording, Shape
from sharded_orm.models.querysets.plan_examples import learn
from sharded_orm.models.querysets.recorded_reads import RecordedReads
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.models.sharding.type_variables import M


class DirectPlanReader(RecordedReads[M]):
    """A mixin that reads by plans, for querysets of models that are not sharded.

    A plan is SQL that was compiled once for all queries that differ only in their values.
    """

    @classmethod
    def _first_shape(cls, model: Any) -> Shape | None:
        return Shape(model, None) if shard_options(model) is None else None

    @classmethod
    def _new_query(cls, model: Any) -> Any:
        return Query(model)

    def _read(
        self,
        kind: str,
        recording: Recording,
        limits: tuple[int, int | None] | None,
        read_by_django: Callable[[], Any],
    ) -> Any:
        if self._for_write or not _are_plans_on():
            return read_by_django()
        shape = recording.shape
        alias = self._db or router.db_for_read(self.model, **self._hints)
        key = kind, alias
        plan = shape.plans.get(key, _UNKNOWN)
        if plan is None:
            return read_by_django()
        connection: Any = connections[alias]
        if plan is _UNKNOWN or not plan.fits(connection):
            result = read_by_django()
            if kind in shape.seen:
                learn(kind, key, recording, type(self), connection)
            shape.seen.add(kind)
            return result
        result = plan.read(kind, self, recording.values, limits, connection)
        return read_by_django() if result is UNREAD else result


_UNKNOWN: Any = object()


def _are_plans_on() -> bool:
    # Read the dict from Django's settings. The settings object of this library also reads the
    # topology, but models that are not sharded must be readable even if the topology is missing.
    setting = getattr(settings, "SHARDED_ORM", None)
    return not isinstance(setting, dict) or setting.get("READ_PLANS", True) is not False


class PlanQuerySet(DirectPlanReader[M], models.QuerySet[M]):
    """A queryset for a model that is not sharded, which reads by plans.

    A plan is SQL that was compiled once for all queries that differ only in their values. The
    results, the SQL and the errors are those of Django's queryset.
    """


PlanManager = models.Manager.from_queryset(PlanQuerySet, class_name="PlanManager")
"""The manager class of :class:`PlanQuerySet`, for models that are not sharded."""
