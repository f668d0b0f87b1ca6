"""A pytest plugin: each read is done by a plan already at its first use.

``python -m pytest -p tests.eager_plans …`` runs any tests so. Otherwise a plan is used at the third
use of a shape, and most tests read each shape once.
"""

from __future__ import annotations

from typing import Any

from tests.django_suite.inside.yardstick_plans import use_plans_at_once


def pytest_sessionstart() -> None:
    # Import here: when plugins are loaded, Django has no settings yet.
    from django.db import connections

    from sharded_orm import runtime
    from sharded_orm.contrib.lookups.declaration import lookups_of
    from sharded_orm.models.querysets.plan_examples import learn
    from sharded_orm.models.querysets.plans import PlannedQuerySet

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

    use_plans_at_once()
    read_by_plan = PlannedQuerySet._read
    PlannedQuerySet._read = read  # type: ignore[method-assign]
