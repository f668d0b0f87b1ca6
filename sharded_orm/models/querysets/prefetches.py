"""Instances and prefetches of a list, by the database that they are about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db.models import Model
from django.db.models.constants import LOOKUP_SEP
from django.db.models.fields.related_descriptors import ForwardManyToOneDescriptor

from sharded_orm.models.sharding.options import colocated_alias, group_of, shard_options


def by_alias(instances: Sequence[Any]) -> list[list[Any]]:
    groups: dict[str | None, list[Any]] = {}
    for instance in instances:
        groups.setdefault(home(instance), []).append(instance)
    return list(groups.values())


def home(instance: Any) -> str | None:
    """Where ``instance`` is; where its key leads, if it was not read but made."""
    options = shard_options(type(instance))
    if options is None:
        return instance._state.db  # type: ignore[no-any-return]  # not in the stubs
    return colocated_alias(options, instance)


def split_lookups(model: type[Model], lookups: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The prefetches that begin with a foreign key out of the group, and the others."""
    outside: list[Any] = []
    beside: list[Any] = []
    for lookup in lookups:
        path = getattr(lookup, "prefetch_through", lookup)
        # By descriptor, as Django finds it; the name of a field may be another one's.
        descriptor = getattr(model, path.split(LOOKUP_SEP)[0], None)
        leaves = isinstance(descriptor, ForwardManyToOneDescriptor) and (
            group_of(descriptor.field.remote_field.model) != group_of(model)
        )
        (outside if leaves else beside).append(lookup)
    return outside, beside
