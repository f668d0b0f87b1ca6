"""System checks of objects and mappings. No check queries a database.

The fields that are kept in the bodies of objects are checked as Django checks model fields, with
the ids of Django.

===========================  =========================================================
``sharded_orm_objects.E001``  a reference or mapping names no class of objects
``sharded_orm_objects.E002``  a lookup table of objects is in a group that is not "modulo"
===========================  =========================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig
from django.core import checks

from sharded_orm import runtime
from sharded_orm.checks.selection import models_to_check
from sharded_orm.contrib.objects.fields import Ref
from sharded_orm.contrib.objects.mapping import MappingEntry
from sharded_orm.contrib.objects.object_lookup import ObjectLookup
from sharded_orm.contrib.objects.sharded_object import ShardedObject
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.routing.modulo import ModuloStrategy


@checks.register(checks.Tags.models)
def check_objects(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Check the fields of objects and the classes that mappings relate."""
    return [message for model in models_to_check(app_configs) for message in _check(model)]


def _check(model: Any) -> Iterator[checks.CheckMessage]:
    if issubclass(model, ShardedObject) and not model._meta.proxy:
        for field in model.body_fields():
            yield from field.check()
            if isinstance(field, Ref):
                yield from _check_class(field, "target", field)
    elif issubclass(model, ObjectLookup):
        yield from _check_strategy(model)
    elif issubclass(model, MappingEntry):
        for side in ("near_class", "far_class"):
            yield from _check_class(model._sides, side, model)


def _check_strategy(model: Any) -> Iterator[checks.CheckMessage]:
    options = shard_options(model)
    if options is None or options.group not in runtime.topology().groups:
        return  # sharded_orm.E002 says so.
    if not isinstance(runtime.strategy(options.group), ModuloStrategy):
        yield checks.Error(
            f"Its group {options.group!r} has another strategy than 'modulo', by which values find"
            " their shards.",
            hint="Name a group with this strategy in LookupMeta.",
            obj=model,
            id="sharded_orm_objects.E002",
        )


def _check_class(owner: Any, name: str, obj: Any) -> Iterator[checks.CheckMessage]:
    try:
        target = getattr(owner, name)
    except (LookupError, ValueError) as exc:
        target = exc
    if not isinstance(target, type) or not issubclass(target, ShardedObject):
        yield checks.Error(
            f"It refers to {target!r}, which is no installed class of objects.",
            hint="Name a class that derives from ShardedObject, or its label.",
            obj=obj,
            id="sharded_orm_objects.E001",
        )
