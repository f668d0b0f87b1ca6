"""Helpers for ``prefetch_related()`` of instances on several shards.

Django sends each prefetch to one database. So the instances are split into a list for each
database. The lookups (the arguments of ``prefetch_related()``) are split into those that may lead
to another shard group, and all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.db.models import Model
from django.db.models.constants import LOOKUP_SEP
from django.db.models.fields.related_descriptors import ForwardManyToOneDescriptor

from sharded_orm.models.sharding.options import group_of, shard_options
from sharded_orm.models.sharding.row_placement import colocated_alias

_is_split: ContextVar[bool] = ContextVar("sharded_orm_split_prefetch", default=False)


@contextmanager
def one_of_several(several: bool = True) -> Iterator[None]:
    """Context manager for one part of a prefetch, which is for the instances of one shard.

    In the block, :func:`is_one_of_several` returns True. So code there can notice that the prefetch
    has other parts, for the instances of other shards.

    :param several: whether the prefetch has other parts. If False, the block has no effect.
    """
    token = _is_split.set(several or _is_split.get())
    try:
        yield
    finally:
        _is_split.reset(token)


def is_one_of_several() -> bool:
    """Whether this code runs in a block of :func:`one_of_several`."""
    return _is_split.get()


def split_by_alias(instances: Sequence[Any]) -> list[list[Any]]:
    """Split ``instances`` into several lists, one for each database that stores some of them."""
    groups: dict[str | None, list[Any]] = {}
    for instance in instances:
        groups.setdefault(alias_of(instance), []).append(instance)
    return list(groups.values())


def alias_of(instance: Any) -> str | None:
    """Return the alias of the database that stores ``instance``.

    For a new row of a sharded model, return the alias of the shard of its key, or None if the key
    has no shard yet.
    """
    options = shard_options(type(instance))
    if options is None:
        return instance._state.db  # type: ignore[no-any-return]  # missing in Django's type stubs
    return colocated_alias(options, instance)


def split_lookups(model: type[Model], lookups: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split ``lookups`` into two lists: those that may leave the shard group, and all others.

    A lookup may leave the group if it begins with a foreign key to another group, or with a generic
    foreign key.

    :param lookups: the arguments of ``prefetch_related()``.
    """
    other_group: list[Any] = []
    same_group: list[Any] = []
    for lookup in lookups:
        path = getattr(lookup, "prefetch_through", lookup)
        # Like Django, look for the attribute of the model, such as Photo.album, and not for the
        # field. A lookup begins with the name of the attribute, and the field may have another
        # name.
        descriptor = getattr(model, path.split(LOOKUP_SEP)[0], None)
        leaves_group = isinstance(descriptor, ForwardManyToOneDescriptor) and (
            group_of(descriptor.field.remote_field.model) != group_of(model)
        )
        # A generic foreign key may refer to rows of any group. Its own code splits the prefetch by
        # shard, so it must get the instances of all shards together.
        leaves_group = leaves_group or getattr(descriptor, "leads_anywhere", False)
        (other_group if leaves_group else same_group).append(lookup)
    return other_group, same_group
