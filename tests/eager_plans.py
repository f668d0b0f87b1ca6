"""A pytest plugin: each read and each UPDATE is done by a plan already at its first use, and each INSERT
at the second one.

``python -m pytest -p tests.eager_plans …`` runs any tests so. Otherwise a plan is used at the third
use of a shape, and most tests use each shape once.
"""

from __future__ import annotations

from typing import Any

from tests.django_suite.inside.yardstick_plans import as_part_of, use_plans_at_once


def pytest_sessionstart() -> None:
    # Import here: when plugins are loaded, Django has no settings yet.
    from django.db import connections

    from sharded_orm import runtime
    from sharded_orm.contrib.lookups.declaration import lookups_of
    from sharded_orm.models import base
    from sharded_orm.models.plans import inserts
    from sharded_orm.models.querysets import updates
    from sharded_orm.models.querysets.plan_examples import learn
    from sharded_orm.models.querysets.plans import PlannedQuerySet
    from sharded_orm.models.querysets.updates import PlannedUpdateQuerySet

    def read(self: Any, kind: str, recording: Any, limits: Any, read_by_django: Any) -> Any:
        shape = recording.shape
        if kind not in shape.plans:
            shard = None
            if shape.shard_at is not None:
                shard = runtime.locate(shape.options.group, recording.values[shape.shard_at])
            elif lookups_of(shape.model):
                shard = runtime.shard_in(runtime.group(shape.options.group), 0)
            if shard is not None:
                learn(kind, kind, recording, type(self), connections[shard.alias])
        return read_by_plan(self, kind, recording, limits, read_by_django)

    @as_part_of(PlannedUpdateQuerySet.update)
    def update(self: Any, **kwargs: Any) -> Any:
        recording = self._recorded_update(kwargs)
        if recording is not None:
            self._refuse_key(kwargs, "update()")
            write = (*kwargs, *map(type, kwargs.values()))
            for _ in range(2):
                updates._learn(recording, write, kwargs, type(self))
        return update_by_plan(self, **kwargs)

    def save(*args: Any) -> Any:
        results = (save_by_plan(*args) for _ in range(3))
        return next((result for result in results if result is not None), None)

    class SeenInserts(dict[Any, Any]):
        """The plans of one model, each of whose shapes counts as seen."""

        def get(self, shape: Any, default: Any = None) -> Any:
            return super().get(shape, inserts._SEEN)

    class InsertsByModel(dict[Any, Any]):
        def setdefault(self, model: Any, default: Any) -> Any:  # type: ignore[override]
            return super().setdefault(model, SeenInserts())

    use_plans_at_once()
    read_by_plan, update_by_plan = PlannedQuerySet._read, PlannedUpdateQuerySet.update
    save_by_plan = base.save_row
    PlannedUpdateQuerySet.update = update  # type: ignore[method-assign]
    base.save_row = save
    inserts._inserts = InsertsByModel()
    PlannedQuerySet._read = read  # type: ignore[method-assign]
