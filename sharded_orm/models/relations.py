"""Relations of rows that are spread over shards.

Django prefetches a list of instances with one query that is routed by the first of
them. Where the list spans shards, each shard's instances must be asked on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

from django.db.models import Model
from django.db.models.constants import LOOKUP_SEP
from django.db.models.fields.related import lazy_related_operation  # type: ignore[attr-defined]  # not in the stubs
from django.db.models.fields.related_descriptors import (
    ForwardManyToOneDescriptor,
    ForwardOneToOneDescriptor,
    ManyToManyDescriptor,
    ReverseManyToOneDescriptor,
    ReverseOneToOneDescriptor,
)
from django.utils.functional import cached_property

from sharded_orm.exceptions import CrossShardRelation, ShardKeyChanged


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
    """Prefetches shard by shard, and matches rows on the shard as well as the value.

    The list may span shards wherever Django made it: below rows of the global database,
    or by ``prefetch_related_objects``. Ids that count per shard repeat on every shard.
    """

    get_queryset: Callable[..., Any]

    def _stays_on_shard(self) -> bool:
        return True

    def get_prefetch_querysets(self, instances: Sequence[Any], querysets: Any = None) -> Any:
        fetch = super().get_prefetch_querysets  # type: ignore[misc]  # not in the stubs
        groups = by_alias(instances)
        if len(groups) < 2 or not self._stays_on_shard():
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


class _Forward(_PerShard):
    field: Any

    def _stays_on_shard(self) -> bool:
        from sharded_orm.models.options import shard_options

        return shard_options(self.field.remote_field.model) is not None

    def __set__(self, instance: Any, value: Any) -> None:
        if value is not None and not instance._state.adding:
            self._refuse_other_key(instance, value)
        super().__set__(instance, value)  # type: ignore[misc]  # not in the stubs

    def _refuse_other_key(self, instance: Any, value: Any) -> None:
        # save() refuses it as well, but ``person.albums.add(album)`` does not save: it
        # updates the column by a plain query.
        from sharded_orm.models.options import describe, shard_options

        options = shard_options(type(instance))
        name = self.field.attname
        if options is None or options.key is not self.field or name not in instance.__dict__:
            return
        target: Any = self.field.target_field  # type: ignore[union-attr]  # a relation has one
        key = getattr(value, target.attname, None)
        if key != instance.__dict__[name]:
            raise ShardKeyChanged(
                f"{describe(instance)} has the shard key {name}={instance.__dict__[name]!r} and"
                f" cannot be given {key!r}. The key of a row never changes: create the row under"
                " the new key and delete this one."
            )


class ShardedForwardManyToOneDescriptor(_Forward, ForwardManyToOneDescriptor):  # type: ignore[type-arg]  # generic in the stubs only
    """``photo.album`` and its prefetch over several shards."""


class ShardedForwardOneToOneDescriptor(_Forward, ForwardOneToOneDescriptor):  # type: ignore[type-arg]  # generic in the stubs only
    """The one-to-one form."""


class ShardedReverseOneToOneDescriptor(_PerShard, ReverseOneToOneDescriptor):  # type: ignore[type-arg]  # generic in the stubs only
    """The same from the other side of a one-to-one."""


class ShardedReverseManyToOneDescriptor(ReverseManyToOneDescriptor):  # type: ignore[type-arg]  # generic in the stubs only
    """``album.photos`` and its prefetch over several shards."""

    @cached_property
    def related_manager_cls(self) -> Any:
        return _per_shard_manager(super().related_manager_cls)


class ShardedManyToManyDescriptor(ManyToManyDescriptor):  # type: ignore[type-arg]  # generic in the stubs only
    """``photo.tags`` and its prefetch over several shards; both sides."""

    @cached_property
    def related_manager_cls(self) -> Any:
        return _per_shard_manager(super().related_manager_cls)


def _per_shard_manager(manager: type[Any]) -> type[Any]:
    made: Any = type(manager.__name__, (_PerShard, manager), {})

    # Django compares by primary keys, and ids that count per shard are those of other rows here.
    # add() asks the router, which refuses it.
    def remove(self: Any, *objs: Any, **kwargs: Any) -> None:
        _refuse_elsewhere(self.instance, objs)
        super(made, self).remove(*objs, **kwargs)

    def set(self: Any, objs: Any, **kwargs: Any) -> None:
        objs = tuple(objs)
        _refuse_elsewhere(self.instance, objs)
        super(made, self).set(objs, **kwargs)

    for method in (remove, set):
        if hasattr(manager, method.__name__):
            method.alters_data = True  # type: ignore[attr-defined]  # as Django marks it
            setattr(made, method.__name__, method)
    return cast("type[Any]", made)


def _refuse_elsewhere(instance: Any, others: Sequence[Any]) -> None:
    """Raise if one of ``others`` is of the same group as ``instance``, on another shard."""
    from sharded_orm.models.options import colocated_alias, describe, shard_options

    options, home = shard_options(type(instance)), instance._state.db
    if options is None:
        return
    for other in others:
        alias = colocated_alias(options, other) if isinstance(other, Model) else None
        if alias is not None and alias != home:
            raise CrossShardRelation(
                f"{describe(other)} is on {alias!r} and {describe(instance)} on {home!r}: rows of"
                " one group can only be related on one shard. Leave it out."
            )


_FORWARD: dict[type, type] = {
    ForwardManyToOneDescriptor: ShardedForwardManyToOneDescriptor,
    ForwardOneToOneDescriptor: ShardedForwardOneToOneDescriptor,
}


def install_descriptors(model: type[Model]) -> None:
    """Give both sides of a sharded model's relations the descriptors above."""
    own: tuple[Any, ...] = (*model._meta.local_fields, *model._meta.local_many_to_many)
    for field in own:
        if field.remote_field is None:
            continue
        descriptor = model.__dict__.get(field.name)
        if type(descriptor) in _FORWARD:
            setattr(model, field.name, _FORWARD[type(descriptor)](field))
        elif type(descriptor) is ManyToManyDescriptor:
            setattr(model, field.name, ShardedManyToManyDescriptor(field.remote_field))
        # Django installs the other side when both models are there; so do we, after it.
        lazy_related_operation(_install_reverse, model, field.remote_field.model, field=field)


def _install_reverse(model: Any, related: Any, *, field: Any) -> None:
    accessor = field.remote_field.get_accessor_name()
    if accessor is None or not getattr(related, "_is_sharded", False):
        return
    descriptor = related.__dict__.get(accessor)
    if type(descriptor) is ReverseOneToOneDescriptor:
        setattr(related, accessor, ShardedReverseOneToOneDescriptor(descriptor.related))
    elif type(descriptor) is ReverseManyToOneDescriptor:
        setattr(related, accessor, ShardedReverseManyToOneDescriptor(descriptor.rel))
    elif type(descriptor) is ManyToManyDescriptor:
        setattr(related, accessor, ShardedManyToManyDescriptor(descriptor.rel, reverse=True))
