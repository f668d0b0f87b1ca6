"""Reads of models that are not sharded by plans: SQL that was compiled once for many queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.conf import settings
from django.db import connections, models, router
from django.db.models.sql import Query

from sharded_orm.models.cached.cached_model import declares_cache
from sharded_orm.models.plans.plan import GET, ROWS
from sharded_orm.models.plans.shapes import Recording, Shape
from sharded_orm.models.querysets.plan_examples import learn
from sharded_orm.models.querysets.recorder import CallRecorder
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.models.sharding.type_variables import M


class DirectPlanReader(CallRecorder[M]):
    """A mixin that reads by plans, for querysets of models that are not sharded.

    A plan is SQL that was compiled once for all queries that differ only in their values.
    """

    @classmethod
    def _first_shape(cls, model: Any, *, is_uncached: bool) -> Shape | None:
        if shard_options(model) is not None or declares_cache(model):
            return None
        return Shape(model, None)

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
        if plan is _UNKNOWN or plan.backend is not type(connection):
            result = read_by_django()
            if kind in shape.seen:
                learn(kind, key, recording, type(self), connection)
            shape.seen.add(kind)
            return result
        parameters = plan.parameters(recording.values, connection)
        if parameters is None:
            return read_by_django()
        if kind in (ROWS, GET):
            return plan.rows(parameters, connection, self, limits)
        return plan.scalar(parameters, connection, limits)


_UNKNOWN: Any = object()


def _are_plans_on() -> bool:
    # Read the setting itself, because the checked settings need the topology, without which rows of
    # other models can be read.
    setting = getattr(settings, "SHARDED_ORM", None)
    return not isinstance(setting, dict) or setting.get("READ_PLANS", True) is not False


class PlanQuerySet(DirectPlanReader[M], models.QuerySet[M]):
    """A queryset for a model that is not sharded, which reads by plans.

    A plan is SQL that was compiled once for all queries that differ only in their values. The
    results, the SQL and the errors are those of Django's queryset.
    """


PlanManager = models.Manager.from_queryset(PlanQuerySet, class_name="PlanManager")
"""The manager class of :class:`PlanQuerySet`, for models that are not sharded."""
