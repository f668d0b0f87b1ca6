"""Runs ``update()`` with a plan: an UPDATE whose SQL is compiled once and used again.

A process uses a plan for all updates that differ only in their values.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from django.db import connections, transaction
from django.db.models.query import QuerySet

from sharded_orm import runtime
from sharded_orm.models.moves.repetition import repeated
from sharded_orm.models.plans.declarations import Declarations
from sharded_orm.models.plans.kept_shapes import has_room
from sharded_orm.models.plans.selection import EVERYTHING
from sharded_orm.models.plans.shapes import Recording, plan_of
from sharded_orm.models.plans.switch import are_write_plans_on
from sharded_orm.models.plans.updates import PLAIN_TYPES, UpdatePlan, compile_update, may_warn
from sharded_orm.models.querysets import original_methods as original
from sharded_orm.models.querysets.plan_examples import UPDATE, examples_of
from sharded_orm.models.querysets.plans import PlannedQuerySet
from sharded_orm.models.querysets.route import PLAIN_KEYS
from sharded_orm.models.sharding.type_variables import M
from sharded_orm.topology.model import Shard

#: The names of the fields that an update writes, followed by the types of the new values, such as
#: ``("title", "stars", str, int)``.
_Write = tuple[Any, ...]


class PlannedUpdateQuerySet(PlannedQuerySet[M]):
    """A mixin whose ``update()`` sends the SQL of a plan if it has one, instead of compiling it.

    A plan is an UPDATE that was compiled once for all updates that differ only in their values. For
    an update without a plan, Django's ``update()`` compiles the SQL.
    """

    def update(self, **kwargs: Any) -> int:
        is_planned = are_write_plans_on() and QuerySet.update is original.UPDATE
        recording = self._recorded_update(kwargs) if is_planned else None
        if recording is None:
            return super().update(**kwargs)
        shape = recording.shape
        write = (*kwargs, *map(type, kwargs.values()))
        if (plan := shape.updates.get(write)) is not None:
            self._for_write = True
            updated: int | None = repeated(
                shape.options.group,
                partial(_update, plan, recording, list(kwargs.values())),
                nothing_written=lambda changed: not changed,
            )
            if updated is not None:
                self._result_cache = None
                return updated
        changed = super().update(**kwargs)
        _learn(recording, write, kwargs, type(self))
        return changed

    def _recorded_update(self, new_values: dict[str, Any]) -> Recording | None:
        """Return the recorded calls of this queryset if ``update(**new_values)`` can use a plan.

        A plan is an UPDATE that was compiled earlier. Return None if Django must compile this
        update, for example, because the queryset is sliced or ordered.
        """
        recording = (
            self._recorded() if PLAIN_TYPES.issuperset(map(type, new_values.values())) else None
        )
        if (
            recording is None
            or recording.limits is not None
            or recording.shape.ordering is not None
            or recording.shape.selection is not EVERYTHING
            or recording.shape.shard_at is None
            or self._db is not None
            # A plan does not check on which shard an instance is. So do not use a plan if a
            # condition compares with an instance.
            or recording.instances
            # A queryset of a related manager uses no plan.
            or self._hints
            or self._known_related_objects
            or self._deferred_filter is not None
        ):
            return None
        return recording


def _update(plan: UpdatePlan, recording: Recording, new_values: list[Any]) -> int | None:
    """Update rows with ``plan``, a compiled UPDATE, and return their number.

    If the plan cannot be used, send nothing and return None. Django must then update the rows.
    """
    shard = _shard_of(recording)
    if shard is None:
        return None
    connection = connections[shard.alias]
    if not plan.fits(connection):
        return None
    # If the UPDATE fails inside an atomic block, mark the block for rollback, as Django's update() does.
    with transaction.mark_for_rollback_on_error(using=shard.alias):
        return plan.execute(new_values, recording.values, connection)


def _shard_of(recording: Recording) -> Shard | None:
    shape = recording.shape
    assert shape.shard_at is not None
    key = recording.values[shape.shard_at]
    return runtime.locate(shape.options.group, key) if type(key) in PLAIN_KEYS else None


def _learn(
    recording: Recording, write: _Write, values: dict[str, Any], queryset_class: Any
) -> None:
    """Compile a plan for later updates of the same shape, after Django has executed an update.

    A shape is the list of a queryset's calls without the values, such as ``filter(pk=?)``. The
    first update of a shape is only noted; the second one compiles the plan.
    """
    shape = recording.shape
    if any(may_warn(shape.model._meta.get_field(name), value) for name, value in values.items()):
        return
    if write not in shape.seen:
        if has_room():
            shape.seen.add(write)
        return
    updates = shape.updates  # Another thread may replace this dict, to drop plans.
    if write in updates:
        plan, shard = updates[write], _shard_of(recording)
        if plan is None or shard is None or plan.fits(connections[shard.alias]):
            return
    shape.updates[write] = plan_of(
        f"update() of {shape}, {write}",
        lambda: _plan_of_examples(recording, values, queryset_class),
    )


def _plan_of_examples(
    recording: Recording, values: dict[str, Any], queryset_class: Any
) -> UpdatePlan | None:
    shape, shard = recording.shape, _shard_of(recording)
    declarations = Declarations(shape)
    examples = [] if shard is None else examples_of(UPDATE, recording, queryset_class)
    if shard is None or not examples:
        return None
    fields = [(shape.model._meta.get_field(name), value) for name, value in values.items()]
    return compile_update(shape, examples, fields, declarations, connections[shard.alias])
