"""A pytest plugin: each read is done by a plan already at its first use.

``python -m pytest -p tests.eager_plans …`` runs any tests so. Otherwise a plan is used at the third
use of a shape, and most tests read each shape once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from uuid import UUID


def pytest_sessionstart() -> None:
    # Import here: when plugins are loaded, Django has no settings yet.
    from django.db import connections

    from sharded_orm import runtime
    from sharded_orm.contrib.lookups.declaration import lookups_of
    from sharded_orm.models.querysets import plans
    from sharded_orm.models.querysets.plans import PlannedQuerySet

    def twice(method: Callable[..., Any]) -> Callable[..., Any]:
        """Make the call on a copy first, so that its shape is known."""

        @wraps(method)  # The package looks at the module of a method.
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            values = [*args, *kwargs.values()]
            # The values of other calls may be iterators, which can be used once.
            if all(type(value) in (int, str, UUID) for value in values) and (
                recording := self._recorded()
            ):
                method(self._with_recording(recording), *args, **kwargs)
            return method(self, *args, **kwargs)

        return call

    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        recording = self._recorded() if kwargs and not args else None
        if recording is not None and recording.limits is None:
            self._with_recording(recording).filter(**kwargs)
        return get_by_plan(self, *args, **kwargs)

    def read(self: Any, kind: str, recording: Any, limits: Any, read_by_django: Any) -> Any:
        shape = recording.shape
        if kind not in shape.plans:
            shard = None
            if shape.shard_at is not None:
                shard = runtime.locate(shape.options.group, recording.values[shape.shard_at])
            elif lookups_of(shape.options.model):
                shard = runtime.shard_in(runtime.group(shape.options.group), 0)
            if shard is not None:
                plans._learn(kind, recording, connections[shard.alias])
        return read_by_plan(self, kind, recording, limits, read_by_django)

    get_by_plan, read_by_plan = PlannedQuerySet.get, PlannedQuerySet._read
    for name in ("filter", "order_by"):
        setattr(PlannedQuerySet, name, twice(getattr(PlannedQuerySet, name)))
    PlannedQuerySet.get = get  # type: ignore[method-assign]
    PlannedQuerySet._read = read  # type: ignore[method-assign]
