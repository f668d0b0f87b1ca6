"""Relations of rows that are spread over shards.

Django prefetches a list of instances with one query that is routed by the first of
them. Where the list spans shards, each shard's instances must be asked on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from django.db.models import Model
from django.db.models.constants import LOOKUP_SEP
from django.db.models.fields.related_descriptors import (
    ForwardManyToOneDescriptor,
    ForwardOneToOneDescriptor,
)


def by_alias(instances: Sequence[Any]) -> list[list[Any]]:
    groups: dict[str | None, list[Any]] = {}
    for instance in instances:
        groups.setdefault(instance._state.db, []).append(instance)
    return list(groups.values())


def split_lookups(model: type[Model], lookups: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The prefetches that begin with a foreign key to the global database, and the others."""
    from sharded_orm.models.options import shard_options

    outside: list[Any] = []
    beside: list[Any] = []
    for lookup in lookups:
        path = getattr(lookup, "prefetch_through", lookup)
        # By descriptor, as Django finds it; the name of a field may be another one's.
        descriptor = getattr(model, path.split(LOOKUP_SEP)[0], None)
        is_global = (
            isinstance(descriptor, ForwardManyToOneDescriptor)
            and shard_options(descriptor.field.remote_field.model) is None
        )
        (outside if is_global else beside).append(lookup)
    return outside, beside


class _PerShard:
    """Prefetches shard by shard, and matches rows on the shard as well as the value."""

    get_queryset: Callable[..., Any]

    def get_prefetch_querysets(self, instances: Sequence[Any], querysets: Any = None) -> Any:
        from sharded_orm.models.options import shard_options

        fetch = super().get_prefetch_querysets  # type: ignore[misc]
        remote = self.field.remote_field.model  # type: ignore[attr-defined]
        groups = by_alias(instances)
        if shard_options(remote) is None or len(groups) < 2:
            return fetch(instances, querysets)
        parts = [fetch(group, querysets) for group in groups]
        _, rel_attr, instance_attr, *rest = parts[0]
        rows = list(chain.from_iterable(part[0] for part in parts))
        return (
            rows,
            lambda row: (row._state.db, rel_attr(row)),
            lambda instance: (instance._state.db, instance_attr(instance)),
            *rest,
        )


class ShardedForwardManyToOneDescriptor(_PerShard, ForwardManyToOneDescriptor):  # type: ignore[type-arg]
    """``photo.album`` and its prefetch over several shards."""


class ShardedForwardOneToOneDescriptor(_PerShard, ForwardOneToOneDescriptor):  # type: ignore[type-arg]
    """The one-to-one form."""


def install_descriptors(model: type[Model]) -> None:
    """Give the foreign keys of a sharded model the descriptors above."""
    replacements: dict[type, type] = {
        ForwardManyToOneDescriptor: ShardedForwardManyToOneDescriptor,
        ForwardOneToOneDescriptor: ShardedForwardOneToOneDescriptor,
    }
    for field in model._meta.local_fields:
        if field.remote_field is None:
            continue
        descriptor = model.__dict__.get(field.name)
        replacement = replacements.get(type(descriptor))
        if replacement is not None:
            setattr(model, field.name, replacement(field))
