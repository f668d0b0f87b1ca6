"""Relations of rows that are spread over shards: descriptors for both of their sides.

Django prefetches a list of instances with one query that is routed by the first of
them. Where the list spans shards, each shard's instances must be asked on their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from django.db.models import Model, QuerySet
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
from sharded_orm.models.querysets.prefetches import alias_of, split_by_alias
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.relations.managers import (
    Beside,
    FromOutside,
    ManyBeside,
    NullableBeside,
    NullableFromOutside,
)
from sharded_orm.models.sharding.options import describe, group_of, options_of


class _PerShard:
    """Prefetches shard by shard, and matches rows on the shard as well as the value.

    The list may span shards wherever Django made it: below rows of the global database,
    or by ``prefetch_related_objects``. Ids that count per shard repeat on every shard.
    """

    get_queryset: Callable[..., Any]

    def _sides(self) -> tuple[Any, Any]:
        """The models of the instances and of the related rows."""
        raise NotImplementedError

    def _stays_on_shard(self) -> bool:
        one, other = self._sides()
        return group_of(one) == group_of(other)

    def get_prefetch_querysets(self, instances: Sequence[Any], querysets: Any = None) -> Any:
        fetch = super().get_prefetch_querysets  # type: ignore[misc]  # not in the stubs
        # Django notes the instance in the caller's own queryset, which then would go to its shard.
        querysets = [queryset._chain() for queryset in querysets] if querysets else querysets
        if not self._stays_on_shard():
            return self._refuse_several_rows(fetch(instances, querysets))
        groups = split_by_alias(instances)
        if len(groups) < 2:
            return fetch(instances, querysets)
        parts = [fetch(group, querysets) for group in groups]
        _, rel_attr, instance_attr, *rest = parts[0]
        rows = list(chain.from_iterable(part[0] for part in parts))
        return (
            rows,
            lambda row: (row._state.db, rel_attr(row)),
            lambda instance: (alias_of(instance), instance_attr(instance)),
            *rest,
        )

    def _refuse_several_rows(self, part: Any) -> Any:
        """Refuses several rows where one is looked for: what is unique is so on each shard."""
        rows, rel_attr, instance_attr, single, *rest = part
        model = self._sides()[1]
        if not single or group_of(model) is None:
            return part
        rows = list(rows)
        for value, number in Counter(map(rel_attr, rows)).items():
            if number > 1:
                aliases = sorted(str(row._state.db) for row in rows if rel_attr(row) == value)
                raise CrossShardRelation(
                    f"{number} rows of {model.__name__} on {aliases!r} have the value {value!r}, and one"
                    " is looked for. Prefetch with a queryset that names the shard or the key."
                )
        return rows, rel_attr, instance_attr, single, *rest


class _ByConditions(_PerShard):
    """Looks for the one related row, where the instance does not tell the shard."""

    def get_queryset(self, **hints: Any) -> Any:
        # Overrides the descriptor's get_queryset, which asks the base manager; that does not route
        # itself, and the router is not told which relation the instance is of.
        rows = super().get_queryset(**hints)
        model = self._sides()[1]
        if self._stays_on_shard() or group_of(model) is None or type(rows) is not QuerySet:
            return rows
        return ShardedQuerySet(model, hints=hints)


class _Forward(_ByConditions):
    field: Any

    def _sides(self) -> tuple[Any, Any]:
        return self.field.model, self.field.remote_field.model

    def __set__(self, instance: Any, value: Any) -> None:
        if value is not None and not instance._state.adding:
            self._refuse_other_key(instance, value)
        super().__set__(instance, value)  # type: ignore[misc]  # not in the stubs

    def _refuse_other_key(self, instance: Any, value: Any) -> None:
        # save() refuses it as well, but ``person.albums.add(album)`` does not save: it
        # updates the column by a plain query.
        options = options_of(instance)
        if options is None or options.key is not self.field:
            return
        field: Any = self.field  # Narrowed to what a key may be; it is a relation.
        name = field.attname
        key = getattr(value, field.target_field.attname, None)
        # Asks the database for a key that was deferred.
        if key != getattr(instance, name):
            raise ShardKeyChanged(
                f"{describe(instance)} has the shard key {name}={instance.__dict__[name]!r} and"
                f" cannot be given {key!r}. The key of a row never changes: create the row under"
                " the new key and delete this one."
            )


class ShardedForwardManyToOneDescriptor(_Forward, ForwardManyToOneDescriptor):  # type: ignore[type-arg]  # generic in the stubs only
    """``photo.album`` and its prefetch over several shards."""


class ShardedForwardOneToOneDescriptor(_Forward, ForwardOneToOneDescriptor):  # type: ignore[type-arg]  # generic in the stubs only
    """The one-to-one form."""


class ShardedReverseOneToOneDescriptor(_ByConditions, ReverseOneToOneDescriptor):  # type: ignore[type-arg]  # generic in the stubs only
    """The same from the other side of a one-to-one."""

    def _sides(self) -> tuple[Any, Any]:
        return self.related.model, self.related.related_model


class ShardedReverseManyToOneDescriptor(ReverseManyToOneDescriptor):  # type: ignore[type-arg]  # generic in the stubs only
    """``album.photos`` and its prefetch over several shards."""

    @cached_property
    def related_manager_cls(self) -> Any:
        return _related_manager(super().related_manager_cls, self.rel, reverse=True)


class ShardedManyToManyDescriptor(ManyToManyDescriptor):  # type: ignore[type-arg]  # generic in the stubs only
    """``photo.tags`` and its prefetch over several shards; both sides."""

    @cached_property
    def related_manager_cls(self) -> Any:
        return _related_manager(super().related_manager_cls, self.rel, reverse=self.reverse)


class _RelatedManager(_PerShard):
    """What the related managers of all relations have in common."""

    instance: Any
    _django: type[Any]
    _rel: Any
    _reverse: bool

    def __call__(self, *, manager: str) -> Any:
        # Overrides __call__ of Django's related managers, which makes another of Django's.
        other = super().__call__(manager=manager)  # type: ignore[misc]  # of Django's manager
        return _related_manager(type(other), self._rel, reverse=self._reverse)(self.instance)

    def _apply_rel_filters(self, queryset: Any) -> Any:
        # Overrides _apply_rel_filters of Django's related managers, which notes the instance in
        # the queryset itself. It may be the caller's: prefetch_one_level() hands in that of Prefetch.
        return super()._apply_rel_filters(queryset._chain())  # type: ignore[misc]  # of Django's manager

    def _sides(self) -> tuple[Any, Any]:
        sides = self._rel.model, self._rel.related_model
        return sides if self._reverse else sides[::-1]


def _related_manager(manager: type[Any], rel: Any, *, reverse: bool) -> type[Any]:
    """Our manager in front of the one that Django has made for ``rel``.

    :param reverse: whether it gives the rows that have the field, or those it refers to.
    """
    same_group = group_of(rel.model) == group_of(rel.related_model)
    bases: tuple[type[Any], ...]
    if rel.field.many_to_many:
        # A table between two groups is refused by a check (E008), and by the router.
        bases = (ManyBeside,) if same_group else ()
    elif rel.field.null:
        bases = (NullableBeside if same_group else NullableFromOutside,)
    else:
        bases = (Beside if same_group else FromOutside,)
    attributes = {"_django": manager, "_rel": rel, "_reverse": reverse}
    return type(manager.__name__, (_RelatedManager, *bases, manager), attributes)


_FORWARD: dict[type, type] = {
    ForwardManyToOneDescriptor: ShardedForwardManyToOneDescriptor,
    ForwardOneToOneDescriptor: ShardedForwardOneToOneDescriptor,
}


def install_descriptors(model: type[Model]) -> None:
    """Give both sides of a sharded model's relations the descriptors above.

    Also where the other side is a model of the global database, plain ones included: only
    the descriptor knows which relation it is.
    """
    fields: tuple[Any, ...] = (*model._meta.local_fields, *model._meta.local_many_to_many)
    for field in fields:
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
    if accessor is None:
        return
    # Django gives it to the concrete model of a proxy, if it is that of a foreign key.
    for holder in dict.fromkeys((related, related._meta.concrete_model)):
        descriptor = holder.__dict__.get(accessor)
        if type(descriptor) is ReverseOneToOneDescriptor:
            setattr(holder, accessor, ShardedReverseOneToOneDescriptor(descriptor.related))
        elif type(descriptor) is ReverseManyToOneDescriptor:
            setattr(holder, accessor, ShardedReverseManyToOneDescriptor(descriptor.rel))
        elif type(descriptor) is ManyToManyDescriptor:
            setattr(holder, accessor, ShardedManyToManyDescriptor(descriptor.rel, reverse=True))
