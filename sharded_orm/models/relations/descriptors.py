"""Descriptors for both sides of the relations of sharded models.

Django prefetches for a list of instances with one query to one database. The descriptors of this
module send one query to each shard that has some of the instances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from django.db.models import Model, QuerySet
from django.db.models.fields.related import lazy_related_operation
from django.db.models.fields.related_descriptors import (
    ForwardManyToOneDescriptor,
    ForwardOneToOneDescriptor,
    ManyToManyDescriptor,
    ReverseManyToOneDescriptor,
    ReverseOneToOneDescriptor,
)
from django.utils.functional import cached_property

from sharded_orm import compat
from sharded_orm.exceptions import CrossShardRelation
from sharded_orm.models.querysets.prefetch_refusals import refuse_sets
from sharded_orm.models.querysets.prefetches import (
    alias_of,
    is_one_of_several,
    one_of_several,
    split_by_alias,
)
from sharded_orm.models.querysets.sharded import ShardedQuerySet
from sharded_orm.models.relations.managers import Beside, ManyBeside, NullableBeside
from sharded_orm.models.relations.outside_managers import FromOutside, NullableFromOutside
from sharded_orm.models.relations.set_values import check_set_values
from sharded_orm.models.sharding.bound_key import EXEMPT
from sharded_orm.models.sharding.bound_query import BoundKeyQuery
from sharded_orm.models.sharding.bound_rows import refuse_other_key
from sharded_orm.models.sharding.key_errors import key_of_row_changed
from sharded_orm.models.sharding.options import group_of, options_of, shard_options
from sharded_orm.models.sharding.rewritten_keys import note_rewritten_key
from sharded_orm.models.sharding.same_key import key_for_related, known_key, refuse_two_keys


class _PerShard:
    """A mixin that prefetches separately for each shard.

    The instances of a prefetch can be on several shards, for example, if an outer prefetch for
    global rows has read them. Rows on two shards may have the same id. So a related row is matched
    with an instance only if both are on the same shard.
    """

    get_queryset: Callable[..., Any]

    def _sides(self) -> tuple[Any, Any]:
        """Return the model of the instances, and the model of the related rows."""
        raise NotImplementedError

    def _stays_on_shard(self) -> bool:
        model, related_model = self._sides()
        return group_of(model) == group_of(related_model)

    def get_prefetch_querysets(self, instances: Sequence[Any], querysets: Any = None) -> Any:
        fetch = super().get_prefetch_querysets  # type: ignore[misc]  # missing in Django's type stubs
        if not self._stays_on_shard():
            return self._refuse_several_rows(
                self._checked(fetch(instances, _copies(querysets)), None)
            )
        groups = split_by_alias(instances)
        group = group_of(self._sides()[0])
        with one_of_several(len(groups) > 1):
            parts = [self._checked(fetch(rows, _copies(querysets)), group) for rows in groups]
        if len(parts) < 2:
            return parts[0]
        _, rel_attr, instance_attr, *cache_arguments = parts[0]
        rows = list(chain.from_iterable(part[0] for part in parts))
        return (
            rows,
            lambda row: (row._state.db, rel_attr(row)),
            lambda instance: (alias_of(instance), instance_attr(instance)),
            *cache_arguments,
        )

    def _checked(self, part: Any, group: str | None) -> Any:
        """Return ``part``, or raise an error if its query computes over the rows of several shards.

        For example, the query has ``union()`` or a window function, from a ``Prefetch`` object.
        Each shard would compute this only for its rows, and the result would be wrong.

        :param part: the prefetched rows of one shard, and the functions that match them with the
            instances, as ``get_prefetch_querysets()`` returns them.
        :param group: the group of the instances if the related rows are on the same shards as the
            instances; None if they are elsewhere.
        """
        query = getattr(part[0], "query", None)
        if query is not None and is_one_of_several() and group_of(self._sides()[0]) is not None:
            refuse_sets(query, group)
        return part

    def _refuse_several_rows(self, part: Any) -> Any:
        """Raise an error if several rows match an instance that can have only one related row.

        For example, a user is a global row, and the user's profile is on a shard. A unique
        constraint holds only within one shard, so two shards can have a profile of the same user.
        """
        rows, rel_attr, instance_attr, single, *cache_arguments = part
        if not single or group_of(self._sides()[1]) is None:
            return part
        rows = list(rows)
        refuse_equal_values(rows, rel_attr)
        return rows, rel_attr, instance_attr, single, *cache_arguments


def _copies(querysets: Sequence[Any] | None) -> list[Any] | None:
    """Return copies of the querysets of a ``Prefetch`` object, each with its own dict of hints.

    Django stores an instance in the dict of hints, and the router chooses the shard by this
    instance. If the copies for two shards shared a dict, the instance of the second shard would
    replace the one of the first, and both queries would be sent to the second shard. And the
    queryset in the project's ``Prefetch`` object would keep the hint.
    """
    if not querysets:
        return None
    copies = [queryset._chain() for queryset in querysets]
    for queryset in copies:
        queryset._hints = dict(queryset._hints)
    return copies


def refuse_equal_values(rows: Sequence[Any], value_of: Callable[[Any], Any]) -> None:
    """Raise :exc:`CrossShardRelation` if rows of several shards are related to the same instance.

    This is called for relations in which an instance can have only one related row, such as
    ``user.profile``.

    :param rows: the rows of a prefetch.
    :param value_of: a function that returns the value by which a row is related to an instance.
    """
    for value, number in Counter(map(value_of, rows)).items():
        if number < 2:
            continue
        equal = [row for row in rows if value_of(row) == value]
        aliases = sorted({str(row._state.db) for row in equal})
        # A join may return a row of one shard twice. Ignore this, because it also happens in one
        # database.
        if len(aliases) > 1:
            raise CrossShardRelation(
                f"{number} rows of {equal[0].__class__.__name__} on {aliases!r} have the value"
                f" {value!r}, and one is looked for. Prefetch with a queryset that names the shard or"
                " the key."
            )


class _ByConditions(_PerShard):
    """A mixin for relations to a single row, such as ``photo.album`` or ``user.profile``.

    The related row may be of another group than the instance. Then its shard is not the one of the
    instance, and is determined by the conditions of the query instead.
    """

    def get_queryset(self, **hints: Any) -> Any:
        # Overrides get_queryset() of Django's descriptor. Django's queryset would get its alias
        # from the router. But Django does not tell the router which relation is followed, so the
        # router could return the wrong shard.
        if (instance := hints.get("instance")) is not None:
            refuse_other_key(instance)
        rows = super().get_queryset(**hints)
        model = self._sides()[1]
        if type(rows) is QuerySet and not self._stays_on_shard() and group_of(model) is not None:
            rows = ShardedQuerySet(model, hints=hints)
        if isinstance(rows.query, BoundKeyQuery):
            # Do not filter by the bound key (the key that bound() sets for all queries), because
            # the referenced row may have a different key.
            rows.query.bound_key = EXEMPT
        return rows if instance is None else compat.copy_fetch_mode(rows, instance)


class _Forward(_ByConditions):
    field: Any

    def _sides(self) -> tuple[Any, Any]:
        return self.field.model, self.field.remote_field.model

    def __set__(self, instance: Any, value: Any) -> None:
        if value is not None and not instance._state.adding:
            self._refuse_change_of_key(instance, value)
        if isinstance(value, Model):
            refuse_two_keys(self.field, instance, value)
        super().__set__(instance, value)  # type: ignore[misc]  # missing in Django's type stubs

    def _refuse_change_of_key(self, instance: Any, value: Any) -> None:
        # Refuse a change of the shard key as soon as it is made in memory. save() would refuse it
        # later. But person.albums.add(album) does not call save(). It updates the column of the key
        # directly.
        options = options_of(instance)
        if options is None or options.key is not self.field:
            return
        # The annotation Any is for the type checker, which does not know that this shard key is a
        # relation.
        field: Any = self.field
        name = field.attname
        key = getattr(value, field.target_field.attname, None)
        # getattr() loads the key if it is deferred; ``instance.__dict__`` would not have it.
        if key != getattr(instance, name):
            raise key_of_row_changed(instance, name, instance.__dict__[name], key)


class ShardedForwardManyToOneDescriptor(_Forward, ForwardManyToOneDescriptor):  # type: ignore[type-arg]  # the class is generic only in the type stubs
    """The descriptor of a foreign key, such as ``photo.album``.

    It can prefetch for instances on several shards.
    """


class ShardedForwardOneToOneDescriptor(_Forward, ForwardOneToOneDescriptor):  # type: ignore[type-arg]  # the class is generic only in the type stubs
    """The descriptor of a one-to-one field, such as ``profile.user``.

    It can prefetch for instances on several shards.
    """


class ShardedReverseOneToOneDescriptor(_ByConditions, ReverseOneToOneDescriptor):  # type: ignore[type-arg]  # the class is generic only in the type stubs
    """The descriptor of the other side of a one-to-one field, such as ``user.profile``."""

    def _sides(self) -> tuple[Any, Any]:
        return self.related.model, self.related.related_model

    def __get__(self, instance: Any, cls: Any = None) -> Any:
        # Overrides ReverseOneToOneDescriptor.__get__(). A related row with another shard key than
        # the instance counts as missing. Such a row may have been read now, or earlier by a
        # prefetch, which has stored it in the cache of the instance.
        row = super().__get__(instance, cls)
        if instance is not None and not self._has_key_of(instance, row):
            self.related.set_cached_value(instance, None)
            # The cache now contains None. So this second call raises DoesNotExist.
            return super().__get__(instance, cls)
        return row

    def _has_key_of(self, instance: Any, row: Any) -> bool:
        options = shard_options(row.__class__)
        keys = key_for_related(row.__class__, self.related.field, instance, load=True).values()
        return options is None or all(
            known_key(options, row, load=True) in (None, key) for key in keys
        )

    def __set__(self, instance: Any, value: Any) -> None:
        if isinstance(value, Model):
            refuse_two_keys(self.related.field, value, instance)
        super().__set__(instance, value)


class ShardedReverseManyToOneDescriptor(ReverseManyToOneDescriptor):  # type: ignore[type-arg]  # the class is generic only in the type stubs
    """The descriptor of the other side of a foreign key, such as ``album.photos``.

    It can prefetch for instances on several shards.
    """

    @cached_property
    def related_manager_cls(self) -> Any:
        manager = super().related_manager_cls
        return make_related_manager(manager, self.rel, _mixins_of(self.rel), reverse=True)


class ShardedManyToManyDescriptor(ManyToManyDescriptor):  # type: ignore[type-arg]  # the class is generic only in the type stubs
    """The descriptor of both sides of a many-to-many field, such as ``photo.tags`` and ``tag.photos``.

    It can prefetch for instances on several shards.
    """

    @cached_property
    def related_manager_cls(self) -> Any:
        manager = super().related_manager_cls
        mixins = _mixins_of(self.rel)
        return make_related_manager(manager, self.rel, mixins, reverse=self.reverse)


#: Django matches a prefetched row with the instances that have the same value as the row. A row
#: with a wrong shard key gets this object as its value, so that it matches no instance.
_UNRELATED = object()


class _RelatedManager(_PerShard):
    """The base class of all related managers that :func:`make_related_manager` returns."""

    instance: Any
    model: Any
    _django: type[Any]
    _rel: Any
    _mixins: tuple[type[Any], ...]
    _reverse: bool

    def __init__(self, instance: Any = None) -> None:
        if instance is not None:
            refuse_other_key(instance)
        super().__init__(instance)  # type: ignore[call-arg]  # Django's manager class has this method

    def __call__(self, *, manager: str) -> Any:
        # Overrides __call__() of Django's managers, which returns a manager without the methods of
        # this module.
        other = super().__call__(manager=manager)  # type: ignore[misc]  # Django's manager class has this method
        own = make_related_manager(type(other), self._rel, self._mixins, reverse=self._reverse)
        return own(self.instance)

    def _apply_rel_filters(self, queryset: Any) -> Any:
        # Overrides _apply_rel_filters() of Django's managers, which changes the hints of the
        # queryset. Pass a copy, because the queryset may belong to a Prefetch object of the
        # project. Also filter by the shard key of the instance, because related rows have this key.
        rows = queryset._chain()
        if key := key_for_related(queryset.model, self._rel.field, self.instance):
            rows = rows.filter(**key)
        return super()._apply_rel_filters(rows)  # type: ignore[misc]  # Django's manager class has this method

    def get_prefetch_querysets(self, instances: Sequence[Any], querysets: Any = None) -> Any:
        # Related rows have the shard key of their instance. A prefetched row with another shard key
        # belongs to no instance, even if its foreign key contains the id of an instance. So such a
        # row gets a value that matches no instance.
        part = super().get_prefetch_querysets(instances, querysets)
        rows, value_of, value_of_instance, *cache_arguments = part
        keys = {
            value_of_instance(instance): key
            for instance in instances
            for key in key_for_related(self.model, self._rel.field, instance).values()
        }
        options = shard_options(self.model)
        if not keys or options is None:
            return part

        def value_with_key(row: Any) -> Any:
            value, key = value_of(row), known_key(options, row)
            return value if key is None or keys.get(value, key) == key else _UNRELATED

        return rows, value_with_key, value_of_instance, *cache_arguments

    def _sides(self) -> tuple[Any, Any]:
        sides = self._rel.model, self._rel.related_model
        return sides if self._reverse else sides[::-1]


def make_related_manager(
    manager: type[Any], rel: Any, mixins: tuple[type[Any], ...], *, reverse: bool
) -> type[Any]:
    """Return a subclass of Django's related manager that works on shards.

    :param manager: the class of the related manager that Django has made for ``rel``.
    :param mixins: classes of ``sharded_orm.models.relations`` that override methods of ``manager``.
    :param reverse: True if the manager belongs to the model to which the field refers, such as
        ``album.photos``. False if it belongs to the model that declares the field, such as
        ``photo.tags``.
    """
    attributes = {"_django": manager, "_rel": rel, "_mixins": mixins, "_reverse": reverse}
    return type(manager.__name__, (_RelatedManager, *mixins, manager), attributes)


def _mixins_of(rel: Any) -> tuple[type[Any], ...]:
    same_group = group_of(rel.model) == group_of(rel.related_model)
    if rel.field.many_to_many:
        # A many-to-many table between two groups needs no mixin, because a system check (E008) and
        # the router refuse it.
        return (ManyBeside,) if same_group else ()
    if rel.field.null:
        return (NullableBeside if same_group else NullableFromOutside,)
    return (Beside if same_group else FromOutside,)


_FORWARD: dict[type, type] = {
    ForwardManyToOneDescriptor: ShardedForwardManyToOneDescriptor,
    ForwardOneToOneDescriptor: ShardedForwardOneToOneDescriptor,
}


def install_descriptors(model: type[Model]) -> None:
    """Install this module's descriptors on both sides of the relations of a sharded model.

    The model to which a relation refers gets a descriptor even if it is a global or plain Django
    model. Django's own descriptor would ask the router for the database. But Django does not tell
    the router which relation is followed, so the router could return the wrong shard.
    """
    fields: tuple[Any, ...] = (*model._meta.local_fields, *model._meta.local_many_to_many)
    for field in fields:
        if field.remote_field is None:
            continue
        check_set_values(field)
        note_rewritten_key(field)
        descriptor = model.__dict__.get(field.name)
        if type(descriptor) in _FORWARD:
            setattr(model, field.name, _FORWARD[type(descriptor)](field))
        elif type(descriptor) is ManyToManyDescriptor:
            setattr(model, field.name, ShardedManyToManyDescriptor(field.remote_field))
        # Call _install_reverse() after both models are loaded. By then, Django has installed its
        # own descriptor on the other side.
        lazy_related_operation(_install_reverse, model, field.remote_field.model, field=field)


def _install_reverse(model: Any, related: Any, *, field: Any) -> None:
    accessor = field.remote_field.get_accessor_name()
    if accessor is None:
        return
    # If a foreign key refers to a proxy model, Django installs the other side's descriptor on the
    # concrete model. So look for the descriptor on both models.
    for holder in dict.fromkeys((related, related._meta.concrete_model)):
        descriptor = holder.__dict__.get(accessor)
        if type(descriptor) is ReverseOneToOneDescriptor:
            setattr(holder, accessor, ShardedReverseOneToOneDescriptor(descriptor.related))
        elif type(descriptor) is ReverseManyToOneDescriptor:
            setattr(holder, accessor, ShardedReverseManyToOneDescriptor(descriptor.rel))
        elif type(descriptor) is ManyToManyDescriptor:
            setattr(holder, accessor, ShardedManyToManyDescriptor(descriptor.rel, reverse=True))
